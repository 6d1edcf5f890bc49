"""Stands in for A4.2 in a student's tree in which that is open: intervals on a grid.

A trace is cut into cells of a microsecond, and an interval is the cells whose middle it holds. That
is coarse, and slow for long traces, but the labs of earlier assignments can take steps apart.
"""

from __future__ import annotations

import sys
from types import ModuleType

import numpy as np
from numpy.typing import ArrayLike, NDArray

from common.errors import NotYetWritten
from common.exercises import step_apart
from common.exercises.step_apart import StepApart


def arithmetic() -> ModuleType:
    """Returns the module that computes with intervals: A4.2, or this one until it is written."""
    none = np.zeros((0, 2))
    try:
        step_apart.union(none)
        step_apart.difference(none, none)
        step_apart.intersection(none, none)
        step_apart.length(none)
    except NotYetWritten:
        return sys.modules[__name__]
    return step_apart


def take_apart(
    window: tuple[float, float], computation: ArrayLike, communication: ArrayLike
) -> StepApart:
    """Takes a step apart, as ``step_apart.take_apart`` does."""
    _, inside, computing, communicating = cells([window], computation, communication)
    computing, communicating = computing & inside, communicating & inside
    overlap = float((computing & communicating).sum())
    return StepApart(
        total=window[1] - window[0],
        computation=float(computing.sum()),
        communication=float(communicating.sum()),
        overlap=overlap,
        exposed=float(communicating.sum()) - overlap,
        idle=window[1] - window[0] - float((computing | communicating).sum()),
    )


def union(intervals: ArrayLike) -> NDArray:
    """Returns the cells of all intervals, as intervals."""
    first, covered = cells(intervals)
    return runs(first, covered)


def difference(left: NDArray, right: NDArray) -> NDArray:
    """Returns the cells of ``left`` that ``right`` has not, as intervals."""
    first, ours, theirs = cells(left, right)
    return runs(first, ours & ~theirs)


def intersection(left: NDArray, right: NDArray) -> NDArray:
    """Returns the cells that both have, as intervals."""
    first, ours, theirs = cells(left, right)
    return runs(first, ours & theirs)


def length(intervals: NDArray) -> float:
    """Returns the sum of their lengths."""
    return float(np.diff(intervals, axis=1).sum())


def cells(*sets: ArrayLike) -> tuple:
    """Returns the number of the first cell, and for each set of intervals which cells it holds."""
    pairs = [np.array(intervals, dtype=float).reshape(-1, 2) for intervals in sets]
    ends = np.concatenate([intervals.ravel() for intervals in pairs])
    if not len(ends):
        return (0, *(np.zeros(0, dtype=bool) for _ in pairs))
    first, last = int(np.floor(ends.min())), int(np.ceil(ends.max()))
    return (first, *(cells_of(intervals, first, last - first) for intervals in pairs))


def cells_of(intervals: ArrayLike, first: int, count: int) -> NDArray:
    """Returns which of ``count`` cells from ``first`` on have their middle in an interval."""
    held = np.zeros(count, dtype=bool)
    for start, end in np.array(intervals, dtype=float).reshape(-1, 2):
        held[max(round(start) - first, 0) : max(round(end) - first, 0)] = True
    return held


def runs(first: int, held: NDArray) -> NDArray:
    """Returns neighbouring cells as intervals [n, 2]."""
    edges = np.flatnonzero(np.diff(held.astype(np.int8), prepend=0, append=0))
    return (edges.reshape(-1, 2) + first).astype(float)
