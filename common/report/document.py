"""Joins executed notebooks into one HTML page and one PDF.

nbconvert turns a notebook into Markdown with its figures, pandoc turns that into a section of the
page and into Typst, and Typst sets the PDF. An assignment's part of the page is made once; the page
around the parts is a template, so that it can be written again after every stage of a run.
"""

from __future__ import annotations

import base64
import html
import itertools
import re
import tempfile
import urllib.parse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from common.analysis.html import rendered
from common.errors import RunFailed
from common.runtime.machine.environment import today
from common.runtime.records.run_directory import write_atomically

TITLE = "ddplab report"
SUMMARY = "summary"
"""Name of the document of a whole run."""
PAGE, STYLE, SCRIPT, TEMPLATE, FILTER = (
    Path(__file__).with_name(name)
    for name in ("page.html.j2", "style.css", "page.js", "template.typ", "filter.lua")
)
MARKDOWN = "markdown+tex_math_dollars+pipe_tables+link_attributes-yaml_metadata_block"
MARKDOWN += "-implicit_figures"
PICTURES = {"image/svg+xml": "svg", "image/png": "png"}
HEADING = re.compile(r'<h([1-6]) id="([^"]+)"[^>]*>(.*?)</h\1>', re.S)
SUBJECTS = {
    "assignment0": "One device",
    "assignment1": "Data-parallel training",
    "assignment2": "Bucket size",
    "assignment3": "Micro-batches",
    "assignment4": "Scaling",
}
TAGS = {"report", "staff"}
"""Tags of the cells that a short report has of a notebook; answers are there only if asked for."""
NOTEBOOK_LEVEL = 3
"""A notebook's title on the page: below the page's and the assignment's."""


@dataclass(frozen=True)
class Document:
    """The executed notebooks of one assignment, in reading order."""

    assignment: str
    notebooks: tuple[Path, ...]

    def numbered(self) -> list[tuple[Path, str]]:
        """Returns each notebook with what the numbers of its figures and tables begin with."""
        digits = re.sub(r"\D", "", self.assignment)
        parts = [f"{digits}.{place}." for place in range(1, len(self.notebooks) + 1)]
        return list(zip(self.notebooks, parts if digits else [""] * len(parts), strict=True))


@dataclass(frozen=True)
class Heading:
    """A heading of the page; ``level`` is 1 for a notebook's title, 2 for what is below it."""

    anchor: str
    text: str
    level: int


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
        for notebook, number in document.numbered():
            markdown = _notebook_markdown(notebook, Path(scratch), number)
            shift = f"--shift-heading-level-by={NOTEBOOK_LEVEL - 1}"
            body = _pandoc(markdown, "html5", notebook.stem, shift, "--mathml")
            sections.append(_section(notebook.stem, body, Path(scratch)))
    text = "".join(sections)
    title = assignment_title(document.assignment)
    return Part(document.assignment, title, text, _headings(text))


def write_page(folder: Path, parts: Sequence[Part], front: str = "", style: str = "") -> None:
    """Writes ``index.html`` into ``folder``, whole or not at all. It needs no other file.

    ``front`` is HTML that comes first in ``<main>``, ``style`` is CSS for it.
    """
    text = rendered(
        PAGE,
        title=TITLE,
        date=today(),
        parts=parts,
        front=front,
        style=STYLE.read_text() + style,
        script=SCRIPT.read_text(),
    )
    write_atomically(folder / "index.html", text)


def write_pdf(
    folder: Path,
    documents: Sequence[Document],
    front: str = "",
    front_files: Mapping[str, bytes] | None = None,
    *,
    full: bool = False,
) -> None:
    """Writes ``report.pdf`` into ``folder``, whole or not at all. Labels are the page's anchors.

    Args:
        folder: folder of the report.
        documents: chapters; the summary of a run comes before the contents.
        front: Typst markup for page 1, before the contents.
        front_files: figures that ``front`` names.
        full: whether notebooks are whole; else a notebook in which cells are tagged (``TAGS``)
            has only these, under their headings.
    """
    with tempfile.TemporaryDirectory() as scratch:
        work = Path(scratch)
        for name, data in (front_files or {}).items():
            (work / name).write_bytes(data)
        chapters = {document: _typst(document, work, full=full) for document in documents}
        lead = [text for document, text in chapters.items() if document.assignment == SUMMARY]
        rest = [text for document, text in chapters.items() if document.assignment != SUMMARY]
        pdf = _typeset("\n".join(rest), "\n".join([front, *lead]), work)
    beside = folder / ".report.pdf.partial"
    beside.write_bytes(pdf)
    beside.replace(folder / "report.pdf")


def assignment_title(assignment: str) -> str:
    """Returns the title of an assignment: its number and its subject.

    >>> assignment_title("assignment2")
    'Assignment 2: Bucket size'
    """
    name = assignment.replace("assignment", "Assignment ").replace(SUMMARY, "Summary of this run")
    return f"{name}: {SUBJECTS[assignment]}" if assignment in SUBJECTS else name


def svg_address(picture: str) -> str:
    """Returns a ``data:`` address with an SVG in it, which stays text: shorter than base64."""
    kept = ' !()*,-./:;=?@[]_{}|~$&+<>"\\^`'  # all but ' and what ends or encodes an address
    text = urllib.parse.quote(picture, safe=kept)
    return f"data:image/svg+xml,{text}"


def _section(stem: str, body: str, pictures: Path) -> str:
    """Returns a notebook's ``<section>``, with the figures of the folder ``pictures`` inside."""

    def embed(match: re.Match) -> str:
        return f"src='{_data_address(pictures / match[1])}'"

    body = re.sub(r'(?<=<img )src="([^"]+)"', embed, body)
    formula = '<span class="formula" tabindex="0" role="group" aria-label="Formula">'
    body = re.sub(r'<math display="block".*?</math>', rf"{formula}\g<0></span>", body, flags=re.S)
    return f'<section id="{stem}">\n{body}\n</section>\n'


def _headings(text: str) -> tuple[Heading, ...]:
    """Returns the headings of notebooks on the page.

    Titles leave out the assignment, which the contents name above them.
    """
    headings = []
    for level, anchor, inner in HEADING.findall(text):
        words = _plain(inner)
        if short := re.match(r"Assignment \d+(?:, |: )(.)(.*)", words):
            words = short[1].upper() + short[2]
        headings.append(Heading(anchor, words, int(level) - NOTEBOOK_LEVEL + 1))
    return tuple(headings)


def _plain(inner: str) -> str:
    """Returns a heading's words; of a formula, what it was written as.

    >>> _plain('Where <math><mi>b</mi><annotation encoding="x">b^*</annotation></math> &amp; c')
    'Where b* & c'
    """
    formula = r"<math.*?<annotation[^>]*>(.*?)</annotation>.*?</math>"
    text = re.sub(formula, lambda match: re.sub(r"[\^${}\\]", "", match[1]), inner, flags=re.S)
    return html.unescape(re.sub(r"<[^>]+>", "", text)).strip()


def _data_address(picture: Path) -> str:
    """Returns a ``data:`` address with the picture in it; an SVG stays text, which is shorter."""
    if picture.suffix == ".svg":
        return svg_address(picture.read_text()).replace("&", "&amp;")
    return "data:image/png;base64," + base64.b64encode(picture.read_bytes()).decode()


def _notebook_markdown(notebook: Path, folder: Path, number: str, *, full: bool = True) -> str:
    """Returns a notebook's text and outputs, without code; writes its figures to ``folder``.

    Figures and tables are numbered through the whole notebook, ``number`` first, also where not
    ``full`` leaves some out.
    """
    import nbformat
    from nbconvert import MarkdownExporter

    content = nbformat.read(notebook, as_version=4)
    (folder / notebook.stem).mkdir(exist_ok=True)
    figures, tables = itertools.count(1), itertools.count(1)
    for index, cell in enumerate(content.cells):
        for place, output in enumerate(cell.get("outputs", [])):
            data = output.get("data", {})
            kind = next((kind for kind in PICTURES if kind in data), None)
            if kind:
                name = f"{notebook.stem}/{index}-{place}.{PICTURES[kind]}"
                picture = data[kind].encode() if kind == "image/svg+xml" else None
                (folder / name).write_bytes(picture or base64.b64decode(data[kind]))
                shown = _figure(name, output.metadata.get(kind, {}))
                text = f"{shown}\n\n*Figure {number}{next(figures)}*"
                output.data, output.metadata = {"text/markdown": text}, {}
            elif data.get("text/markdown", "").startswith("| "):
                text = f"*Table {number}{next(tables)}*\n\n{data['text/markdown']}"
                output.data = {"text/markdown": text}
    if not full:
        content.cells = _tagged(content.cells)
    exporter = MarkdownExporter(exclude_input=True, exclude_output_prompt=True)
    return exporter.from_notebook_node(content)[0]


def _tagged(cells: list) -> list:
    """Returns the cells that are tagged, each below its headings; all where none is tagged."""
    import nbformat

    if not any(TAGS & {*cell.metadata.get("tags", ())} for cell in cells):
        return cells
    chosen, above = [], {}
    for cell in cells:
        if cell.cell_type == "markdown":
            for line in re.findall(r"^#+ .*", cell.source, re.M):
                level = len(line) - len(line.lstrip("#"))
                above = {deep: text for deep, text in above.items() if deep < level}
                above[level] = line
        if TAGS & {*cell.metadata.get("tags", ())}:
            if above and cell.cell_type != "markdown":
                chosen.append(nbformat.v4.new_markdown_cell("\n\n".join(above.values())))
            above = {}
            chosen.append(cell)
    return chosen


def _pandoc(markdown: str, to: str, stem: str, *options: str) -> str:
    """Returns Markdown as HTML or Typst. Ids of headings begin with ``stem``."""
    import pypandoc

    arguments = [f"--lua-filter={FILTER}", f"--metadata=stem={stem}", "--wrap=none", *options]
    try:
        return pypandoc.convert_text(markdown, to, format=MARKDOWN, extra_args=arguments)
    except RuntimeError as error:
        raise RunFailed(f"pandoc: {error}") from None


def _figure(name: str, metadata: dict) -> str:
    """Returns a figure's Markdown with its width and the words for those who cannot see it."""
    alt = re.sub(r'([\\"])', r"\\\1", metadata.get("alt", "Figure"))
    pixels = f" pixels={metadata['width']}" if "width" in metadata else ""
    return f'![]({name}){{{pixels} alt="{alt}"}}'


def _typst(document: Document, work: Path, *, full: bool) -> str:
    """Returns an assignment as Typst: a chapter whose notebooks begin on pages of their own."""
    if document.assignment == SUMMARY:
        return "".join(_pages(notebook, work) for notebook in document.notebooks)
    chapter = [f"#pagebreak(weak: true)\n= {assignment_title(document.assignment)}"]
    chapter[0] += f" <{document.assignment}>\n"
    for index, (notebook, number) in enumerate(document.numbered()):
        markdown = _notebook_markdown(notebook, work, number, full=full)
        start = "#pagebreak(weak: true)\n" if index and full else ""
        body = _pandoc(markdown, "typst", notebook.stem, "--shift-heading-level-by=1")
        chapter.append(f"{start}#metadata(none) <{notebook.stem}>\n{body}")
    return "\n".join(chapter)


def _pages(notebook: Path, work: Path) -> str:
    """Returns a notebook as Typst, a page for each of its sections; its title is left out."""
    body = _pandoc(_notebook_markdown(notebook, work, ""), "typst", notebook.stem)
    _, *sections = re.split(r"^(?=== )", body, flags=re.M)
    return "".join(f"#pagebreak(weak: true)\n{section}" for section in sections)


def _typeset(body: str, front: str, work: Path) -> bytes:
    import matplotlib
    import typst

    # The contents begin a page where a first page comes before them.
    before = f"{front}\n#pagebreak(weak: true)\n" if front else ""
    head = TEMPLATE.read_text().replace("REPORT_TITLE", TITLE).replace("REPORT_DATE", today())
    source = work / "report.typ"
    source.write_text(head.replace("REPORT_FRONT", before) + body)
    fonts = Path(matplotlib.get_data_path()) / "fonts" / "ttf"  # those that figures are drawn with
    try:
        return typst.compile(str(source), root=str(work), font_paths=[str(fonts)])
    except typst.TypstError as error:
        raise RunFailed(f"typst: {error}") from None
