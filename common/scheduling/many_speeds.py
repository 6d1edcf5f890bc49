"""A good plan for ranks of many speeds, and a lower bound on the optimum.

Ranks are merged into a few kinds of similar speed. With each kind's fastest cost and largest limit
the exact plan is a lower bound: every real plan would fit. Several orders of the real ranks are
tried, each with its best bounds: those in which this plan and the plan with each kind's slowest
cost and smallest limit use the kinds, and plain orders by speed. The best of them is improved by
exchanging the slowest rank with others. Nothing depends on a clock, so all ranks find the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from common.exercises.min_max_partition import SortedBatch, lower_bound
from common.scheduling.cost import CalibratedCost, Cost
from common.scheduling.unequal_ranks import (
    FastestOf,
    RankKind,
    SlowestOf,
    fixed_order,
    in_order,
    optimal_order,
    trial_steps,
)

MERGED_KINDS = 6
AFFORDABLE_STEPS = 6 * 10**6
"""Upper bound on the numbers that one trial with merged kinds computes, which limits the number of
kinds: all trials take about half a second."""
EXCHANGE_BUDGET = 50_000
"""Upper bound on the ranks tried while exchanging, in all about a sixth of a second."""


class RankOrder(NamedTuple):
    """Groups of consecutive samples, and the order of the ranks that take them.

    Attributes:
        bottleneck: the largest cost of a rank.
        bounds: bounds of the groups [G + 1].
        ranks: the rank of each group [G].
        lower_bound: lower bound on the bottleneck of any plan.
    """

    bottleneck: float
    bounds: list[int]
    ranks: list[int]
    lower_bound: float


def heuristic_order(batch: SortedBatch, costs: Sequence[Cost], limits: Sequence[int]) -> RankOrder:
    """Finds a good order of ranks of many speeds, with its groups."""
    size, longest = max(1, len(batch) // len(costs)), int(batch.lengths.mean())
    speed = [float(cost(size, longest)) for cost in costs]
    by_speed = sorted(range(len(costs)), key=lambda rank: speed[rank])  # fastest first
    clusters = _clusters(by_speed, speed)
    relaxed = _merged(clusters, costs, limits, optimistic=True)
    low, _, used = optimal_order(batch, relaxed)
    orders = [by_speed, by_speed[::-1], *_real_orders(used, clusters)]
    cautious = _merged(clusters, costs, limits, optimistic=False)
    if sum(kind.limit * len(kind.ranks) for kind in cautious) >= len(batch):
        orders += _real_orders(optimal_order(batch, cautious)[2], clusters)
    low = max(low, lower_bound(batch, len(costs), FastestOf(_not_dominated(costs))))
    best, bounds, order = min(
        (*_in_this_order(batch, costs, limits, order), order)
        for order in map(list, dict.fromkeys(map(tuple, orders)))
    )
    best, bounds, order = _exchanged(batch, costs, limits, best, bounds, order, low)
    return RankOrder(best, bounds, order, float(low))


def _in_this_order(
    batch: SortedBatch, costs: Sequence[Cost], limits: Sequence[int], order: list[int]
) -> tuple[float, list[int]]:
    return fixed_order(batch, [costs[rank] for rank in order], [limits[rank] for rank in order])


def _clusters(by_speed: list[int], speed: list[float]) -> list[list[int]]:
    """Merges the ranks into few kinds, with the smallest ratio of slowest to fastest in a kind."""
    # First the number of kinds that a search can afford, then the smallest ratio that needs no more
    # kinds: the number of kinds falls as the ratio grows, so the ratio is found by bisection.
    kinds = next(
        kinds
        for kinds in range(MERGED_KINDS, 0, -1)
        if trial_steps(_equal_kinds(len(speed), kinds)) <= AFFORDABLE_STEPS or kinds == 1
    )
    log = np.log(np.maximum([speed[rank] for rank in by_speed], np.finfo(float).tiny))
    narrow, wide = 0.0, float(log[-1] - log[0])
    for _ in range(50):
        middle = (narrow + wide) / 2
        if len(_cuts(log, middle)) <= kinds:
            wide = middle
        else:
            narrow = middle
    starts = _cuts(log, wide)
    return [by_speed[a:b] for a, b in zip(starts, [*starts[1:], len(by_speed)], strict=True)]


def _equal_kinds(world_size: int, kinds: int) -> list[RankKind]:
    """Makes kinds of equal count, whose trial steps can be counted; their costs are not used."""
    return [RankKind(max, 1, (0,) * -(-world_size // kinds))] * kinds


def _cuts(log: np.ndarray, ratio: float) -> list[int]:
    """Returns the index at which each kind begins if it spans at most ``ratio`` (a logarithm)."""
    starts = [0]
    while (end := int(np.searchsorted(log, log[starts[-1]] + ratio, side="right"))) < len(log):
        starts.append(end)
    return starts


def _merged(
    clusters: list[list[int]], costs: Sequence[Cost], limits: Sequence[int], optimistic: bool
) -> list[RankKind]:
    merge, limit = (FastestOf, max) if optimistic else (SlowestOf, min)
    return [
        RankKind(
            merge(_not_dominated([costs[rank] for rank in ranks], slower=not optimistic)),
            limit(limits[rank] for rank in ranks),
            tuple(ranks),
        )
        for ranks in clusters
    ]


def _not_dominated(costs: Sequence[Cost], slower: bool = False) -> tuple[Cost, ...]:
    """Returns the costs without those that cannot be the fastest (or the slowest) anywhere."""
    # A calibrated cost cannot be the fastest if another has no larger coefficient. By ascending sum
    # of coefficients a cost comes after all that dominate it, so one pass is enough. For the
    # slowest, all signs are reversed.
    distinct = list(dict.fromkeys(costs))
    if not all(isinstance(cost, CalibratedCost) for cost in distinct):
        return tuple(distinct)
    table = np.array([(cost.c0_s, cost.c1_s, cost.c2_s) for cost in distinct])
    table = -table if slower else table
    kept: list[int] = []
    for index in np.argsort(table.sum(axis=1), kind="stable").tolist():
        if not any((table[other] <= table[index]).all() for other in kept):
            kept.append(index)
    return tuple(distinct[index] for index in kept)


def _real_orders(used: list[int], clusters: list[list[int]]) -> list[list[int]]:
    """Replaces kinds by real ranks, in two ways: the fastest or the slowest of a kind first."""
    orders = []
    for step in (1, -1):
        waiting = [iter(ranks[::step]) for ranks in clusters]
        orders.append([next(waiting[kind]) for kind in used])
    return orders


def _exchanged(
    batch: SortedBatch,
    costs: Sequence[Cost],
    limits: Sequence[int],
    best: float,
    bounds: list[int],
    order: list[int],
    low: float,
) -> tuple[float, list[int], list[int]]:
    """Exchanges the slowest rank's place with another's as long as that helps.

    Returns the new ``best``, ``bounds`` and ``order``.
    """
    # Local search: the slowest rank changes places with the nearest rank with which the ranks in
    # the new order fit below the present bottleneck. It ends at the lower bound ``low``, without
    # an improvement, or when the budget is used up.
    budget = EXCHANGE_BUDGET

    def fits_below(trial: list[int]) -> tuple[bool, float, list[int]]:
        return in_order(
            batch.lengths,
            [costs[rank] for rank in trial],
            [limits[rank] for rank in trial],
            float(np.nextafter(best, 0)),
        )

    improved = True
    while improved and best > low:
        improved = False
        slowest = next(
            place
            for place, rank in enumerate(order)
            if costs[rank](bounds[place + 1] - bounds[place], int(batch.lengths[bounds[place]]))
            >= best
        )
        for place in sorted(range(len(order)), key=lambda other: abs(other - slowest)):
            budget -= len(order)
            if budget < 0:
                return best, bounds, order
            trial = list(order)
            trial[place], trial[slowest] = trial[slowest], trial[place]
            fits, found, cut = fits_below(trial)
            if fits:
                best, bounds, order, improved = found, cut, trial, True
                break
    return best, bounds, order
