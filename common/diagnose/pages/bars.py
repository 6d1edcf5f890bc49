"""Bars of a diagnosis' web page: rows of inline SVG between lines of text.

Places along a row are percentages of its width and all else is in CSS pixels, so that a figure is
as wide as the window and its letters stay as large as those of the text. What names things (ranks,
causes) is text of the page beside or above its bar, which breaks into lines where it must. All text
that is handed over is escaped here.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from common.analysis.step_parts import PARTS
from common.analysis.style import BLUE, GREEN, GREY, ORANGE, PURPLE, RED, SKY

BETWEEN = "between"
COLOURS = {
    "data": ORANGE,
    "forward": SKY,
    "backward": BLUE,
    "waiting": GREY,
    "communication": RED,
    "optimizer": GREEN,
    BETWEEN: PURPLE,
    "bucket": RED,
    "now": GREY,
    "predicted": BLUE,
    "tried": GREEN,
}
"""Colour of each kind of bar: computation is blue, the exchange of gradients red."""
STEP_PARTS = (*PARTS, BETWEEN)
"""The parts of a step in their order, and the time between it and the one before."""
TICKS = 5
"""Marks on an axis, at most: their numbers still stand apart on 300 pixels."""
NEAR_THE_END = 0.95
"""Share of the width from which a mark's number is set before it, so that it is not cut off."""


def number(value: float) -> str:
    """Returns three significant digits without an exponent; a dash for no number.

    >>> number(0.05123), number(89.18), number(23512.4), number(float("nan"))
    ('0.0512', '89.2', '23,500', '–')
    """
    if not math.isfinite(value):
        return "–"
    rounded = float(f"{value:.3g}")
    if rounded == 0:
        return "0"
    decimals = max(0, 2 - math.floor(math.log10(abs(rounded))))
    return f"{rounded:,.{decimals}f}"


@dataclass(frozen=True)
class Axis:
    """A scale from zero to ``end`` that is as wide as the row."""

    end: float

    def place(self, value: float) -> str:
        """Returns where a value lies, or how wide it is."""
        return f"{100 * value / self.end:.2f}%"

    @cached_property
    def ticks(self) -> list[float]:
        """Returns up to about ``TICKS`` round values from zero on."""
        least = self.end / TICKS
        power = 10.0 ** math.floor(math.log10(least))
        step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least)
        return [index * step for index in range(math.floor(self.end / step + 1e-9) + 1)]


def bar(
    axis: Axis, kind: str, start: float, length: float, top: float, height: float, said: str = ""
) -> str:
    """Draws a bar.

    Args:
        axis: its scale.
        kind: a key of ``COLOURS``.
        start, length: on the axis.
        top, height: in pixels.
        said: shown where the pointer rests.
    """
    title = f"<title>{html.escape(said)}</title>" if said else ""
    return (
        f'<rect class="{kind}" x="{axis.place(start)}" y="{top:g}" '
        f'width="{axis.place(length)}" height="{height:g}">{title}</rect>'
    )


def upright(axis: Axis, kind: str, value: float, top: float, bottom: float) -> str:
    """Draws an upright line."""
    at = axis.place(value)
    return f'<line class="{kind}" x1="{at}" x2="{at}" y1="{top:g}" y2="{bottom:g}"/>'


def level(axis: Axis, kind: str, start: float, end: float, height: float) -> str:
    """Draws a line along the axis, at a height in pixels."""
    return (
        f'<line class="{kind}" x1="{axis.place(start)}" x2="{axis.place(end)}" '
        f'y1="{height:g}" y2="{height:g}"/>'
    )


def stacked(
    axis: Axis, lengths_ms: Mapping[str, float], *, height: float = 18, top: float = 2
) -> str:
    """Draws parts one after another from zero on; those without length are left out."""
    shapes, start = [], 0.0
    for name, length in lengths_ms.items():
        if length > 0:
            said = f"{name} {number(length)} ms"
            shapes.append(bar(axis, name, start, length, top, height, said))
            start += length
    return "".join(shapes)


def row(axis: Axis, label: str, said: str, shapes: str, height: float = 22) -> str:
    """Returns a row of a figure: its label, and its bars on the marks of the axis.

    Args:
        axis: its scale.
        label: plain text.
        said: a sentence with what is seen, for those who do not see it.
        shapes: SVG.
        height: in pixels.
    """
    grid = "".join(upright(axis, "grid", tick, 0, height) for tick in axis.ticks)
    return (
        f'<div class="row"><p class="label">{html.escape(label)}</p>'
        f'<svg role="img" aria-label="{html.escape(said)}" width="100%" height="{height:g}">'
        f"{grid}{shapes}</svg></div>\n"
    )


def scale(axis: Axis, unit: str) -> str:
    """Returns the row of numbers below a figure, with what they are."""
    numbers = []
    for tick in axis.ticks:
        anchor = "middle"
        if tick == 0:
            anchor = "start"
        elif tick > NEAR_THE_END * axis.end:
            anchor = "end"
        numbers.append(
            f'<text x="{axis.place(tick)}" y="14" text-anchor="{anchor}">{tick:,g}</text>'
        )
    said = f"Axis from 0 to {axis.ticks[-1]:,g}: {unit}."
    return (
        f'<div class="row scale"><p class="label"></p><div>'
        f'<svg role="img" aria-label="{html.escape(said)}" width="100%" height="18">'
        f'{"".join(numbers)}</svg><p class="unit">{html.escape(unit)}</p></div></div>\n'
    )


def legend(kinds: Iterable[tuple[str, str]]) -> str:
    """Returns the legend: pairs of a kind and what it is called."""
    items = "".join(
        f'<li><span class="swatch {kind}"></span>{html.escape(name)}</li>' for kind, name in kinds
    )
    return f'<ul class="legend">{items}</ul>\n'


def folded(summary: str, inner: str) -> str:
    """Returns what is seen only when it is opened. ``inner`` is HTML, ``summary`` plain text."""
    return f"<details><summary>{html.escape(summary)}</summary>\n{inner}</details>\n"


def table(caption: str, header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a table; the first column names the row. It scrolls in itself if it must."""
    head = "".join(f'<th scope="col"><span>{html.escape(name)}</span></th>' for name in header)
    body = "".join(
        f'<tr><th scope="row">{html.escape(first)}</th>'
        + "".join(f"<td>{html.escape(value)}</td>" for value in rest)
        + "</tr>\n"
        for first, *rest in rows
    )
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{html.escape(caption)}">'
        f"<table><caption>{html.escape(caption)}</caption><thead><tr>{head}</tr></thead>\n"
        f"<tbody>{body}</tbody></table></div>\n"
    )


def colour_rules() -> str:
    """Returns the style of ``COLOURS``, for bars and for the legend."""
    return "\n".join(
        f".{kind} {{ fill: {colour}; background: {colour} }}" for kind, colour in COLOURS.items()
    )
