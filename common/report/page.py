"""The parts that the report's page is made of: a notebook's section, and the page around them."""

from __future__ import annotations

import base64
import html
import re
import urllib.parse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from common.analysis.html import rendered

PAGE = Path(__file__).with_name("page.html.j2")
STYLE = Path(__file__).with_name("style.css")
SCRIPT = Path(__file__).with_name("page.js")
HEADING = re.compile(r'<h([1-6]) id="([^"]+)"[^>]*>(.*?)</h\1>', re.S)


@dataclass(frozen=True)
class Heading:
    """A heading of the page; ``level`` is 1 for a notebook's title, 2 for what is below it."""

    anchor: str
    text: str
    level: int


def section(stem: str, body: str, pictures: Path) -> str:
    """Returns a notebook's ``<section>``, with the figures of the folder ``pictures`` inside."""

    def embed(found: re.Match) -> str:
        return f"src='{_data_address(pictures / found[1])}'"

    body = re.sub(r'(?<=<img )src="([^"]+)"', embed, body)
    formula = '<span class="formula" tabindex="0" role="group" aria-label="Formula">'
    body = re.sub(r'<math display="block".*?</math>', rf"{formula}\g<0></span>", body, flags=re.S)
    return f'<section id="{stem}">\n{body}\n</section>\n'


def headings(text: str, top: int) -> tuple[Heading, ...]:
    """Returns the headings of a piece of the page; ``top`` is the level of a notebook's title.

    Titles leave out the assignment, which the contents name above them.
    """
    found = []
    for level, anchor, inner in HEADING.findall(text):
        words = _plain(inner)
        if short := re.match(r"Assignment \d+(?:, |: )(.)(.*)", words):
            words = short[1].upper() + short[2]
        found.append(Heading(anchor, words, int(level) - top + 1))
    return tuple(found)


def page(title: str, date: str, parts: Sequence[object], front: str, style: str) -> str:
    """Returns the whole page. It needs nothing else."""
    return rendered(
        PAGE,
        title=title,
        date=date,
        parts=parts,
        front=front,
        style=STYLE.read_text() + style,
        script=SCRIPT.read_text(),
    )


def _plain(inner: str) -> str:
    """Returns a heading's words; of a formula, what it was written as.

    >>> _plain('Where <math><mi>b</mi><annotation encoding="x">b^*</annotation></math> &amp; c')
    'Where b* & c'
    """
    formula = r"<math.*?<annotation[^>]*>(.*?)</annotation>.*?</math>"
    text = re.sub(formula, lambda found: re.sub(r"[\^${}\\]", "", found[1]), inner, flags=re.S)
    return html.unescape(re.sub(r"<[^>]+>", "", text)).strip()


def svg_address(picture: str) -> str:
    """Returns a ``data:`` address with an SVG in it, which stays text: shorter than base64."""
    kept = ' !()*,-./:;=?@[]_{}|~$&+<>"\\^`'  # all but ' and what ends or encodes an address
    text = urllib.parse.quote(picture, safe=kept)
    return f"data:image/svg+xml,{text}"


def _data_address(picture: Path) -> str:
    """Returns a ``data:`` address with the picture in it; an SVG stays text, which is shorter."""
    if picture.suffix == ".svg":
        return svg_address(picture.read_text()).replace("&", "&amp;")
    return "data:image/png;base64," + base64.b64encode(picture.read_bytes()).decode()
