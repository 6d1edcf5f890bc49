"""Sets the look of the course's figures and tables: one style, units on both axes, a caption with
the source.

A figure's contents are its package's ``figures.py``; what all figures share is here.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager

import matplotlib
import pandas as pd
from cycler import cycler
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

from common.analysis.picture import describe, picture, width_px
from common.runtime.wording import size_text

# Okabe and Ito's palette, told apart by colour-blind readers.
BLUE, ORANGE, GREEN, RED = "#0072B2", "#E69F00", "#009E73", "#D55E00"
PURPLE, SKY, BLACK, GREY = "#CC79A7", "#56B4E9", "#000000", "#888888"
YELLOW, BROWN = "#F0E442", "#8C564B"
CYCLE = (BLUE, RED, GREEN, ORANGE, PURPLE, SKY)

PLAIN = FuncFormatter(lambda value, _: f"{value:,g}")
THOUSANDS = FuncFormatter(lambda value, _: f"{value:,.0f}")
PLATE = {"facecolor": "white", "edgecolor": "none", "pad": 0.8, "alpha": 0.85}
"""Plate behind letters that stand on lines."""
GOOD_EFFICIENCY = 0.8
"""Efficiency above which scaling is called good."""

DPI = 180
STYLE = {
    "font.size": 9.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e4e4e4",
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "lines.linewidth": 1.8,
    "axes.prop_cycle": cycler(color=CYCLE),
}


class CourseFigure(Figure):
    """A figure that a notebook shows by itself, without pyplot and its global state."""

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> tuple:
        kind, data = picture(self, DPI)
        return {kind: data}, {kind: {"width": width_px(self), "alt": describe(self)}}


CAPTION_LETTERS = 18
"""Letters of a caption that fit on an inch."""


@contextmanager
def figure(
    caption: str, figsize: tuple[float, float] = (7.2, 3.9), **subplots
) -> Iterator[tuple[CourseFigure, Axes]]:
    """Yields a figure in the course's style with the caption that says where its data come from.

    Lines of the caption stay lines.
    """
    with matplotlib.rc_context(STYLE):
        fig = CourseFigure(figsize=figsize, layout="constrained")
        yield fig, fig.subplots(**subplots)
        width = int(CAPTION_LETTERS * figsize[0])
        lines = [
            textwrap.fill(line, width, break_long_words=False, break_on_hyphens=False)
            for line in caption.splitlines()
        ]
        fig.supxlabel("\n".join(lines), fontsize=7, color="#555555", x=0.01, ha="left")


SMALLEST_CAP_MIB = 0.0625
"""Smaller caps are not drawn."""


def cap_axis(axes: Axes, label: str) -> None:
    """Makes a logarithmic axis in MiB with plain numbers: 0.25, 1, 4, …"""
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(LogLocator(base=4))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(PLAIN)
    axes.set_xlabel(label)


def byte_axis(axes: Axes) -> None:
    """Makes a logarithmic axis of message sizes with their units: 32 KiB, 1 MiB …"""
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(LogLocator(base=2**5))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: size_text(value)))
    axes.set_xlabel("message size")


def ms_axis(axes: Axes, label: str) -> None:
    """Makes a logarithmic axis in milliseconds with plain numbers."""
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(PLAIN)
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_ylabel(label)


class Table:
    """A data frame as a notebook's output.

    ``formats`` maps a column to a format string or to a function that returns text; columns of
    ``left`` are set on the left, whatever is in them.
    """

    def __init__(
        self,
        frame: pd.DataFrame,
        formats: Mapping[str, str | Callable[[float], str]] | None = None,
        left: Collection[str] = (),
    ) -> None:
        formats = formats or {}
        self.left = left
        self.cells = [
            [_text(v, formats.get(c, "{}")) for c, v in zip(frame.columns, row, strict=True)]
            for row in frame.itertuples(index=False)
        ]
        self.columns = [str(column) for column in frame.columns]

    def _repr_markdown_(self) -> str:
        columns = zip(self.columns, *self.cells, strict=True)
        rules = [_rule(*column, left=column[0] in self.left) for column in columns]
        lines = [self.columns, rules, *self.cells]
        return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def facts(values: Mapping[str, object]) -> Table:
    """Returns a table of what there is and its value, for the few numbers that a text is about."""
    frame = pd.DataFrame({"": values.keys(), "value": [str(value) for value in values.values()]})
    return Table(frame, left=("", "value"))


def _rule(header: str, *cells: str, left: bool = False) -> str:
    """Returns the line between header and cells, as long as the column is wide.

    Where a table does not fit on a line, pandoc gives its columns these widths. Names stand on the
    left, numbers on the right.

    >>> _rule("worst case", "1.5%", "12.5%"), _rule("", "balanced", "replay")
    ('-------:', ':----------')
    """
    width = max(map(len, (*cells, *header.split())), default=0) + 3  # and what is left around them
    filled = [cell for cell in cells if cell not in ("", "–")]
    names = left or all(cell[:1].isalpha() for cell in filled or cells)
    return f":{'-' * (width - 1)}" if names else f"{'-' * (width - 1)}:"


def _text(value: object, form: str | Callable[[float], str]) -> str:
    if pd.isna(value):
        return "–"
    text = form(value) if callable(form) else form.format(value)
    return re.sub(r"^-(?=0(\.0*)?%?$)", "", text)  # nothing is less than zero by nothing
