"""Numbers that assignment 3 asks for, recomputed from the tables of a run."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from common.course.numbers.tables import table
from common.exercises.cost_fit import fit_cost
from common.samples import slowest_rank

STAGE = "compare_modes"
"""The stage that times all modes in turn; its tables hold no warm-up steps."""


def static_waiting_percent(run: Path) -> float:
    """Returns the share of all ranks' step time that they wait under static, in %."""
    rows = _rows_of(run, "static")
    return 100 * float(rows["waiting_time_ms"].sum() / rows["step_time_ms"].sum())


def dynamic_over_static(run: Path) -> float:
    """Returns dynamic's mean step over static's, each step its slowest rank's."""
    return _mean_step_ms(run, "dynamic") / _mean_step_ms(run, "static")


def constant_cost_ms(run: Path) -> float:
    """Returns c0 of rank 0, fitted to the medians over repeats of its timed passes, in ms."""
    passes = table(run, "calibration", STAGE)
    rank_0 = passes[passes["rank"] == 0]
    medians = rank_0.groupby(["batch_size", "longest"])["time_ms"].median().reset_index()
    c0_s, _, _ = fit_cost(
        medians["batch_size"].to_numpy(float),
        medians["longest"].to_numpy(float),
        medians["time_ms"].to_numpy(float) / 1e3,
    )
    return c0_s * 1e3


def _mean_step_ms(run: Path, mode: str) -> float:
    return float(slowest_rank(_rows_of(run, mode), "step_time_ms", by=["step"]).mean())


def _rows_of(run: Path, mode: str) -> pd.DataFrame:
    times = table(run, "mode-times", STAGE)
    return times[times["mode"] == mode]
