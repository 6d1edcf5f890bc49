"""A4.2: a training step taken apart, into computation, exposed communication and idle time.

Every moment of a step is exactly one of the three. Computation and communication overlap each
other, and each is given as intervals that may overlap, too: kernels on several streams, operators
in several threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray


@dataclass(frozen=True)
class StepApart:
    """The parts of a step, in the unit of its intervals.

    ``computation``, ``exposed`` and ``idle`` add up to ``total``. ``overlap`` is communication
    beside computation, ``exposed`` communication without it, and ``communication`` both.
    """

    total: float
    computation: float
    communication: float
    overlap: float
    exposed: float
    idle: float


def take_apart(
    window: tuple[float, float], computation: ArrayLike, communication: ArrayLike
) -> StepApart:
    """Takes a step apart.

    Args:
        window: start and end of the step.
        computation, communication: intervals (start, end) [n, 2], in any order; they may overlap,
            be empty, and reach beyond the step. They stay as they are. A hundred thousand of them
            take no more than seconds.
    """
    # BEGIN SOLUTION A4.2
    whole = union([window])
    computing = intersection(union(computation), whole)
    communicating = intersection(union(communication), whole)
    total, overlap = length(whole), length(intersection(computing, communicating))
    exposed = length(communicating) - overlap
    return StepApart(
        total=total,
        computation=length(computing),
        communication=length(communicating),
        overlap=overlap,
        exposed=exposed,
        idle=total - length(union([*computing, *communicating])),
    )
    # END SOLUTION


def union(intervals: ArrayLike | Sequence) -> NDArray:
    """Returns the intervals (start, end) joined where they touch: ascending, disjoint, [n, 2].

    None of the result is empty, or touches the next. ``intervals`` stay as they are.
    """
    # BEGIN SOLUTION A4.2
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
    # END SOLUTION


def difference(left: NDArray, right: NDArray) -> NDArray:
    """Returns the part of ``left`` outside ``right``; all three as ``union`` makes them."""
    # BEGIN SOLUTION A4.2
    edges = np.concatenate([[-np.inf], right.ravel(), [np.inf]]).reshape(-1, 2)
    return intersection(left, edges)
    # END SOLUTION


def intersection(left: NDArray, right: NDArray) -> NDArray:
    """Returns the part that is in both; all three as ``union`` makes them."""
    # BEGIN SOLUTION A4.2
    # Each of left meets a run of right: from the first that ends after it starts to the last that
    # starts before it ends.
    first = np.searchsorted(right[:, 1], left[:, 0], "right")
    last = np.searchsorted(right[:, 0], left[:, 1], "left")
    counts = np.maximum(last - first, 0)
    mine = np.repeat(np.arange(len(left)), counts)
    theirs = np.arange(counts.sum()) - np.repeat(counts.cumsum() - counts, counts) + first[mine]
    starts = np.maximum(left[mine, 0], right[theirs, 0])
    return np.stack([starts, np.minimum(left[mine, 1], right[theirs, 1])], axis=1)
    # END SOLUTION


def length(intervals: NDArray) -> float:
    """Returns the sum of their lengths."""
    # BEGIN SOLUTION A4.2
    return float((intervals[:, 1] - intervals[:, 0]).sum())
    # END SOLUTION
