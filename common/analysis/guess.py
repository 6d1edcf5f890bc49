"""Draws what a reader guessed on the figure that shows what was predicted and measured."""

from __future__ import annotations

import math

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke

from common.analysis.style import BLACK, PURPLE

MARGIN = 0.04
"""Share of an axis that is left free beside a guess which it was made longer for."""


def with_guess(
    figure: Figure | None,
    guess: object,
    unit: str = "",
    *,
    axis: str = "x",
    scale: float = 1.0,
) -> Figure | None:
    """Returns the figure with a line at the guess. A guess that cannot be drawn gets one line.

    It is on the first panel, whose limits are moved out to a guess that lies beyond them.

    Args:
        figure: None where nothing was measured.
        guess: a number, or None for none.
        unit: unit of the guess.
        axis: the axis that the guess is a value of, ``x`` or ``y``.
        scale: units of the axis in one unit of the guess.
    """
    if figure is None or guess is None:
        return figure
    axes = figure.axes[0]
    is_number = isinstance(guess, int | float) and not isinstance(guess, bool)
    if not (is_number and math.isfinite(guess)):
        print(f"Your guess, {guess!r}, is no number; it is not drawn.")
        return figure
    is_log = (axes.get_xscale() if axis == "x" else axes.get_yscale()) == "log"
    if is_log and guess <= 0:
        print(f"Your guess, {guess:g}, is not above 0; it is not drawn.")
        return figure
    value, label = guess * scale, f"your guess: {guess:g} {unit}".rstrip()
    _include(axes, axis, value)
    look = {"color": PURPLE, "ls": "-.", "lw": 1.5, "zorder": 5}
    halo = [withStroke(linewidth=2, foreground="white")]
    words = {"color": BLACK, "fontsize": 8, "va": "bottom", "path_effects": halo, "zorder": 6}
    if axis == "x":
        axes.axvline(value, **look)
        words |= {"rotation": 90, "ha": "right", "transform": axes.get_xaxis_transform()}
        axes.text(value, 0.02, label, **words)
    else:
        axes.axhline(value, **look)
        axes.text(0.02, value, label, transform=axes.get_yaxis_transform(), **words)
    return figure


def _include(axes: Axes, axis: str, value: float) -> None:
    """Moves the end of an axis out to a value that lies beyond it, and a little further."""
    line = axes.xaxis if axis == "x" else axes.yaxis
    low, high = sorted(line.get_view_interval())
    if low <= value <= high:
        return
    beyond = [-MARGIN if value < low else 0.0, MARGIN if value > high else 0.0]
    ends = np.array([min(low, value), max(high, value)])
    forward, back = (np.log, np.exp) if line.get_scale() == "log" else (np.asarray, np.asarray)
    ends = forward(ends)
    low, high = back(ends + np.ptp(ends) * np.array(beyond))
    set_limits = axes.set_xlim if axis == "x" else axes.set_ylim
    set_limits((high, low) if line.get_inverted() else (low, high))
