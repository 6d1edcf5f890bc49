"""Computes padding, bottlenecks and the promise of a plan from the lengths of texts alone.

Partitions come from ``common.scheduling``, which this room does not import: the notebook hands them
in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray

Partition = Callable[[NDArray, int], list[list[int]]]
"""Maps the lengths of a global batch and the number of ranks to the texts of each rank."""
TEXTS = 16
"""Number of texts whose longest is told on average."""
BATCHES = 200
"""Number of global batches that a promise is the mean of."""


def expected_longest(lengths: NDArray, count: int) -> float:
    """Returns the mean length of the longest of ``count`` texts drawn at random, in closed form."""
    # The longest of the draws is at most the i-th of n sorted lengths with probability
    # (i / n) ** count, so it is exactly the i-th with the difference of two such powers.
    ordered = np.sort(lengths)
    below = (np.arange(len(ordered) + 1) / len(ordered)) ** count
    return float((ordered * np.diff(below)).sum())


def length_table(lengths: Mapping[str, NDArray], count: int = TEXTS) -> pd.DataFrame:
    """Returns how unequal the texts of each data set are, in tokens.

    Columns: data set, mean, longest of ``count`` (on average), over the mean, and the share of
    texts that are as long as the longest of the data set (where texts were cut, those that were).
    """
    return pd.DataFrame(
        {
            "data set": name,
            "mean (tokens)": values.mean(),
            f"longest of {count} (tokens)": expected_longest(values, count),
            "longest over mean": expected_longest(values, count) / values.mean(),
            "texts of the greatest length": (values == values.max()).mean(),
        }
        for name, values in lengths.items()
    )


def equal_counts(count: int, world_size: int) -> list[list[int]]:
    """Returns static's split: texts in the order of arrival, the same number on each rank."""
    return [part.tolist() for part in np.array_split(np.arange(count), world_size)]


def padded_tokens(lengths: ArrayLike, groups: Sequence[Sequence[int]]) -> list[int]:
    """Returns each rank's padded tokens: its number of texts times the longest of them."""
    values = np.asarray(lengths)
    return [len(group) * int(values[list(group)].max()) for group in groups]


def split_table(
    lengths: ArrayLike, partitions: Mapping[str, Sequence[Sequence[int]]]
) -> pd.DataFrame:
    """Returns padded tokens of several splits of one batch, and lower bounds in the last row.

    Columns: split, slowest rank, all ranks, slowest over the first split's.

    Args:
        lengths: Tokens of each text.
        partitions: Texts of each rank (their indices), by the partition's name.
    """
    values = np.asarray(lengths)
    padded = {name: padded_tokens(values, groups) for name, groups in partitions.items()}
    # The bound: no padding, tokens shared out evenly; but some rank has the longest text.
    ranks, total = len(next(iter(padded.values()))), int(values.sum())
    bound = max(int(values.max()), -(-total // ranks))
    table = pd.DataFrame(
        {
            "split": [*padded, "lower bound"],
            "slowest rank": [*map(max, padded.values()), bound],
            "all ranks": [*map(sum, padded.values()), total],
        }
    )
    table["slowest over the first"] = table["slowest rank"] / table["slowest rank"].iloc[0]
    return table


def promised_ratio(
    lengths: NDArray,
    world_size: int,
    batch_size: int,
    partition: Partition,
) -> float:
    """Returns the fullest rank's padded tokens under a partition over those of equal counts.

    Both are means over ``BATCHES`` global batches drawn from the lengths of a data set.
    """
    generator = np.random.default_rng(0)
    planned, equal = 0, 0
    for _ in range(BATCHES):
        batch = generator.choice(lengths, batch_size)
        equal += max(padded_tokens(batch, equal_counts(batch_size, world_size)))
        planned += max(padded_tokens(batch, partition(batch, world_size)))
    return planned / equal


def promised_ratios(
    lengths: Mapping[str, NDArray],
    world_sizes: Sequence[int],
    batch_size: int,
    partition: Partition,
) -> pd.DataFrame:
    """Returns ``promised_ratio`` of each data set (index) on each number of ranks (columns)."""
    rows = {
        name: [promised_ratio(values, ranks, batch_size, partition) for ranks in world_sizes]
        for name, values in lengths.items()
    }
    table = pd.DataFrame.from_dict(rows, orient="index", columns=list(world_sizes))
    return table.rename_axis("data set")


def with_constant(ratios: pd.Series, shares: Sequence[float]) -> pd.DataFrame:
    """Returns the ratio to static that is left where a share of a static step is constant.

    A plan brings the rest of the step down to its ratio r and leaves the share s as it is:
    s + (1 - s) * r.

    Args:
        ratios: Ratio that padded tokens promise, by data set.
        shares: Constant shares of a static step; a column each.
    """
    columns = {f"{share:.0%} constant": share + (1 - share) * ratios for share in shares}
    return pd.DataFrame(columns)
