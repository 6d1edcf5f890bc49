"""The optimal groups for ranks of a few kinds, by dynamic programming over the ranks in use.

A kind is a cost and a limit that some ranks share. For a bottleneck T, let the reach of (i, j, …)
be the most of the longest samples that i ranks of the first kind, j of the second and so on can
take within T. The furthest reach is the best to continue from, because the samples left are then
shorter. So reach(i, j) is the larger of two numbers: reach(i − 1, j) extended by one more rank of
the first kind, and reach(i, j − 1) extended by one of the second. T is enough if all ranks together
reach the last sample.

Layers go by the number of ranks in use, and within a layer NumPy works on all counts at once. The
count of the last kind follows from the others, so a layer of two kinds is a vector. Eight ranks,
each of its own kind, are subsets: 2⁷ numbers a layer.

Where the order of the ranks is given (``fixed_order``), the search is that of exercise A3.1; a
trial takes rank by rank, as each may have a cost of its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from common.exercises.min_max_partition import (
    FALLING,
    SortedBatch,
    min_max_partition,
    most_samples,
    smallest_bottleneck,
)
from common.scheduling.cost import UNLIMITED, Cost


@dataclass(frozen=True)
class RankKind:
    """Ranks, ascending, that share a cost and a limit."""

    cost: Cost
    limit: int
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class FastestOf:
    """The cost of the fastest of several ranks, at each micro-batch."""

    costs: tuple[Cost, ...]
    of_costs: ClassVar = np.minimum
    of_batches: ClassVar = np.maximum

    def __call__(self, batch_size: Any, longest: Any) -> Any:
        """Returns that rank's cost."""
        return self.of_costs.reduce([cost(batch_size, longest) for cost in self.costs])

    def most(self, longest: NDArray, time: float) -> NDArray:
        """Returns the largest batches [n] that the rank can take within ``time``."""
        return self.of_batches.reduce(
            [most_samples(cost, longest, time, UNLIMITED) for cost in self.costs]
        )


@dataclass(frozen=True)
class SlowestOf(FastestOf):
    """The cost of the slowest of several ranks, at each micro-batch."""

    of_costs: ClassVar = np.maximum
    of_batches: ClassVar = np.minimum


def kinds_of(costs: Sequence[Cost], limits: Sequence[int]) -> list[RankKind]:
    """Returns a kind for each distinct (cost, limit), in the order of their first ranks."""
    by_kind: dict[tuple, list[int]] = {}
    for rank, key in enumerate(zip(costs, limits, strict=True)):
        by_kind.setdefault(key, []).append(rank)
    return [RankKind(cost, limit, tuple(ranks)) for (cost, limit), ranks in by_kind.items()]


def trial_steps(kinds: Sequence[RankKind]) -> int:
    """Counts the numbers that one trial of a bottleneck computes: counts × layers × kinds."""
    *smaller, largest = sorted(len(kind.ranks) for kind in kinds)
    return math.prod(count + 1 for count in smaller) * (sum(smaller) + largest) * len(kinds)


def optimal_order(batch: SortedBatch, kinds: Sequence[RankKind]) -> tuple[float, list[int], list]:
    """Finds the smallest bottleneck, the groups' bounds [G + 1], and each group's kind [G]."""
    # The kind with most ranks comes last: its count is the axis that a layer does not need.
    largest = max(range(len(kinds)), key=lambda kind: len(kinds[kind].ranks))
    order = [kind for kind in range(len(kinds)) if kind != largest] + [largest]
    search = _CountSearch(batch, [kinds[kind] for kind in order])
    low, high = search.range()
    best = smallest_bottleneck(low, high, search.attempt)
    bounds, used = search.plan(best)
    return best, bounds, [order[kind] for kind in used]


class _CountSearch:
    """Trials of a bottleneck; the last kind is the one whose count a layer leaves out."""

    def __init__(self, batch: SortedBatch, kinds: list[RankKind]) -> None:
        self.batch, self.kinds = batch, kinds
        self.counts = [len(kind.ranks) for kind in kinds]
        self.world_size = sum(self.counts)
        self.admissible = len(batch) - self.world_size + 1
        self.limits = [min(kind.limit, self.admissible) for kind in kinds]
        self.shape = tuple(count + 1 for count in self.counts[:-1])

    def range(self) -> tuple[float, float]:
        """Returns a lower bound on the bottleneck, and a bottleneck that some plan reaches."""
        fastest = FastestOf(tuple(dict.fromkeys(kind.cost for kind in self.kinds)))
        low, _ = min_max_partition(self.batch, self.world_size, fastest, max(self.limits))
        each = [kind for kind in self.kinds for _ in kind.ranks]
        costs, limits = [kind.cost for kind in each], [kind.limit for kind in each]
        high = min(
            fixed_order(self.batch, costs, limits)[0],
            fixed_order(self.batch, costs[::-1], limits[::-1])[0],
        )
        return low, high

    def attempt(self, time: float) -> tuple[bool, float]:
        """Tries a bottleneck; a ``Trial`` of ``smallest_bottleneck``."""
        most = self._most(time)
        fits = self._reach(most)[-1].flat[-1] == len(self.batch)
        found = -inf if fits else inf
        distinct = self.batch.distinct
        for kind, limit, taken in zip(self.kinds, self.limits, most, strict=True):
            # A plan's bottleneck is the cost of one of its groups. If T is enough, the largest
            # possible cost of at most T is enough, too; else the smallest one above T is next.
            possible = taken > 0 if fits else taken < limit
            if possible.any():
                sizes = taken[possible] if fits else taken[possible] + 1
                costs = kind.cost(sizes, distinct[possible])
                found = max(found, costs.max().item()) if fits else min(found, costs.min().item())
        return fits, found

    def plan(self, time: float) -> tuple[list[int], list[int]]:
        """Returns the groups' bounds and the kind of each, for a bottleneck that is enough."""
        # Backwards from the last layer: in each layer the kind is sought whose rank, added to the
        # counts without it, reaches the group's end. That rank takes the group.
        following = self._following(most := self._most(time))
        layers = self._reach(most, keep=True)
        state = tuple(self.counts[:-1])
        bounds, used = [len(self.batch)], []
        for layer in reversed(range(self.world_size)):
            cap = len(self.batch) - (self.world_size - layer - 1)
            for kind in range(len(self.kinds)):
                before = list(state)
                if kind < len(before):
                    before[kind] -= 1
                    if before[kind] < 0:
                        continue
                position = int(layers[layer][tuple(before)])
                if min(following[kind][position], cap) == bounds[-1]:
                    break
            state = tuple(before)
            bounds.append(position)
            used.append(kind)
        return bounds[::-1], used[::-1]

    def _most(self, time: float) -> list[NDArray]:
        pairs = zip(self.kinds, self.limits, strict=True)
        return [most_samples(k.cost, self.batch.distinct, time, limit) for k, limit in pairs]

    def _following(self, most: list[NDArray]) -> list[NDArray]:
        """Returns the position that a rank of each kind reaches from each position, [B + 1].

        It is −1 if the rank can take no sample, and in the last place. That place is the index of
        the end and, as index −1, of counts that cannot be: neither can be continued.
        """
        positions, which = np.arange(len(self.batch)), self.batch.which
        reached = []
        for taken in most:
            each = taken[which]
            reached.append(np.append(np.where(each > 0, positions + each, -1), -1))
        return reached

    def _reach(self, most: list[NDArray], keep: bool = False) -> list[NDArray]:
        """Computes the reach in each layer, or only in the last; −1 for counts that cannot be.

        Counts of the last kind above its number of ranks are computed, too: none leads to the end.
        """
        # A layer is an array over the counts of all kinds but the last. Its next one is the largest
        # of these: one more rank of the last kind, which keeps the counts, and one more of another
        # kind, which moves them by 1 along its axis. One sample is kept back for each later rank.
        following = self._following(most)
        reach = np.full(self.shape, -1)
        reach.flat[0] = 0
        small = np.int32 if len(self.batch) > np.iinfo(np.int16).max else np.int16
        layers = [reach.astype(small)] if keep else []
        for layer in range(self.world_size):
            added = following[-1][reach]
            for axis in range(len(self.shape)):
                to, of = [slice(None)] * len(self.shape), [slice(None)] * len(self.shape)
                to[axis], of[axis] = slice(1, None), slice(None, -1)
                part = added[tuple(to)]
                np.maximum(part, following[axis][reach[tuple(of)]], out=part)
            reach = np.minimum(added, len(self.batch) - (self.world_size - layer - 1))
            if keep:
                layers.append(reach.astype(small))
        return layers or [reach]


def fixed_order(
    batch: SortedBatch, costs: Sequence[Cost], limits: Sequence[int]
) -> tuple[float, list[int]]:
    """Returns the smallest bottleneck if rank i takes group i, and the groups' bounds [G + 1].

    Needs B ≥ G and sum of limits ≥ B. Raises ValueError for a cost that falls somewhere.
    """
    plan: list[int] = []

    def attempt(time: float) -> tuple[bool, float]:
        fits, found, bounds = in_order(batch.lengths, costs, limits, time)
        if fits:
            plan[:] = bounds
        return fits, found

    longest = int(batch.lengths[0])
    high = max(
        cost(min(limit, len(batch)), longest) for cost, limit in zip(costs, limits, strict=True)
    )
    best = smallest_bottleneck(costs[0](1, longest), high, attempt)
    if not plan and not attempt(best)[0]:
        raise ValueError(FALLING)
    return best, plan


def in_order(
    lengths: Sequence[int], costs: Sequence[Cost], limits: Sequence[int], time: float
) -> tuple[bool, float, list[int]]:
    """Tries the bottleneck ``time`` for ranks in a given order.

    ``lengths`` [B] descend; ``costs`` and ``limits`` are the ranks' [G]. Returns as ``Trial``, and
    the bounds of the groups that the trial came to.
    """
    # Rank by rank in Python numbers, as each rank may have a cost of its own. ``reached`` is the
    # largest cost so far. ``following`` is the smallest cost of a group with one sample more.
    count, world_size = len(lengths), len(costs)
    bounds, reached, following = [0], 0, inf
    for index, (cost, limit) in enumerate(zip(costs, limits, strict=True)):
        position = bounds[-1]
        longest = int(lengths[position])
        allowed = min(limit, count - position - (world_size - index - 1))
        most = _most_of_one(cost, longest, time, allowed)
        if most < allowed:
            following = min(following, cost(most + 1, longest))
        if not most:
            return False, following, bounds
        bounds.append(position + most)
        reached = max(reached, cost(most, longest))
    return bounds[-1] == count, reached if bounds[-1] == count else following, bounds


def _most_of_one(cost: Cost, longest: int, time: float, limit: int) -> int:
    """Returns what ``most_samples`` does, for one length."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        if cost(middle, longest) <= time:
            low = middle
        else:
            high = middle - 1
    return low
