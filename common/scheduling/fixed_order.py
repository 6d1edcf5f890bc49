"""The smallest bottleneck of contiguous groups for ranks in a given order, each with its own cost.

The search is that of exercise A3.1; a trial takes rank by rank, as each may have a cost of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from common.exercises.min_max_partition import FALLING, SortedBatch, smallest_bottleneck
from common.scheduling.cost import Cost


def fixed_order(
    batch: SortedBatch, costs: Sequence[Cost], limits: Sequence[int]
) -> tuple[float, list[int]]:
    """Returns the smallest bottleneck if rank i takes group i, and the groups' bounds [G + 1].

    Needs B ≥ G and sum of limits ≥ B.

    Raises:
        ValueError: a cost that falls somewhere.
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

    Args:
        lengths: [B] descending.
        costs, limits: [G] of each rank.
        time: the bottleneck.

    Returns:
        as ``Trial``, and the bounds of the groups that the trial came to.
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
