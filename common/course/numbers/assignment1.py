"""Numbers that assignment 1 asks for, recomputed from the tables of a run."""

from __future__ import annotations

from pathlib import Path

from common.course.numbers.tables import table
from common.errors import UserError
from common.samples import per_round


def ddp_speedup(run: Path) -> float:
    """Returns how many times as fast as one device DDP is, with one micro-batch a step."""
    return _ratio_of_steps(run, "single", "DDP")


def ddp_hidden_percent(run: Path) -> float:
    """Returns the share of DDP's communication that computation hides, in percent.

    It is that of the rank with the longest median step, of all its traced steps together.

    Raises:
        UserError: no step was traced, or none communicated.
    """
    traced = table(run, "step-overlap", "train_ddp")
    medians_ms = traced.groupby("rank")["step_ms"].median()
    steps = traced[traced["rank"] == medians_ms.idxmax()] if len(medians_ms) else traced
    communication_ms = steps["communication_ms"].sum()
    if not communication_ms > 0:
        raise UserError("train_ddp/step-overlap.csv: no traced step with communication")
    return float(100 * steps["overlap_ms"].sum() / communication_ms)


def full_shard_over_ddp(run: Path) -> float:
    """Returns how many times as long as DDP's a step of FULL_SHARD is, with one micro-batch."""
    return _ratio_of_steps(run, "FULL_SHARD", "DDP")


def _ratio_of_steps(run: Path, strategy: str, other: str) -> float:
    """Returns the median over rounds of two strategies' steps, the first over the second.

    A step of a round is the median of its iterations, each as long as its slowest rank's. Both
    steps of a ratio are of one round, so that a drift of the machine cancels.

    Raises:
        UserError: one of the two was not measured with one micro-batch a step.
    """
    times = table(run, "strategy-times", "compare_strategies")
    times = times[times["accumulation"] == 1]
    for name in (strategy, other):
        if name not in set(times["strategy"]):
            raise UserError(f"compare_strategies/strategy-times.csv: no steps of {name}")
    by_round = per_round(times, "step_time_ms", "strategy")
    return float((by_round[strategy] / by_round[other]).median())
