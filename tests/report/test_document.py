"""The report's page and PDF: anchors, words for figures, widths, copying, and what a reader sees.

A notebook of recorded runs is executed once. What a browser is needed for is
checked in Chromium, and skipped where there is none.
"""

import itertools
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import nbformat
import pytest
from browser_support import axe_violations

from common.report.document import Document, Part, render, write_page, write_pdf

WIDTHS = (360, 768, 1300, 1920)
MIB = 2**20

pytestmark = [pytest.mark.xdist_group("report"), pytest.mark.timeout(300)]


class Page(HTMLParser):
    """What a test asks a page: its anchors, links, pictures, headings and tables' headers."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.headings: list[tuple[int, str | None]] = []
        self.links: list[str] = []
        self.addresses: list[str] = []
        self.pictures: list[dict] = []
        self.head_cells: list[dict] = []
        self._in_nav = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list) -> None:
        found = dict(attrs)
        self.addresses += [found[name] for name in ("src", "href") if name in found]
        if "id" in found:
            self.ids.append(found["id"])
        if re.fullmatch("h[1-6]", tag):
            self.headings.append((int(tag[1]), found.get("id")))
        if tag == "nav":
            self._in_nav = True
        elif tag == "a" and self._in_nav:
            self.links.append(found["href"].removeprefix("#"))
        elif tag == "img":
            self.pictures.append(found)
        elif tag == "th":
            self.head_cells.append(found)

    def handle_endtag(self, tag: str) -> None:
        if tag == "nav":
            self._in_nav = False


@pytest.fixture(scope="module")
def documents(executed: dict[str, Path]) -> list[Document]:
    return [Document(name.split("_")[0], (path,)) for name, path in executed.items()]


@pytest.fixture(scope="module")
def parts(documents: list[Document]) -> list[Part]:
    return [render(document) for document in documents]


@pytest.fixture(scope="module")
def folder(parts: list[Part], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("page")
    write_page(folder, parts, front="<h2>First</h2>", style=".of-the-front { color: inherit }")
    return folder


@pytest.fixture(scope="module")
def text(folder: Path) -> str:
    return (folder / "index.html").read_text()


def outputs(documents: list[Document]) -> Iterator[dict]:
    for document in documents:
        for path in document.notebooks:
            for cell in nbformat.read(path, as_version=4).cells:
                yield from cell.get("outputs", [])


def tables(documents: list[Document]) -> Iterator[list[list[str]]]:
    """Yields each table that a notebook shows as rows of cells, the header first."""
    for output in outputs(documents):
        lines = output.get("data", {}).get("text/markdown", "").splitlines()
        if len(lines) > 1 and re.match(r"\| :?-+", lines[1]):
            rows = [line.strip("|").split(" | ") for line in (lines[0], *lines[2:])]
            yield [[cell.strip() for cell in row] for row in rows]


def test_contents_and_headings_lead_to_each_other_and_no_anchor_is_there_twice(
    text: str, executed: dict[str, Path]
) -> None:
    page = Page(text)
    assert [name for name, count in Counter(page.ids).items() if count > 1] == []
    headings = {name for _, name in page.headings if name}
    sections = {name.split("_")[0] for name in executed}
    assert set(page.links) == headings | sections
    assert set(page.links) | set(executed) <= set(page.ids)


def test_anchors_are_the_notebooks_name_and_the_words_of_the_heading(parts: list[Part]) -> None:
    assert [part.title for part in parts] == [
        "Assignment 1: Data-parallel training",
        "Assignment 4: Scaling",
    ]
    found = {heading.anchor: heading for part in parts for heading in part.contents}
    assert found["assignment1_ddp-gradient-accumulation"].text == "Gradient accumulation"
    assert found["assignment1_ddp-gradient-accumulation"].level == 2
    first = parts[0].contents[0]
    assert (first.level, first.text) == (1, "Data-parallel training with DDP")


def test_headings_come_in_order_under_one_title(text: str) -> None:
    levels = [level for level, _ in Page(text).headings]
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels))


def test_figures_say_in_words_what_their_axes_are(text: str, documents: list[Document]) -> None:
    pictures = Page(text).pictures
    kinds = ("image/svg+xml", "image/png")
    shown = sum(any(kind in out.get("data", {}) for kind in kinds) for out in outputs(documents))
    assert len(pictures) == shown > 0
    for picture in pictures:
        assert re.search("(horizontal|vertical) axis: ", picture["alt"]), picture["alt"]
        assert re.search(r"20\d\d-\d\d-\d\d|date not stated", picture["alt"])  # the caption
        assert int(picture["width"]) >= 600


def test_figures_of_lines_and_bars_are_svg_with_letters_in_them(text: str) -> None:
    kinds = Counter(picture["src"].split(";")[0].split(",")[0] for picture in Page(text).pictures)
    assert kinds["data:image/svg+xml"] > kinds["data:image/png"]
    assert "<text" in next(
        picture["src"] for picture in Page(text).pictures if "svg" in picture["src"][:20]
    ).replace("%3C", "<")


def test_a_figure_is_the_same_each_time() -> None:
    from common.analysis import style

    def drawn() -> tuple[dict, dict]:
        with style.figure("recorded\ndata") as (fig, axes):
            axes.plot([1, 2, 3], [1, 4, 9], label="squares")
            axes.set(xlabel="number", ylabel="its square (m²)")
            fig.suptitle("squares")
            axes.set_title("from 1 to 3", loc="left")
            axes.legend()
        return fig._repr_mimebundle_()

    (data, said), again = drawn(), drawn()
    assert (data, said) == again
    assert said["image/svg+xml"] == {
        "width": 720,
        "alt": "squares. from 1 to 3; horizontal axis: number; vertical axis: its square (m²); "
        "drawn: squares. recorded data.",
    }


def test_a_page_is_small_and_needs_nothing_else(text: str) -> None:
    assert len(text.encode()) < 1.5 * MIB  # one of fourteen notebooks, and a table
    assert {re.match("#|data:|", address)[0] for address in Page(text).addresses} == {"#", "data:"}
    assert not re.search(r"@import|url\((?!#|%23)", text)
    assert "<math" in text


def test_every_header_of_a_table_says_what_it_is_the_header_of(text: str) -> None:
    cells = Page(text).head_cells
    assert {cell.get("scope") for cell in cells} == {"col", "row"}


def test_a_page_is_written_again_from_its_parts_and_never_by_halves(
    parts: list[Part], tmp_path: Path
) -> None:
    write_page(tmp_path, parts[:1])
    assert Page((tmp_path / "index.html").read_text()).links[0] == "assignment1"
    write_page(tmp_path, parts)
    write_page(tmp_path, [], front="<p>nothing yet</p>")
    assert "nothing yet" in (tmp_path / "index.html").read_text()
    assert [path.name for path in tmp_path.iterdir()] == ["index.html"]


@pytest.fixture
def opened(folder: Path, chromium) -> Iterator:
    """Yields a function that opens the page in a window and returns it with its errors."""
    contexts = []

    def open_at(width: int, **options: object):
        context = chromium.new_context(viewport={"width": width, "height": 900}, **options)
        contexts.append(context)
        page = context.new_page()
        page.errors = []
        page.on("pageerror", lambda error: page.errors.append(str(error)))
        page.on("console", lambda m: m.type == "error" and page.errors.append(m.text))
        page.goto((folder / "index.html").as_uri())
        return page

    yield open_at
    for context in contexts:
        context.close()


@pytest.mark.slow
def test_a_page_never_scrolls_sideways_and_its_lines_are_short(opened) -> None:
    page = opened(WIDTHS[0])
    for width in WIDTHS:
        page.set_viewport_size({"width": width, "height": 900})
        assert page.evaluate("document.scrollingElement.scrollWidth") <= width
    assert page.errors == []
    # letters of the longest line of any paragraph, by where its letters stand
    longest = page.evaluate("""() => Math.max(...[...document.querySelectorAll("main p")].map(p => {
        const walk = document.createTreeWalker(p, NodeFilter.SHOW_TEXT), lines = new Map();
        const range = document.createRange();
        for (let node; (node = walk.nextNode());)
            for (let i = 0; i < node.length; i++) {
                range.setStart(node, i); range.setEnd(node, i + 1);
                const y = Math.round(range.getBoundingClientRect().bottom / 12);
                lines.set(y, (lines.get(y) ?? 0) + 1);
            }
        return Math.max(0, ...lines.values());
    }))""")
    assert longest <= 75


@pytest.mark.slow
@pytest.mark.parametrize("scripts", [True, False])
def test_a_table_is_copied_with_tabs_between_its_cells(
    opened, documents: list[Document], scripts: bool
) -> None:
    page = opened(1300, java_script_enabled=scripts)
    buttons = page.locator("main button")
    shown = [rows for rows in tables(documents) if rows[0][0]]
    assert buttons.count() == (len(list(tables(documents))) if scripts else 0)
    if not scripts:
        return
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    place = [rows[0][0] != "" for rows in tables(documents)].index(True)
    buttons.nth(place).click()
    page.wait_for_function("document.querySelector('[role=status]').textContent != ''")
    copied = page.evaluate("navigator.clipboard.readText()")
    assert [line.split("\t") for line in copied.splitlines()] == shown[0]


@pytest.mark.slow
def test_the_contents_are_closed_above_the_text_of_a_narrow_window(opened) -> None:
    state = "document.querySelector('details.contents').open"
    assert not opened(360).evaluate(state)
    wide = opened(1300)
    assert wide.evaluate(state)
    first, second = (
        wide.evaluate(f"document.querySelector('{tag}').getBoundingClientRect().{edge}")
        for tag, edge in (("nav", "right"), ("main", "left"))
    )
    assert first <= second


@pytest.mark.slow
@pytest.mark.parametrize(("width", "scheme"), [(360, "dark"), (1300, "light")])
def test_axe_finds_nothing(opened, scheme: str, width: int) -> None:
    page = opened(width, color_scheme=scheme)
    page.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
    assert axe_violations(page) == []


@pytest.fixture(scope="module")
def pdf(documents: list[Document], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pdf")
    front = '#link(<assignment1_ddp>)[To the notebook] #image("dot.svg", alt: "a dot")'
    dot = b'<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"><path d="M0 0h9v9"/></svg>'
    write_pdf(folder, documents, front=front, front_files={"dot.svg": dot}, full=True)
    assert [path.name for path in folder.iterdir()] == ["report.pdf"]
    return folder / "report.pdf"


def test_a_pdf_keeps_its_sizes_and_says_what_it_is(pdf: Path) -> None:
    data = pdf.read_bytes()
    assert data.startswith(b"%PDF-")
    assert len(data) < 2 * MIB


@pytest.mark.skipif(shutil.which("pdftotext") is None, reason="pdftotext is not installed")
def test_no_word_of_a_tables_header_and_no_number_is_torn_apart(
    pdf: Path, documents: list[Document]
) -> None:
    command = ["pdftotext", "-layout", str(pdf), "-"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    printed = printed.replace("’", "'")
    words = set(printed.split())
    for rows in tables(documents):
        named = rows[0] if rows[0][0] else []  # names and values have no header
        missing = {word for cell in named for word in cell.split()} - words
        assert missing == set(), rows[0]
        numbers = {word for row in rows[1:] for cell in row for word in cell.split()}
        numbers = {word for word in numbers if re.fullmatch(r"[-+±\d.,–%]+", word)}
        assert numbers - words == set(), rows[0]
    assert printed.index("To the notebook") < printed.index("Gradient accumulation")


@pytest.mark.skipif(not shutil.which("pdftotext"), reason="needs pdftotext (poppler-utils)")
def test_a_short_report_has_the_tagged_cells_under_their_headings_and_the_pages_numbers(
    tmp_path: Path,
) -> None:
    def cell(text: str, *tags: str) -> nbformat.NotebookNode:
        output = nbformat.v4.new_output("display_data", {"text/markdown": text})
        return nbformat.v4.new_code_cell("", outputs=[output], metadata={"tags": [*tags]})

    def table(value: int) -> str:
        return f"| x |\n|---:|\n| {value} |\n"

    cells = [
        nbformat.v4.new_markdown_cell("# Title\n\nfirst words"),
        nbformat.v4.new_markdown_cell("## Left out\n\nmore words"),
        cell(table(111)),
        nbformat.v4.new_markdown_cell("## Kept\n\nother words"),
        cell(table(222), "report"),
        cell(table(333)),
    ]
    path = tmp_path / "notebook.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=cells), path)
    document = Document("assignment2", (path, path))
    texts = {}
    for full in (False, True):
        write_pdf(tmp_path, [document], full=full)
        command = ["pdftotext", "-layout", tmp_path / "report.pdf", "-"]
        texts[full] = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    for word in ("222", "Kept", "Title", "Table 2.1.2", "Table 2.2.2"):
        assert word in texts[False]
        assert word in texts[True]
    for word in ("111", "333", "Left out", "words", "Table 2.1.1"):
        assert word not in texts[False]
        assert word in texts[True]
    page = render(document).html
    assert [f"Table 2.{part}.{count}" in page for part in (1, 2) for count in (1, 2, 3)] == [
        True
    ] * 6
