"""Calibrated costs: their fit to measured passes, and the slowed rank that they find.

The fit itself comes from ``common.scheduling``, which this room does not import: the notebook hands
it in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from common.analysis.micro_batches.mode_comparison import STATIC, ModeComparison
from common.analysis.micro_batches.training_runs import mode_name
from common.analysis.show import judged_format
from common.judged import Judged
from common.samples import slowest_rank, student

Cost = Callable[[float, float], float]
"""Maps a number of texts and the longest of them to the seconds of a pass."""
Fit = Callable[[NDArray, NDArray, NDArray], Cost]
"""Maps batch sizes, lengths and seconds, each [n], to a cost."""
CALIBRATED, TOLD, NOT_TOLD = "dynamic_calibrated", "told", "not_told"
"""Ways to plan with a slowed rank: by calibration as it runs, told, or as if it were not slow."""
CLOSE = 0.25
"""Relative error within which a rank's factor counts as found: a shared machine varies by less."""
OVER_TOLD = "step over one whose plan was told"
PLANS = {
    "plan": "plan",
    "steps": "steps",
    OVER_TOLD: (OVER_TOLD, "{:.2f}"),
    "judged": ("mean, 95 %", judged_format()),
}
"""Titles of ``slow_plans``."""


def fit_costs(calibration: pd.DataFrame, fit: Fit) -> dict[int, Cost]:
    """Returns a cost per rank, fitted to the medians over repeated passes.

    Args:
        calibration: Measured passes, with the columns rank, batch_size, longest, time_ms.
        fit: Function such as ``CalibratedCost.fit``.
    """
    medians = calibration.groupby(["rank", "batch_size", "longest"])["time_ms"].median()
    costs = {}
    for rank, rows in medians.reset_index().groupby("rank"):
        columns = rows["batch_size"], rows["longest"], rows["time_ms"] / 1e3
        costs[int(rank)] = fit(*(column.to_numpy(float) for column in columns))
    return costs


def with_predicted(calibration: pd.DataFrame, costs: Mapping[int, Cost]) -> pd.DataFrame:
    """Returns medians of measured passes with ``predicted_ms``, the prediction of the rank's cost.

    Args:
        calibration: Measured passes, as in ``fit_costs``.
        costs: Cost of each rank.
    """
    keys = ["rank", "batch_size", "longest"]
    table = calibration.groupby(keys, as_index=False)["time_ms"].median()
    predicted = [
        float(costs[int(row.rank)](row.batch_size, row.longest)) * 1e3
        for row in table.itertuples(index=False)
    ]
    return table.assign(predicted_ms=predicted)


def calibration_errors(predicted: pd.DataFrame) -> pd.DataFrame:
    """Returns the relative errors, without sign, of predicted times: a row per rank.

    Columns: rank, points, median error, largest error.
    """
    error = (predicted["predicted_ms"] / predicted["time_ms"] - 1).abs()
    table = error.groupby(predicted["rank"]).agg(["size", "median", "max"])
    return table.set_axis(["points", "median error", "largest error"], axis=1).reset_index()


def fixed_share(comparison: ModeComparison, costs: Mapping[int, Cost]) -> float:
    """Returns the share of the slowest rank's computation in a static step that no text changes.

    It is the cost of an empty batch (c₀) over that of the most expensive rank's batch, averaged
    over steps.
    """
    rows = comparison.times[comparison.times["mode"] == STATIC]
    shares = []
    for _, step in rows.groupby("step"):
        times = [
            float(costs[int(row.rank)](row.local_batch, row.max_seq_len_in_batch))
            for row in step.itertuples(index=False)
        ]
        slowest = step["rank"].iloc[int(np.argmax(times))]
        shares.append(float(costs[int(slowest)](0, 0)) / max(times))
    return float(np.mean(shares))


def measured_points(
    comparisons: Iterable[ModeComparison], fit: Fit
) -> dict[str, tuple[float, float]]:
    """Returns, by data set, the share of c₀ and the measured ratio of dynamic to static.

    Both are of computation. Comparisons without calibrated costs are left out.

    Args:
        comparisons: Comparisons of modes; the key is the data set whose lengths the texts have.
        fit: Function as in ``fit_costs``.
    """
    points = {}
    for comparison in comparisons:
        if comparison.calibration is None or comparison.dynamic is None:
            continue
        share = fixed_share(comparison, fit_costs(comparison.calibration, fit))
        points[comparison.like] = share, float(comparison.dynamic["compute_ratio"])
    return points


@dataclass(frozen=True)
class SlowRank:
    """The response of calibrated costs to one slowed rank.

    Attributes:
        rank: Rank that was slowed.
        factor: Multiple of its time that it was slowed to.
        estimate: Estimate of that factor in the last step, relative to the other ranks'.
        found_at: First step from which on the estimate stays close to the factor; None where
            that never happened.
    """

    rank: int
    factor: float
    estimate: float
    found_at: int | None


def slow_steps(table: pd.DataFrame, mode: str) -> pd.Series:
    """Returns the slowest rank's step over that of a plan that was told, by step.

    Both are measured on the same global batches.
    """
    slowest = slowest_rank(table, "step_time_ms", by=["mode", "step"])
    return slowest[mode] / slowest[TOLD]


def relative_factors(table: pd.DataFrame) -> pd.DataFrame:
    """Returns each rank's estimated factor over that of the ranks that were not slowed, by step.

    Shape [steps, ranks].
    """
    rows = table[table["mode"] == CALIBRATED]
    estimates = rows.pivot(index="step", columns="rank", values="estimated_factor")
    factors = rows.groupby("rank")["slow_factor"].max()
    # A machine that is slower for all ranks alike changes no plan. So a rank is compared with the
    # geometric mean of the ranks that were not slowed, in which a common factor cancels.
    unslowed = np.log(estimates[factors.index[factors == 1]]).mean(axis=1)
    return estimates.div(np.exp(unslowed), axis=0)


def slow_summary(table: pd.DataFrame) -> SlowRank:
    """Returns which rank was slowed, and when it was found, from rows of ``slow-rank.csv``."""
    factors = table.groupby("rank")["slow_factor"].max()
    slowed, factor = int(factors.idxmax()), float(factors.max())
    estimates = relative_factors(table)[slowed]
    # Found is the step after the last one with an estimate that is off: an estimate that was close
    # and went away again had not been found. A missing estimate counts as off.
    away = np.flatnonzero(~((estimates / factor - 1).abs() <= CLOSE))
    row = int(away[-1]) + 1 if len(away) else 0
    found_at = int(estimates.index[row]) if row < len(estimates) else None
    return SlowRank(slowed, factor, float(estimates.iloc[-1]), found_at)


def slow_plans(table: pd.DataFrame, **conditions: object) -> pd.DataFrame:
    """Returns what steps take under each plan, over one that was told: a row per plan.

    Columns: plan, steps, ``OVER_TOLD`` (the median) and judged (the mean, as it may be said).
    Calibrated costs have two rows where they found the slow rank, before and after.

    Args:
        table: rows of ``slow-rank.csv``.
        conditions: further fields of ``Judged``.
    """
    found_at, ratios = slow_summary(table).found_at, slow_steps(table, CALIBRATED)
    name, plans = mode_name(CALIBRATED), {}
    if NOT_TOLD in set(table["mode"]):
        plans[mode_name(NOT_TOLD)] = slow_steps(table, NOT_TOLD)
    if found_at is None:
        plans[f"{name}: not found"] = ratios
    else:
        plans[f"{name}: before it is found"] = ratios[ratios.index < found_at]
        plans[f"{name}: from then on"] = ratios[ratios.index >= found_at]
    rows = [
        (
            plan,
            len(steps),
            float(steps.median()),
            Judged(student(np.log(steps)).map(np.exp), **conditions),
        )
        for plan, steps in plans.items()
    ]
    return pd.DataFrame(rows, columns=[*PLANS])


def slow_found(table: pd.DataFrame) -> dict[str, str]:
    """Returns whether and when the slow rank was found, as facts for a reader."""
    slowed = slow_summary(table)
    return {
        f"estimate stays within {CLOSE:.0%}": "no" if slowed.found_at is None else "yes",
        "from step": "–" if slowed.found_at is None else f"{slowed.found_at}",
        "slowed": f"rank {slowed.rank}, by a factor of {slowed.factor:g}",
        "estimated in the end": f"{slowed.estimate:.2f} times the other ranks",
    }
