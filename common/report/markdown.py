"""An executed notebook as text: Markdown with its outputs, then what pandoc makes of that."""

from __future__ import annotations

import base64
import re
from pathlib import Path

from common.errors import RunFailed

FILTER = Path(__file__).with_name("filter.lua")
MARKDOWN = "markdown+tex_math_dollars+pipe_tables+link_attributes-yaml_metadata_block"
MARKDOWN += "-implicit_figures"
PICTURES = {"image/svg+xml": "svg", "image/png": "png"}


def notebook_markdown(notebook: Path, folder: Path) -> str:
    """Returns a notebook's text and outputs, without code; writes its figures to ``folder``."""
    import nbformat
    from nbconvert import MarkdownExporter

    content = nbformat.read(notebook, as_version=4)
    (folder / notebook.stem).mkdir(exist_ok=True)
    for place, cell in enumerate(content.cells):
        for number, output in enumerate(cell.get("outputs", [])):
            kind = next((kind for kind in PICTURES if kind in output.get("data", {})), None)
            if kind:
                name = f"{notebook.stem}/{place}-{number}.{PICTURES[kind]}"
                _write_picture(folder / name, output.data[kind])
                output.data = {"text/markdown": _figure(name, output.metadata.get(kind, {}))}
                output.metadata = {}
    exporter = MarkdownExporter(exclude_input=True, exclude_output_prompt=True)
    return exporter.from_notebook_node(content)[0]


def pandoc(markdown: str, to: str, stem: str, *options: str) -> str:
    """Returns Markdown as HTML or Typst. Ids of headings begin with ``stem``."""
    import pypandoc

    arguments = [f"--lua-filter={FILTER}", f"--metadata=stem={stem}", "--wrap=none", *options]
    try:
        return pypandoc.convert_text(markdown, to, format=MARKDOWN, extra_args=arguments)
    except RuntimeError as error:
        raise RunFailed(f"pandoc: {error}") from None


def _write_picture(path: Path, data: str) -> None:
    path.write_bytes(data.encode() if path.suffix == ".svg" else base64.b64decode(data))


def _figure(name: str, said: dict) -> str:
    """Returns a figure's Markdown with its width and the words for those who cannot see it."""
    alt = re.sub(r'([\\"])', r"\\\1", said.get("alt", "Figure"))
    pixels = f" pixels={said['width']}" if "width" in said else ""
    return f'![]({name}){{{pixels} alt="{alt}"}}'
