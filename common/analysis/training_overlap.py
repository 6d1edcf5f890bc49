"""What the steps of a training run went to under each strategy, from its traces."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pandas as pd

from common.analysis.assignment1 import Training, TrainingRun
from common.analysis.step_overlap import collectives_of, read_step_overlap
from common.errors import UserError

READ_RANKS = 2
"""Traces that are read of a run: they are large, and ranks wait for each other."""
TIMES = (
    *("step_ms", "computation_ms", "communication_ms", "overlap_ms"),
    *("exposed_communication_ms", "idle_ms"),
)
LEAST_BYTES = 1024
"""Smaller collectives are bookkeeping: the loss and the norm of the gradients."""


def traces(run: TrainingRun) -> list[Path]:
    """The traces of a run's first ranks, in their order."""
    found = run.folder.glob("traces/*/rank*.json.gz")
    by_rank = {int(path.name.removeprefix("rank").removesuffix(".json.gz")): path for path in found}
    return [by_rank[rank] for rank in sorted(by_rank)][:READ_RANKS]


def overlap_table(runs: Iterable[tuple[str, TrainingRun]]) -> pd.DataFrame:
    """A row per run that was traced: medians over the traced steps, of the slowest rank.

    That is the one of the longest median step, among the first two. Medians need not add up.

    Args:
        runs: what each is called, and the run.

    Columns: name, strategy, steps (traced), ``TIMES``, hidden (the share of communication that
    overlaps with computation), collectives (a step, without those of a few bytes).
    """
    rows = []
    for name, run in runs:
        paths = traces(run)
        medians = [(read_step_overlap(path), path) for path in paths]
        if not medians:
            continue
        steps, path = max(medians, key=lambda found: found[0]["step_ms"].median())
        row = {"name": name, "strategy": run.strategy, "steps": len(steps)}
        row |= steps[list(TIMES)].median().to_dict()
        row["hidden"] = (steps["overlap_ms"] / steps["communication_ms"]).median()
        rows.append(row | {"collectives": collectives_per_step(path)})
    columns = ["name", "strategy", "steps", *TIMES, "hidden", "collectives"]
    return pd.DataFrame(rows, columns=columns)


def training_overlap(training: Training) -> pd.DataFrame:
    """``overlap_table`` of the compared runs. Raises UserError where none was traced."""
    table = overlap_table(zip(training.names(), training.compared, strict=True))
    if table.empty:
        raise UserError(f"{training.folder.name}: no traces; train without --no-profile")
    return table


def collectives_per_step(path: Path) -> str:
    """What most traced steps exchanged: ``4 all_reduce``; those of unknown size count, too.

    In some steps ranks also gather what they measured, which a median leaves out.
    """
    found = collectives_of(path)
    small = found["size_bytes"].fillna(LEAST_BYTES) < LEAST_BYTES
    by_step = found.assign(count=found["count"].where(~small, 0)).pivot_table(
        index="step", columns="operation", values="count", aggfunc="sum", fill_value=0
    )
    counts = by_step.median()
    named = [f"{count:g} {operation}" for operation, count in counts.items() if count]
    return ", ".join(named) or "none"
