"""Costs of a micro-batch, fitted to measured passes: their errors, and the share nothing can move.

The fit itself comes from ``common.scheduling``, which this room does not import: the notebook hands
it in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from common.analysis.micro_batches.mode_comparison import STATIC, ModeComparison

Cost = Callable[[float, float], float]
"""Maps a number of texts and the longest of them to the seconds of a pass."""
Fit = Callable[[NDArray, NDArray, NDArray], Cost]
"""Maps batch sizes, lengths and seconds, each [n], to a cost."""


def fit_costs(calibration: pd.DataFrame, fit: Fit) -> dict[int, Cost]:
    """Returns a cost per rank, fitted to the medians over repeated passes.

    Args:
        calibration: columns rank, batch_size, longest, time_ms.
        fit: such as ``CalibratedCost.fit``.
    """
    medians = calibration.groupby(["rank", "batch_size", "longest"])["time_ms"].median()
    costs = {}
    for rank, own in medians.reset_index().groupby("rank"):
        columns = own["batch_size"], own["longest"], own["time_ms"] / 1e3
        costs[int(rank)] = fit(*(column.to_numpy(float) for column in columns))
    return costs


def with_predicted(calibration: pd.DataFrame, costs: Mapping[int, Cost]) -> pd.DataFrame:
    """Returns medians of measured passes with ``predicted_ms``, the prediction of the rank's cost.

    Args:
        calibration: columns rank, batch_size, longest, time_ms.
        costs: by rank.
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
        comparisons: of modes; the key is the data set whose lengths the texts have.
        fit: as in ``fit_costs``.
    """
    points = {}
    for comparison in comparisons:
        if comparison.calibration is None or "dynamic" not in comparison.summary.index:
            continue
        share = fixed_share(comparison, fit_costs(comparison.calibration, fit))
        points[comparison.like] = share, float(comparison.summary.loc["dynamic", "compute_ratio"])
    return points
