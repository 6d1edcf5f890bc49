"""Joins executed notebooks into one HTML page and one PDF.

nbconvert turns a notebook into Markdown with its figures, pandoc turns that into a section of the
page and into Typst, and Typst sets the PDF. An assignment's part of the page is made once; the page
around the parts is a template, so that it can be written again after every stage of a run.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from common.errors import RunFailed
from common.report import page
from common.report.markdown import notebook_markdown, pandoc
from common.report.page import Heading
from common.runtime.machine.environment import now
from common.runtime.records.run_directory import write_atomically

TITLE = "ddplab report"
TEMPLATE = Path(__file__).with_name("template.typ")
SUBJECTS = {
    "assignment0": "One device",
    "assignment1": "Data-parallel training",
    "assignment2": "Bucket size",
    "assignment3": "Micro-batches",
    "assignment4": "Scaling",
}
NOTEBOOK_LEVEL = 3
"""A notebook's title on the page: below the page's and the assignment's."""


@dataclass(frozen=True)
class Document:
    """The executed notebooks of one assignment, in reading order."""

    assignment: str
    notebooks: tuple[Path, ...]


@dataclass(frozen=True)
class Part:
    """One assignment, rendered for the page: a ``<section>`` per notebook, figures inside."""

    assignment: str
    title: str
    html: str
    contents: tuple[Heading, ...]


def render(document: Document) -> Part:
    """Renders the notebooks of an assignment for the page."""
    sections = []
    with tempfile.TemporaryDirectory() as scratch:
        for notebook in document.notebooks:
            markdown = notebook_markdown(notebook, Path(scratch))
            shift = f"--shift-heading-level-by={NOTEBOOK_LEVEL - 1}"
            body = pandoc(markdown, "html5", notebook.stem, shift, "--mathml")
            sections.append(page.section(notebook.stem, body, Path(scratch)))
    text = "".join(sections)
    contents = page.headings(text, NOTEBOOK_LEVEL)
    return Part(document.assignment, assignment_title(document.assignment), text, contents)


def write_page(folder: Path, parts: Sequence[Part], front: str = "", style: str = "") -> None:
    """Writes ``index.html`` into ``folder``, whole or not at all.

    ``front`` is HTML that comes first in ``<main>``, ``style`` is CSS for it.
    """
    write_atomically(folder / "index.html", page.page(TITLE, now()[:10], parts, front, style))


def write_pdf(
    folder: Path,
    documents: Sequence[Document],
    front: str = "",
    front_files: Mapping[str, bytes] | None = None,
) -> None:
    """Writes ``report.pdf`` into ``folder``, whole or not at all.

    ``front`` is Typst markup for page 1, before the contents; ``front_files`` has the figures that
    it names. Labels are the page's anchors.
    """
    with tempfile.TemporaryDirectory() as scratch:
        work = Path(scratch)
        for name, data in (front_files or {}).items():
            (work / name).write_bytes(data)
        body = "\n".join(_typst(document, work) for document in documents)
        pdf = _typeset(body, front, work)
    beside = folder / ".report.pdf.partial"
    beside.write_bytes(pdf)
    beside.replace(folder / "report.pdf")


def assignment_title(assignment: str) -> str:
    """Returns the title of an assignment: its number and its subject.

    >>> assignment_title("assignment2")
    'Assignment 2: Bucket size'
    """
    name = assignment.replace("assignment", "Assignment ")
    return f"{name}: {SUBJECTS[assignment]}" if assignment in SUBJECTS else name


def _typst(document: Document, work: Path) -> str:
    """Returns an assignment as Typst: a chapter whose notebooks begin on pages of their own."""
    chapter = [f"#pagebreak(weak: true)\n= {assignment_title(document.assignment)}"]
    chapter[0] += f" <{document.assignment}>\n"
    for place, notebook in enumerate(document.notebooks):
        markdown = notebook_markdown(notebook, work)
        start = "#pagebreak(weak: true)\n" if place else ""
        body = pandoc(markdown, "typst", notebook.stem, "--shift-heading-level-by=1")
        chapter.append(f"{start}#metadata(none) <{notebook.stem}>\n{body}")
    return "\n".join(chapter)


def _typeset(body: str, front: str, work: Path) -> bytes:
    import matplotlib
    import typst

    # The contents begin a page where a first page comes before them.
    before = f"{front}\n#pagebreak(weak: true)\n" if front else ""
    head = TEMPLATE.read_text().replace("REPORT_TITLE", TITLE).replace("REPORT_DATE", now()[:10])
    source = work / "report.typ"
    source.write_text(head.replace("REPORT_FRONT", before) + body)
    fonts = Path(matplotlib.get_data_path()) / "fonts" / "ttf"  # those that figures are drawn with
    try:
        return typst.compile(str(source), root=str(work), font_paths=[str(fonts)])
    except typst.TypstError as error:
        raise RunFailed(f"typst: {error}") from None
