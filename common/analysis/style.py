"""Sets the look of the course's figures and tables: one style, units on both axes, a caption with
the source.

A figure's contents are its package's ``figures.py``; what all figures share is here.
"""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

import matplotlib
import numpy as np
from cycler import cycler
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, Locator, LogLocator, NullFormatter, NullLocator
from numpy.typing import NDArray

from common.analysis.picture import describe, picture, width_px
from common.runtime.wording import size_text

# Okabe and Ito's palette, told apart by colour-blind readers.
BLUE, ORANGE, GREEN, RED = "#0072B2", "#E69F00", "#009E73", "#D55E00"
PURPLE, SKY, BLACK, GREY = "#CC79A7", "#56B4E9", "#000000", "#888888"
YELLOW, BROWN = "#F0E442", "#8C564B"
CYCLE = (BLUE, RED, GREEN, ORANGE, PURPLE, SKY)
MARKERS = "o^sDvP"

MEASURED = {"fmt": "o", "color": BLACK, "markersize": 5, "capsize": 3, "lw": 1, "zorder": 4}
"""The look of measured points with intervals (``Axes.errorbar``)."""
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


def band(
    axes: Axes, x: Sequence, low: Sequence, high: Sequence, color: str, **look: object
) -> None:
    """Fills the area between two lines, with ``look`` as ``Axes.fill_between`` takes it."""
    axes.fill_between(x, low, high, color=color, **{"alpha": 0.2, "linewidth": 0} | look)


def level(axes: Axes, value: float, text: str, *, is_left: bool = False) -> None:
    """Draws a dashed line across at a value, and what it is above its left or right end."""
    axes.axhline(value, color=GREY, linestyle="--", linewidth=1)
    at, side = (0.01, "left") if is_left else (0.99, "right")
    look = {"color": GREY, "va": "bottom", "ha": side, "fontsize": 8}
    axes.text(at, value, text, transform=axes.get_yaxis_transform(), **look)


def bar_rows(axes: Axes, names: Collection[str], **look: object) -> NDArray:
    """Names rows of bars, from the top down and without lines across; returns the y of each."""
    heights = np.arange(len(names))[::-1]
    axes.set_yticks(heights, names, **look)
    axes.grid(axis="y", visible=False)
    return heights


def rank_look(index: int) -> dict[str, str]:
    """Returns a colour and a marker that tell ranks apart; of the seventh they begin anew."""
    return {"color": CYCLE[index % len(CYCLE)], "marker": MARKERS[index % len(MARKERS)]}


def legend_above(fig: Figure, ncols: int, fontsize: float = 8) -> None:
    """Sets a legend above a figure, with each label of its panels once."""
    by_label = {}
    for axes in fig.axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            by_label.setdefault(label, handle)
    if by_label:
        fig.legend(
            by_label.values(),
            by_label.keys(),
            loc="outside upper center",
            ncols=ncols,
            fontsize=fontsize,
        )


SMALLEST_CAP_MIB = 0.0625
"""Smaller caps are not drawn."""


def doubling_axis(axes: Axes, label: str, ticks: Locator, numbers: FuncFormatter = PLAIN) -> None:
    """Makes the x axis logarithmic to base 2, with these ticks only and numbers at them."""
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(ticks)
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(numbers)
    axes.set_xlabel(label)


def cap_axis(axes: Axes, label: str) -> None:
    """Makes a logarithmic axis in MiB with plain numbers: 0.25, 1, 4, …"""
    doubling_axis(axes, label, LogLocator(base=4))


def byte_axis(axes: Axes) -> None:
    """Makes a logarithmic axis of message sizes with their units: 32 KiB, 1 MiB …"""
    units = FuncFormatter(lambda value, _: size_text(value))
    doubling_axis(axes, "message size", LogLocator(base=2**5), units)


def log_axis(axes: Axes, which: str = "y", subs: Sequence[float] = (1,)) -> None:
    """Makes an axis, x or y, logarithmic with plain numbers: at ``subs`` in each decade."""
    axes.set(**{f"{which}scale": "log"})
    axis = axes.yaxis if which == "y" else axes.xaxis
    axis.set_major_locator(LogLocator(subs=subs))
    axis.set_major_formatter(PLAIN)
    axis.set_minor_formatter(NullFormatter())


def ms_axis(axes: Axes, label: str) -> None:
    """Makes a logarithmic axis in milliseconds with plain numbers."""
    log_axis(axes)
    axes.set_ylabel(label)
