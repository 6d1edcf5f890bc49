"""Groups of nearly equal weight without padding: a rank's cost is the sum of its samples' costs.

Packed samples are concatenated, so only the sum of a rank's samples matters: this is makespan
scheduling on identical machines. Both methods are deterministic.
"""

from __future__ import annotations

import heapq
import itertools
from bisect import insort
from collections.abc import Iterator

import numpy as np
from numpy.typing import ArrayLike

from common.errors import UserError
from common.scheduling.partition import check_ranks


def largest_first(weights: ArrayLike, world_size: int) -> list[list[int]]:
    """Gives each sample, the heaviest first, to the rank that has least so far.

    ``weights`` [B] are above 0, such as lengths in tokens. The largest sum is at most
    4/3 − 1/(3·G) times the optimum (Graham, Bounds on Multiprocessing Timing Anomalies, 1969).

    Raises UserError for fewer samples than ranks.
    """
    values = _checked(weights, world_size)
    ranks = [(0, rank) for rank in range(world_size)]
    groups: list[list[int]] = [[] for _ in range(world_size)]
    for index in sorted(range(len(values)), key=lambda index: -values[index]):
        load, rank = ranks[0]
        groups[rank].append(index)
        heapq.heapreplace(ranks, (load + values[index], rank))
    return groups


def karmarkar_karp(
    weights: ArrayLike, world_size: int, equal_size: bool = False
) -> list[list[int]]:
    """Divides samples among ranks by the largest differencing method.

    Args:
        weights: [B] above 0, such as lengths in tokens.
        equal_size: ranks get equally many samples, or numbers that differ by one where G does not
            divide B.

    A partial plan is G sums. The two with the largest spread are joined, the largest sums of one
    with the smallest of the other, until one is left (Karmarkar and Karp, The Differencing Method
    of Set Partitioning, 1982). With ``equal_size`` it starts from plans that give each rank one
    sample, of G that are neighbours in weight, as verl does (verl/utils/seqlen_balancing.py); the
    lightest of these has blanks where G does not divide B. Groups come by descending sum.

    Raises UserError for fewer samples than ranks.
    """
    values = _checked(weights, world_size)
    light_first = sorted(range(len(values)), key=lambda index: values[index])
    size = world_size if equal_size else 1
    blanks = [None] * (-len(values) % size)
    ordered = blanks + light_first
    serial = itertools.count()  # ties go by age: no two entries compare equal

    def entry(index: int | None) -> tuple:
        # A group is (−sum, age, its samples as a tree of pairs); groups ascend, so sums descend.
        return (
            (-values[index], next(serial), index) if index is not None else (0, next(serial), None)
        )

    heap = []
    for start in range(0, len(ordered), size):
        plan = sorted(entry(index) for index in ordered[start : start + size])
        heap.append((_spread(plan, world_size), next(serial), plan))
    heapq.heapify(heap)
    while len(heap) > 1:
        _, _, first = heapq.heappop(heap)
        _, _, second = heap[0]
        plan = _joined(first, second, world_size, serial)
        heapq.heapreplace(heap, (_spread(plan, world_size), next(serial), plan))
    return [list(_samples(tree)) for _, _, tree in heap[0][2]]


def _spread(plan: list[tuple], world_size: int) -> float:
    """Returns smallest − largest sum, so that a heap gives the plan of largest spread first."""
    return plan[0][0] - (plan[-1][0] if len(plan) == world_size else 0)


def _joined(first: list, second: list, world_size: int, serial: Iterator[int]) -> list[tuple]:
    """Joins the largest groups of one plan with the smallest of the other; omits empty groups."""
    if len(first) < len(second):
        first, second = second, first
    if len(second) == 1 and len(first) < world_size:
        insort(first, second[0])
        return first
    alone = world_size - len(second)  # groups of the first plan that meet an empty group
    pairs = zip(first[alone:], reversed(second), strict=False)
    both = [(a[0] + b[0], next(serial), (a[2], b[2])) for a, b in pairs]
    return sorted(first[:alone] + second[: len(second) - len(both)] + both)


def _samples(tree: object) -> Iterator[int]:
    """Yields the samples of a tree of pairs, left to right; not recursive, as it may be deep."""
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, tuple):
            waiting += node[::-1]
        elif node is not None:
            yield node


def _checked(weights: ArrayLike, world_size: int) -> list:
    values = np.asarray(weights)
    check_ranks(len(values), world_size)
    if not (values > 0).all():
        at = int(np.argmin(values > 0))
        raise UserError(f"sample {at} weighs {values[at]}; weights must be above 0")
    return values.tolist()
