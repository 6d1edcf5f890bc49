"""Fills in HTML templates: whatever is put into one is text, and what it means to a browser is
escaped."""

from __future__ import annotations

from pathlib import Path


def rendered(template: Path, **values: object) -> str:
    """Returns a template of Jinja with its values; it may include its neighbours."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(template.parent),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    return environment.get_template(template.name).render(**values)
