"""Bars of a diagnosis' web page, which ``figures.html.j2`` draws."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

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

    def anchor(self, tick: float) -> str:
        """Returns the end of a mark's number that stands at the mark."""
        if tick == 0:
            return "start"
        return "end" if tick > NEAR_THE_END * self.end else "middle"

    @cached_property
    def ticks(self) -> list[float]:
        """Returns up to about ``TICKS`` round values from zero on."""
        least = self.end / TICKS
        power = 10.0 ** math.floor(math.log10(least))
        step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least)
        return [index * step for index in range(math.floor(self.end / step + 1e-9) + 1)]


class Bar(NamedTuple):
    """A bar: a key of ``COLOURS``, its place on the axis, and its place in a row in pixels."""

    kind: str
    start: float
    length: float
    top: float
    height: float
    words: str = ""
    """Text where the pointer rests."""


class Line(NamedTuple):
    """A line between two places on the axis, which lie at two heights in pixels."""

    kind: str
    start: float
    end: float
    top: float
    bottom: float


def upright(kind: str, value: float, top: float, bottom: float) -> Line:
    """Returns an upright line."""
    return Line(kind, value, value, top, bottom)


def whiskers(low: float, high: float, middle: float, half: float) -> list[Line]:
    """Returns an interval at a height: a line along the axis and an upright one at each end."""
    ends = [upright("interval", end, middle - half, middle + half) for end in (low, high)]
    return [Line("interval", low, high, middle, middle), *ends]


def stacked(lengths_ms: Mapping[str, float], *, height: float = 18) -> list[Bar]:
    """Returns parts one after another from zero on; those without length are left out."""
    bars, start = [], 0.0
    for name, length in lengths_ms.items():
        if length > 0:
            bars.append(Bar(name, start, length, 2, height, f"{name} {number(length)} ms"))
            start += length
    return bars


class Row(NamedTuple):
    """A row of a figure: its label, the sentence for those who do not see it, and its shapes."""

    label: str
    words: str
    shapes: Sequence[Bar | Line]
    height: float = 22


class BarFigure(NamedTuple):
    """Rows on one axis, and a legend: pairs of a kind and what it is called."""

    axis: Axis
    unit: str
    rows: Sequence[Row]
    kinds: Sequence[tuple[str, str]] = ()


def colour_rules() -> str:
    """Returns the style of ``COLOURS``, for bars and for the legend."""
    return "\n".join(
        f".{kind} {{ fill: {colour}; background: {colour} }}" for kind, colour in COLOURS.items()
    )
