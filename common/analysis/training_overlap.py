"""What the steps of a training run went to under each strategy, as their traces say.

The trainer reads its traces when it ends (``common.analysis.step_overlap``) and keeps what they say
as tables: they are small enough to record, where traces are not.
"""

from __future__ import annotations

from collections.abc import Iterable

import pandas as pd

from common.analysis.assignment1 import Training, TrainingRun
from common.analysis.step_parts import middle_half
from common.errors import UserError

OVERLAP, COLLECTIVES = "step-overlap.csv", "step-collectives.csv"
TIMES = (
    *("step_ms", "computation_ms", "communication_ms", "overlap_ms"),
    *("exposed_communication_ms", "idle_ms"),
)
LEAST_BYTES = 1024
"""Smaller collectives are bookkeeping: the loss and the norm of the gradients."""


def overlap_table(runs: Iterable[tuple[str, TrainingRun]]) -> pd.DataFrame:
    """A row per run that was traced: means over traced steps of the slowest rank.

    That is the one of the longest median step. Means over the same steps add up, which medians do
    not; the middle half of the steps, by their length, keeps hiccups out.

    Args:
        runs: what each is called, and the run.

    Columns: name, strategy, steps (traced), ``TIMES`` (computation, exposed communication and idle
    time add up to the step, overlap and exposed communication to communication), hidden (overlap
    over communication), collectives (a step, without those of a few bytes).
    """
    rows = []
    for name, run in runs:
        if not (run.folder / OVERLAP).is_file():
            continue
        traced = pd.read_csv(run.folder / OVERLAP)
        if traced.empty:
            continue
        slowest = traced.groupby("rank")["step_ms"].median().idxmax()
        steps = traced[traced["rank"] == slowest]
        row = {"name": name, "strategy": run.strategy, "steps": len(steps)}
        mean = steps.loc[middle_half(steps["step_ms"]), list(TIMES)].mean()
        row |= mean.to_dict()
        communicated = mean["communication_ms"]
        row["hidden"] = mean["overlap_ms"] / communicated if communicated else float("nan")
        collectives = pd.read_csv(run.folder / COLLECTIVES)
        own = collectives[collectives["rank"] == slowest]
        rows.append(row | {"collectives": collectives_per_step(own)})
    columns = ["name", "strategy", "steps", *TIMES, "hidden", "collectives"]
    return pd.DataFrame(rows, columns=columns)


def training_overlap(training: Training) -> pd.DataFrame:
    """``overlap_table`` of the compared runs. Raises UserError where none was traced."""
    table = overlap_table(zip(training.names(), training.compared, strict=True))
    if table.empty:
        raise UserError(f"{training.folder.name}: no traces; train without --no-profile")
    return table


def collectives_per_step(found: pd.DataFrame) -> str:
    """What a traced step exchanged: ``4 all_reduce``; those of unknown size count, too."""
    large = found[found["size_bytes"].isna() | (found["size_bytes"] >= LEAST_BYTES)]
    by_step = large.pivot_table(
        index="step", columns="operation", values="count", aggfunc="sum", fill_value=0
    )
    # Rows are gathered after some of the steps: what most steps do not have is no part of a step.
    counts = by_step.reindex(found["step"].unique(), fill_value=0).median()
    named = [f"{count:g} {operation}" for operation, count in counts.items() if count]
    return ", ".join(named) or "none"
