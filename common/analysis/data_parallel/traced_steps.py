"""Breaks down the time of a training run's traced steps, under each strategy.

The trainer reads its traces when it ends (``traces/step_overlap`` does) and keeps the
result as tables: these are small enough to record, and traces are not.
"""

from __future__ import annotations

from collections.abc import Iterable

import pandas as pd

from common.analysis.data_parallel.training_runs import Training, TrainingRun
from common.analysis.step_parts import middle_half
from common.errors import UserError
from common.traces.step_overlap import TIMES

OVERLAP, COLLECTIVES = "step-overlap.csv", "step-collectives.csv"
LEAST_BYTES = 1024
"""Smaller collectives are bookkeeping: the loss and the norm of the gradients."""


def overlap_table(named: Iterable[tuple[str, TrainingRun]]) -> pd.DataFrame:
    """Returns a row per traced run: means over traced steps of the slowest rank.

    Args:
        named: the name of each run, and the run.

    Columns: name, strategy, steps (traced), ``TIMES`` (computation, exposed communication and idle
    time add up to the step, overlap and exposed communication to communication), hidden (overlap
    over communication; NaN for ``single``), collectives (a step, without those of a few bytes),
    slowdown (a traced step over the median of the run's other steps; NaN where all were traced).
    """
    rows = []
    for name, run in named:
        if not run.opened.has(OVERLAP):
            continue
        traced = run.opened.table(OVERLAP)
        if not traced.empty:
            rows.append({"name": name, "strategy": run.strategy} | _mean_step(run, traced))
    columns = ["name", "strategy", "steps", *TIMES, "hidden", "collectives", "slowdown"]
    return pd.DataFrame(rows, columns=columns)


def training_overlap(training: Training) -> pd.DataFrame:
    """Returns ``overlap_table`` of the compared runs. Raises UserError where none was traced."""
    table = overlap_table(zip(training.names(), training.compared, strict=True))
    if table.empty:
        raise UserError(f"{training.folder.name}: no traces; train without --no-profile")
    return table


def collectives_per_step(found: pd.DataFrame) -> str:
    """Returns the collectives of a traced step, such as ``4 all_reduce``.

    Those of unknown size count, too.
    """
    large = found[found["size_bytes"].isna() | (found["size_bytes"] >= LEAST_BYTES)]
    by_step = large.pivot_table(
        index="step", columns="operation", values="count", aggfunc="sum", fill_value=0
    )
    # Rows are gathered after some of the steps: what most steps do not have is no part of a step.
    counts = by_step.reindex(found["step"].unique(), fill_value=0).median()
    named = [f"{count:g} {operation}" for operation, count in counts.items() if count]
    return ", ".join(named) or "none"


def _mean_step(run: TrainingRun, traced: pd.DataFrame) -> dict:
    """Returns the mean traced step of a run's slowest rank, with the columns of the table."""
    # The rank with the longest median step sets the pace. Its parts are means over the same steps,
    # since these add up and medians do not; the middle half of the steps, by their length, keeps
    # hiccups of the machine out.
    slowest = traced.groupby("rank")["step_ms"].median().idxmax()
    steps = traced[traced["rank"] == slowest]
    mean = steps.loc[middle_half(steps["step_ms"]), list(TIMES)].mean()
    communicated, shared = mean["communication_ms"], run.strategy != "single"
    collectives = run.opened.table(COLLECTIVES)
    other_steps = run.step_times_ms()["step_time_ms"]
    return mean.to_dict() | {
        "steps": len(steps),
        "hidden": mean["overlap_ms"] / communicated if shared and communicated else float("nan"),
        "collectives": collectives_per_step(collectives[collectives["rank"] == slowest]),
        "slowdown": mean["step_ms"] / other_steps.median(),
    }
