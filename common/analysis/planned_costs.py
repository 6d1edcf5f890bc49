"""What plans go by: costs fitted to measured passes, and what a partition promises on some lengths.

Costs and partitions come from ``common.scheduling``, which this room does not import: they are
handed in by the notebook.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from common.analysis.mode_comparison import STATIC, ModeComparison

Cost = Callable[[float, float], float]
"""Seconds of a pass over so many texts, padded to the longest."""
Fit = Callable[[NDArray, NDArray, NDArray], Cost]
"""From batch sizes, lengths and seconds, each [n], to a cost."""
Partition = Callable[[NDArray, int], list[list[int]]]
"""From the lengths of a global batch and the number of ranks to the texts of each rank."""


def fit_costs(calibration: pd.DataFrame, fit: Fit) -> dict[int, Cost]:
    """A cost per rank, fitted to the medians of what was timed.

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
    """Medians of what was timed, beside what each rank's cost says: ``predicted_ms``."""
    keys = ["rank", "batch_size", "longest"]
    table = calibration.groupby(keys, as_index=False)["time_ms"].median()
    predicted = [
        float(costs[int(row.rank)](row.batch_size, row.longest)) * 1e3
        for row in table.itertuples(index=False)
    ]
    return table.assign(predicted_ms=predicted)


def calibration_errors(predicted: pd.DataFrame) -> pd.DataFrame:
    """How far predicted times are from measured ones: a row per rank.

    Columns: rank, points, median_error, worst_error (both relative and without sign).
    """
    error = (predicted["predicted_ms"] / predicted["time_ms"] - 1).abs()
    groups = error.groupby(predicted["rank"])
    table = groups.agg(points="size", median_error="median", worst_error="max")
    return table.reset_index()


def fixed_share(comparison: ModeComparison, costs: Mapping[int, Cost]) -> float:
    """The share of a static step's bottleneck that no text changes: the cost of an empty batch."""
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


def equal_counts(count: int, world_size: int) -> list[list[int]]:
    """What static does: the texts in the order in which they come, the same number on each rank."""
    return [part.tolist() for part in np.array_split(np.arange(count), world_size)]


def bottleneck(lengths: NDArray, groups: Sequence[Sequence[int]]) -> int:
    """Padded tokens of the fullest rank."""
    return max(len(group) * int(lengths[list(group)].max()) for group in groups)


def promised_ratio(
    lengths: NDArray,
    world_size: int,
    batch_size: int,
    partition: Partition,
    draws: int = 200,
    seed: int = 0,
) -> float:
    """Padded tokens of the fullest rank under a partition, over those of equal counts.

    Both are means over global batches drawn from the lengths of a data set.
    """
    generator = np.random.default_rng(seed)
    planned, equal = 0, 0
    for _ in range(draws):
        batch = generator.choice(lengths, batch_size)
        equal += bottleneck(batch, equal_counts(batch_size, world_size))
        planned += bottleneck(batch, partition(batch, world_size))
    return planned / equal


def promised_ratios(
    lengths: Mapping[str, NDArray],
    world_sizes: Sequence[int],
    batch_size: int,
    partition: Partition,
    draws: int = 200,
) -> pd.DataFrame:
    """``promised_ratio`` of each data set (index) on each number of ranks (columns)."""
    rows = {
        name: [promised_ratio(values, ranks, batch_size, partition, draws) for ranks in world_sizes]
        for name, values in lengths.items()
    }
    return pd.DataFrame.from_dict(rows, orient="index", columns=list(world_sizes))
