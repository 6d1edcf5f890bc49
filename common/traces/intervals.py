"""Sets of moments as intervals: arrays [n, 2] of starts and ends, ascending and disjoint."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def union(intervals: Sequence) -> NDArray:
    """Returns the intervals (start, end) joined where they touch: ascending, disjoint, [n, 2]."""
    pairs = np.array(intervals, dtype=float).reshape(-1, 2)
    pairs = pairs[pairs[:, 1] > pairs[:, 0]]
    if not len(pairs):
        return pairs
    # In order of their starts, an interval begins a new piece where it starts after the latest end
    # so far; the piece before it ends there.
    pairs = pairs[np.argsort(pairs[:, 0])]
    reached = np.maximum.accumulate(pairs[:, 1])
    is_first = np.append(True, pairs[1:, 0] > reached[:-1])
    is_last = np.append(is_first[1:], True)
    return np.stack([pairs[is_first, 0], reached[is_last]], axis=1)


def difference(left: NDArray, right: NDArray) -> NDArray:
    """Returns the part of ``left`` outside ``right``; all three as ``union`` makes them."""
    edges = np.concatenate([[-np.inf], right.ravel(), [np.inf]]).reshape(-1, 2)
    return intersection(left, edges)


def intersection(left: NDArray, right: NDArray) -> NDArray:
    """Returns the part that is in both; all three as ``union`` makes them."""
    # Each of left meets a run of right: from the first that ends after it starts to the last that
    # starts before it ends.
    first = np.searchsorted(right[:, 1], left[:, 0], "right")
    last = np.searchsorted(right[:, 0], left[:, 1], "left")
    counts = np.maximum(last - first, 0)
    mine = np.repeat(np.arange(len(left)), counts)
    theirs = np.arange(counts.sum()) - np.repeat(counts.cumsum() - counts, counts) + first[mine]
    starts = np.maximum(left[mine, 0], right[theirs, 0])
    return np.stack([starts, np.minimum(left[mine, 1], right[theirs, 1])], axis=1)


def length(intervals: NDArray) -> float:
    """Returns the sum of their lengths."""
    return float((intervals[:, 1] - intervals[:, 0]).sum())
