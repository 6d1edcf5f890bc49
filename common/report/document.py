"""Joins executed notebooks into one HTML page and one PDF.

nbconvert turns the notebooks into Markdown with their figures, pandoc turns that into a page that
needs nothing else (figures and formulas inside) and into Typst, and Typst sets the PDF.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from common.errors import RunFailed
from common.runtime.environment import now
from common.runtime.run_directory import write_atomically

TEMPLATE = Path(__file__).with_name("template.typ")
STYLE = Path(__file__).with_name("style.css")
MARKDOWN = "markdown+tex_math_dollars+pipe_tables-yaml_metadata_block-implicit_figures"


@dataclass(frozen=True)
class Document:
    """The executed notebooks of one assignment, in reading order."""

    assignment: str
    notebooks: tuple[Path, ...]


def write_report(documents: Sequence[Document], folder: Path) -> None:
    """Writes ``index.html`` and ``report.pdf`` into ``folder``, each whole or not at all."""
    import pypandoc

    with tempfile.TemporaryDirectory() as scratch:
        work = Path(scratch)
        parts = [_markdown(path, work) for document in documents for path in document.notebooks]
        source = work / "report.md"
        source.write_text("\n\n".join(parts))
        title = "ddplab: " + ", ".join(_title(document.assignment) for document in documents)
        common = ["--resource-path", str(work), "--metadata", f"title={title}"]
        try:
            page = pypandoc.convert_file(
                str(source),
                "html5",
                format=MARKDOWN,
                extra_args=[
                    *common,
                    "--metadata",
                    f"date={now()[:10]}",
                    "--metadata",
                    "lang=en",
                    "--standalone",
                    "--embed-resources",
                    "--mathml",
                    "--toc",
                    "--toc-depth=2",
                    "--css",
                    str(STYLE),
                ],
            )
            body = pypandoc.convert_file(
                str(source), "typst", format=MARKDOWN, extra_args=["--wrap=none"]
            )
        except RuntimeError as error:
            raise RunFailed(f"pandoc: {error}") from None
        pdf = _typeset(body, title, work)
    write_atomically(folder / "index.html", page)
    beside = folder / ".report.pdf.partial"
    beside.write_bytes(pdf)
    beside.replace(folder / "report.pdf")


def _markdown(notebook: Path, work: Path) -> str:
    """Returns the notebook's text and outputs, without code; writes its figures to ``work``."""
    import nbformat
    from nbconvert import MarkdownExporter

    content = nbformat.read(notebook, as_version=4)
    exporter = MarkdownExporter(exclude_input=True, exclude_output_prompt=True)
    text, resources = exporter.from_notebook_node(
        content, resources={"output_files_dir": notebook.stem, "unique_key": notebook.stem}
    )
    (work / notebook.stem).mkdir(exist_ok=True)
    for name, data in resources["outputs"].items():
        (work / name).write_bytes(data)
    return re.sub(r"!\[(png|svg)\]", "![]", text)


def _typeset(body: str, title: str, work: Path) -> bytes:
    import typst

    source = work / "report.typ"
    head = TEMPLATE.read_text().replace("REPORT_TITLE", title).replace("REPORT_DATE", now()[:10])
    source.write_text(head + body)
    try:
        return typst.compile(str(source), root=str(work))
    except typst.TypstError as error:
        raise RunFailed(f"typst: {error}") from None


def _title(assignment: str) -> str:
    return assignment.replace("assignment", "assignment ")
