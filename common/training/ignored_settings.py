"""Settings of a training that change nothing beside others, for the warning of a run."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator


def is_changed(settings: object, name: str) -> bool:
    """Returns True if a field of a dataclass has not its default."""
    defaults = {field.name: field.default for field in dataclasses.fields(settings)}
    return getattr(settings, name) != defaults[name]


def ignored_data_settings(settings: object) -> Iterator[str]:
    """Yields the settings of the texts that their data set does not have, with the reason.

    Args:
        settings: a dataclass with ``dataset``, ``dataset_dir`` and ``synthetic_like``.
    """
    is_synthetic = settings.dataset == "synthetic"
    if is_synthetic and is_changed(settings, "dataset_dir"):
        yield "dataset_dir: synthetic texts are made up"
    if not is_synthetic and is_changed(settings, "synthetic_like"):
        yield f"synthetic_like: the data set is {settings.dataset}"
