"""How a value becomes text that is the same on every run."""

from __future__ import annotations

import io
from collections.abc import Iterable

import numpy as np
import pandas as pd

DIGITS = 6
ROUNDING = 1e-12


def number(value: object) -> str:
    """Returns a number with six significant digits, anything else as it prints itself."""
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, float, np.number)):
        return str(value)
    if isinstance(value, (int, np.integer)):
        return str(int(value))
    # What is left of a difference of equal numbers is no number, and another on each processor.
    return "0" if abs(value) < ROUNDING else f"{float(value):.{DIGITS}g}"


def numbers(values: Iterable) -> str:
    """Returns the numbers of any nest of arrays, in order, on one line."""
    flat = np.asarray(values)
    return " ".join(number(value) for value in flat.ravel())


def frame_text(frame: pd.DataFrame) -> str:
    """Returns a data frame as CSV."""
    text = io.StringIO()
    frame.map(number).to_csv(text, index=False)
    return text.getvalue()
