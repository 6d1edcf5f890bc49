"""Tables of a run that was handed in, and the numbers that they give."""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping
from pathlib import Path

import pandas as pd

from common.course.limits import check_run
from common.errors import UserError


def table(run: Path, name: str, stage: str = "") -> pd.DataFrame:
    """Reads ``run/stage/name.csv``; raises UserError if there is none."""
    path = run / stage / f"{name}.csv"
    if not path.is_file():
        raise UserError(f"{path.relative_to(run)} is not among the run's tables")
    return pd.read_csv(path)


def numbers_of(run: Path, assignment: int, functions: Mapping[str, str]) -> dict[str, float | str]:
    """Returns the numbers that a run's tables give, or why they give none.

    Args:
        run: folder of the tables.
        assignment: number of the assignment, whose module has the functions.
        functions: question → name of the function that computes its number.
    """
    module = importlib.import_module(f"common.course.numbers.assignment{assignment}")
    try:
        check_run(run)
    except UserError as error:
        return dict.fromkeys(functions, str(error))
    return {name: _number(getattr(module, function), run) for name, function in functions.items()}


def _number(function, run: Path) -> float | str:
    try:
        number = float(function(run))
    except UserError as error:
        return str(error)
    except MemoryError:
        raise
    except Exception as error:  # tables are the student's: anything may be in them
        return type(error).__name__
    return number if math.isfinite(number) else ""
