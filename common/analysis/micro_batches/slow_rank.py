"""One rank slowed on purpose: when calibrated costs find it, and what steps take until then."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from common.analysis.micro_batches.training_runs import mode_name
from common.samples import slowest_rank

CALIBRATED, TOLD, NOT_TOLD = "dynamic_calibrated", "told", "not_told"
CLOSE = 0.25
"""Relative error within which a rank's factor counts as found: a shared machine varies by less."""


@dataclass(frozen=True)
class SlowRank:
    """The response of a mode to one slowed rank.

    Attributes:
        rank: the one that was slowed.
        factor: multiple of its own time that it was slowed to.
        estimate: the last step's estimate of that factor, relative to the other ranks'.
        found_at: the first step from which on the estimate stays close to the factor; None where
            that never happened.
        before, after: the slowest rank's step over that of a plan that was told of the slow rank:
            median of the steps before ``found_at``, and of those from there on (of all steps,
            where it was not found).
    """

    mode: str
    rank: int
    factor: float
    estimate: float
    found_at: int | None
    before: float
    after: float


def slow_steps(table: pd.DataFrame, mode: str) -> pd.Series:
    """Returns the slowest rank's step over that of a plan that was told, by step.

    Both are measured on the same global batches.
    """
    slowest = slowest_rank(table, "step_time_ms", by=["mode", "step"])
    return slowest[mode] / slowest[TOLD]


def relative_factors(table: pd.DataFrame, mode: str = CALIBRATED) -> pd.DataFrame:
    """Returns each rank's estimated factor over that of the ranks that were not slowed, by step.

    Shape [steps, ranks].
    """
    rows = table[table["mode"] == mode]
    estimates = rows.pivot(index="step", columns="rank", values="estimated_factor")
    factors = rows.groupby("rank")["slow_factor"].max()
    # A machine that is slower for all ranks alike changes no plan. So a rank is compared with the
    # geometric mean of the ranks that were not slowed, in which a common factor cancels.
    others = np.log(estimates[factors.index[factors == 1]]).mean(axis=1)
    return estimates.div(np.exp(others), axis=0)


def slow_summary(table: pd.DataFrame, mode: str = CALIBRATED) -> SlowRank:
    """Returns which rank was slowed, when it was found, and how far steps are from the best plan.

    Args:
        table: ``slow-rank.csv``.
        mode: the one whose estimates are followed.
    """
    rows = table[table["mode"] == mode]
    factors = rows.groupby("rank")["slow_factor"].max()
    estimates = relative_factors(table, mode)
    slowed, factor = int(factors.idxmax()), float(factors.max())
    # Found is the step after the last one with an estimate that is off: an estimate that was close
    # and went away again had not been found. A missing estimate counts as off.
    away = ~((estimates[slowed] / factor - 1).abs() <= CLOSE)
    last_away = np.flatnonzero(away)
    place = int(last_away[-1]) + 1 if len(last_away) else 0
    found = int(away.index[place]) if place < len(away) else None
    ratio = slow_steps(table, mode)
    early = ratio[ratio.index < found] if found is not None else ratio
    late = ratio[ratio.index >= found] if found is not None else ratio
    return SlowRank(
        mode=mode,
        rank=slowed,
        factor=factor,
        estimate=float(estimates[slowed].iloc[-1]),
        found_at=found,
        before=float(early.median()),
        after=float(late.median()),
    )


def slow_plans(table: pd.DataFrame, mode: str = CALIBRATED) -> pd.DataFrame:
    """Returns what steps take under each plan, over one that was told (medians): a row per plan.

    Columns: plan, steps, step over one whose plan was told. The mode has two rows where it found
    the slow rank, before and after.
    """
    found = slow_summary(table, mode)
    steps = slow_steps(table, mode).index
    rows: list[tuple[str, int, float]] = []
    if NOT_TOLD in set(table["mode"]):
        unaware = slow_steps(table, NOT_TOLD)
        rows.append((mode_name(NOT_TOLD), len(unaware), float(unaware.median())))
    if found.found_at is None:
        rows.append((f"{mode_name(mode)}: not found", len(steps), found.after))
    else:
        late = int((steps >= found.found_at).sum())
        rows.append((f"{mode_name(mode)}: before it is found", len(steps) - late, found.before))
        rows.append((f"{mode_name(mode)}: from then on", late, found.after))
    return pd.DataFrame(rows, columns=["plan", "steps", "step over one whose plan was told"])


def slow_found(table: pd.DataFrame, mode: str = CALIBRATED) -> dict[str, str]:
    """Returns whether and when the slow rank was found, as facts for a reader."""
    found = slow_summary(table, mode)
    return {
        f"estimate stays within {CLOSE:.0%}": "no" if found.found_at is None else "yes",
        "from step": "–" if found.found_at is None else f"{found.found_at}",
        "slowed": f"rank {found.rank}, by a factor of {found.factor:g}",
        "estimated in the end": f"{found.estimate:.2f} times the other ranks",
    }
