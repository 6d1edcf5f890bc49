"""A3.1: the partition of a step's samples among identical ranks whose slowest rank is fastest.

A rank pads its samples to the longest of them and takes cost(batch size, longest), which falls in
neither. The bottleneck of a partition is the cost of its slowest rank. Some best partition is made
of contiguous groups of the samples sorted by length (``common/scheduling/partition.py`` shows why),
so what remains is where to cut.

A bottleneck T is tried by letting each rank in turn take as many samples as it can within T. A
trial moves the bounds of the search: a plan that fits has a bottleneck of its own, at most T; if
none fits, nothing changes until some rank can take one sample more. So a search ends at the exact
optimum, for whole numbers and for floats, after about ten trials.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

import numpy as np
from numpy.typing import NDArray

Cost = Callable[[Any, Any], Any]
"""The cost of a batch size and a longest text, numbers or arrays; it falls in neither."""
FALLING = "a cost must not fall as a batch or its longest text grows"


@dataclass(frozen=True)
class SortedBatch:
    """The samples of a global batch, longest first; samples of equal length in the given order.

    Attributes:
        order: [B] index of each sample in the batch as it was given.
        lengths: [B] in tokens, descending.
        distinct: [D] the lengths that occur, descending.
        which: [B] the index of each length in ``distinct``.
    """

    order: NDArray
    lengths: NDArray
    distinct: NDArray
    which: NDArray

    @classmethod
    def of(cls, lengths: NDArray) -> SortedBatch:
        """Sorts ``lengths`` (int64 [B], at least 1)."""
        longest = int(lengths.max())
        # NumPy sorts 16 bits by radix, which is several times as fast.
        key = (longest - lengths).astype(np.uint16 if longest < 2**16 else np.int64)
        order = np.argsort(key, kind="stable")
        descending = lengths[order]
        # ``new`` marks the first sample of each length; its running count numbers the lengths.
        new = np.empty(len(lengths), dtype=bool)
        new[0] = True
        np.not_equal(descending[1:], descending[:-1], out=new[1:])
        return cls(order, descending, descending[new], np.cumsum(new) - 1)

    def __len__(self) -> int:
        return len(self.order)

    def groups(self, bounds: Sequence[int]) -> list[list[int]]:
        """Returns the samples' given indices between each two ``bounds`` (positions 0 to B)."""
        order = self.order.tolist()
        return [order[a:b] for a, b in itertools.pairwise(bounds)]


def most_samples(cost: Cost, longest: NDArray, time: float, limit: int) -> NDArray:
    """Returns the largest batch, at most ``limit``, that costs at most ``time``, int64 [n].

    There is one for each longest text in ``longest`` [n]; 0 if a single sample costs more. If the
    cost has a method ``most(longest, time)``, that knows the largest batches without a limit, and
    the cost is not called; else they are found by bisection over batch sizes.
    """
    # BEGIN SOLUTION A3.1
    if hasattr(cost, "most"):
        return np.minimum(cost.most(longest, time), limit)
    low, high = np.zeros(len(longest), np.int64), np.full(len(longest), limit, np.int64)
    while (low < high).any():
        middle = (low + high + 1) // 2
        fits = (cost(middle, longest) <= time) | (low == high)
        low = np.where(fits, middle, low)
        high = np.where(fits, high, middle - 1)
    return low
    # END SOLUTION


Trial = Callable[[float], tuple[bool, float]]
"""A trial of a bottleneck T. It returns True if T is enough, with a bottleneck of at most T that a
plan reaches; else False, with the next bottleneck to try."""


def smallest_bottleneck(low: float, high: float, attempt: Trial) -> float:
    """Returns the smallest T for which ``attempt`` succeeds.

    Args:
        low: lower bound on the bottleneck of any plan.
        high: a bottleneck that some plan reaches.
        attempt: see ``Trial``.

    Raises:
        ValueError: a cost that falls somewhere, on which the search could go on for ever.
    """
    # BEGIN SOLUTION A3.1
    trial, step = low, low // 32 + 1 if isinstance(low, int) else low / 32
    while low < high:
        fits, found = attempt(trial)
        if fits == (found > trial):
            raise ValueError(FALLING)
        if fits:
            high = found
        else:
            low = found
        # The optimum is mostly near the lower bound, so the search goes up from there in steps that
        # double, but never beyond the middle of the interval.
        whole = isinstance(low, int) and isinstance(high, int)
        trial = min(low + step, (low + high) // 2 if whole else low + (high - low) / 2)
        if trial >= high:
            trial = low
        step *= 2
    return high
    # END SOLUTION


def min_max_partition(
    batch: SortedBatch, world_size: int, cost: Cost, limit: int
) -> tuple[float, list[int]]:
    """Returns the smallest bottleneck for identical ranks, and the bounds of its groups [G + 1].

    Every group has at least one sample and at most ``limit``. Needs B ≥ G and G · limit ≥ B.

    Raises:
        ValueError: a cost that falls somewhere.
    """
    # BEGIN SOLUTION A3.1
    count, which = len(batch), batch.which.tolist()
    plan: list[int] = []

    def attempt(time: float) -> tuple[bool, float]:
        most = most_samples(cost, batch.distinct, time, limit)
        taken, starts, position = most.tolist(), [], 0
        for _ in range(world_size):
            starts.append(position)
            position += taken[which[position]]
            if position >= count:
                plan[:] = [*starts, count]
                sizes = np.diff(plan)
                return True, cost(sizes, batch.lengths[starts]).max().item()
        # A larger T changes the groups only if it lets one of them take one sample more. The next T
        # to try is the smallest cost of such a group; each group costs by the length it began with.
        began = batch.which[starts]
        more, longest = most[began] + 1, batch.distinct[began]
        costs = cost(more, longest)[more <= limit]
        return False, costs.min().item() if costs.size else inf

    high = cost(-(-count // world_size), int(batch.lengths[0]))
    low = lower_bound(batch, world_size, cost)
    best = smallest_bottleneck(low, high, attempt)
    if not plan and not attempt(best)[0]:
        raise ValueError(FALLING)
    return best, one_each(plan, world_size)
    # END SOLUTION


def lower_bound(batch: SortedBatch, world_size: int, cost: Cost) -> float:
    """Computes a lower bound on the bottleneck of any partition, by counting.

    Of the j·G + 1 longest samples some rank has j + 1, and the first of those is among the
    j·(G − 1) + 1 longest: it costs at least cost(j + 1, length at position j·(G − 1)).
    """
    # BEGIN SOLUTION A3.1
    more = np.arange((len(batch) - 1) // world_size + 1)
    return cost(more + 1, batch.lengths[more * (world_size - 1)]).max().item()
    # END SOLUTION


def one_each(bounds: list[int], world_size: int) -> list[int]:
    """Returns the same groups, but ended early enough to leave one sample for every rank.

    An added group has one sample, taken from a larger group, so no group costs more.
    """
    # BEGIN SOLUTION A3.1
    count = bounds[-1]
    ends = bounds[1:] + [count] * (world_size + 1 - len(bounds))
    last = range(count - world_size + 1, count + 1)
    return [0, *map(min, ends, last)]
    # END SOLUTION
