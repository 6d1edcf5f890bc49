"""Draws what a reader guessed on the figure that shows what was predicted and measured."""

from __future__ import annotations

import math

from matplotlib.figure import Figure

from common.analysis.style import PLATE, PURPLE


def with_guess(
    figure: Figure | None,
    guess: object,
    unit: str = "",
    *,
    axis: str = "x",
    panel: int = 0,
    scale: float = 1.0,
) -> Figure | None:
    """Returns the figure with a line at the guess. A guess that cannot be drawn gets one line.

    Args:
        figure: None where nothing was measured.
        guess: a number, or None for none.
        unit: unit of the guess.
        axis: the axis that the guess is a value of, ``x`` or ``y``.
        panel: number of the panel.
        scale: what one unit of the guess is on the axis.
    """
    if figure is None or guess is None:
        return figure
    axes = figure.axes[panel]
    is_number = isinstance(guess, int | float) and not isinstance(guess, bool)
    if not (is_number and math.isfinite(guess)):
        print(f"Your guess, {guess!r}, is no number; it is not drawn.")
        return figure
    is_log = (axes.get_xscale() if axis == "x" else axes.get_yscale()) == "log"
    if is_log and guess <= 0:
        print(f"Your guess, {guess:g}, is not above 0; it is not drawn.")
        return figure
    value, label = guess * scale, f"your guess: {guess:g} {unit}".rstrip()
    look = {"color": PURPLE, "ls": "-.", "lw": 1.5, "zorder": 5}
    words = {"color": PURPLE, "fontsize": 8, "bbox": PLATE, "zorder": 6}
    if axis == "x":
        axes.axvline(value, **look)
        across = axes.get_xaxis_transform()
        axes.text(value, 0.98, label, rotation=90, va="top", ha="right", transform=across, **words)
    else:
        axes.axhline(value, **look)
        axes.text(0.02, value, label, va="bottom", transform=axes.get_yaxis_transform(), **words)
    return figure
