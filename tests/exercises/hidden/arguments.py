"""What a function does to its arguments: they are the caller's, and stay as they are."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pandas as pd

from common.course.sandbox.student import Student


def assert_unchanged(student: Student, exercise: str, function: str, *arguments: Any) -> None:
    """Raises if a function of an exercise changes lists, arrays or tables that it gets."""
    before = [copy.deepcopy(part) if isinstance(part, DATA) else part for part in arguments]
    after = student.probe("one_process").arguments_after(exercise, function, list(arguments))
    for number, (old, new) in enumerate(zip(before, after, strict=True), start=1):
        assert same(old, new), f"{function} changes its argument {number}, which is its caller's"


DATA = (list, tuple, dict, np.ndarray, pd.DataFrame)


def same(old: Any, new: Any) -> bool:
    """Returns True for equal data, and for whatever is none."""
    if isinstance(old, pd.DataFrame):
        return list(old) == list(new) and old.reset_index(drop=True).equals(
            new.reset_index(drop=True)
        )
    if isinstance(old, dict):
        return list(old) == list(new) and all(same(value, new[key]) for key, value in old.items())
    if isinstance(old, np.ndarray):
        return np.array_equal(old, new)
    return not isinstance(old, DATA) or old == new
