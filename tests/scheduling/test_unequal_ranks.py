"""The best partition for ranks of unequal speed and limits, and the bound where there are many.

Oracle: every assignment of samples to ranks; for many ranks, ranks of one kind told apart by name
only, whose optimum the plan for ranks alike gives.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

import numpy as np
import pytest
from partition_support import LENGTHS, bottleneck, optimum, problems

from common.exercises.min_max_partition import SortedBatch
from common.scheduling.cost import CalibratedCost, TokensCost
from common.scheduling.many_speeds import heuristic_order
from common.scheduling.partition import bounded_plan, min_max_contiguous
from common.scheduling.unequal_ranks import kinds_of, optimal_order

SLOW = CalibratedCost(3e-3, 1.2e-4, 1e-8)


@dataclass(frozen=True)
class Named(CalibratedCost):
    """A cost that differs from others in name only."""

    name: str = ""


def test_no_assignment_is_better_than_the_plan_in_500_cases() -> None:
    for problem in problems(500, seed=2, unequal=True):
        costs, limits = list(problem.costs), list(problem.limits)
        plan = bounded_plan(problem.lengths, problem.world_size, costs, limits)
        assert plan.exact
        assert bottleneck(problem, plan.groups) == plan.bottleneck == optimum(problem), problem


def test_the_heuristic_is_between_its_bound_and_a_feasible_plan() -> None:
    gaps = []
    for problem in problems(150, seed=3, unequal=True):
        batch = SortedBatch.of(problem.lengths.astype(np.int64))
        found, bounds, ranks, low = heuristic_order(batch, problem.costs, problem.limits)
        groups = [[] for _ in problem.costs]
        for rank, group in zip(ranks, batch.groups(bounds), strict=True):
            groups[rank] = group
        best = optimum(problem)
        assert low <= best <= found == bottleneck(problem, groups), problem
        gaps.append(found / best - 1)
    # Few kinds are merged into as many, so nearly all of these are optimal.
    assert np.mean(np.array(gaps) < 1e-12) > 0.95


def test_many_kinds_say_how_far_they_may_be_from_the_optimum(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rng = np.random.default_rng(4)
    lengths = LENGTHS["texts"](rng, 240)
    costs = [SLOW.scaled(factor) for factor in rng.uniform(0.9, 1.2, 24).tolist()]
    plan = bounded_plan(lengths, 24, costs)
    assert not plan.exact
    assert 0 < plan.gap < 0.08
    assert plan.bottleneck == pytest.approx(plan.lower_bound * (1 + plan.gap))
    with caplog.at_level(logging.INFO):
        assert min_max_contiguous(lengths, 24, costs) == plan.groups
    assert f"at most {100 * plan.gap:.1f} % above the optimum" in caplog.text
    # Neither all ranks as slow as the slowest nor equal counts are better.
    slowest = max(costs, key=lambda cost: cost.c0_s)
    assert plan.bottleneck <= bounded_plan(lengths, 24, slowest).bottleneck


def test_the_heuristic_finds_a_plan_where_the_smallest_limits_hold_none() -> None:
    rng = np.random.default_rng(5)
    costs = [SLOW.scaled(factor) for factor in rng.uniform(1, 1.1, 20).tolist()]
    limits = [1] * 10 + [9] * 10  # speeds are mixed, so each merged kind has a limit of 1
    plan = bounded_plan(LENGTHS["texts"](rng, 100), 20, costs, limits)
    assert [len(group) for group in plan.groups] == limits


@pytest.mark.parametrize("kinds", [2, 3])
def test_equal_ranks_in_several_kinds_have_the_optimum_of_equal_ranks(kinds: int) -> None:
    lengths = LENGTHS["texts"](np.random.default_rng(6), 200)
    costs = [Named(3e-3, 1.2e-4, 1e-8, name=str(rank % kinds)) for rank in range(32)]
    plan = bounded_plan(lengths, 32, costs)
    assert len(kinds_of(costs, [200] * 32)) == kinds
    assert plan.exact
    assert plan.bottleneck == bounded_plan(lengths, 32, SLOW).bottleneck


def test_a_slow_rank_takes_half_of_what_the_others_take() -> None:
    costs = [TokensCost()] * 3 + [CalibratedCost(0.0, 2.0, 0.0)]
    plan = min_max_contiguous(np.full(70, 9), 4, costs)
    assert [len(group) for group in plan] == [20, 20, 20, 10]


def test_two_kinds_among_a_thousand_ranks_are_exact() -> None:
    lengths = LENGTHS["texts"](np.random.default_rng(7), 2048)
    costs = [SLOW] * 500 + [SLOW.scaled(2.0)] * 12
    plan = bounded_plan(lengths, 512, costs)
    assert plan.exact
    assert plan.bottleneck >= bounded_plan(lengths, 512, SLOW).bottleneck
    assert plan.bottleneck <= bounded_plan(lengths, 512, SLOW.scaled(2.0)).bottleneck
    each = zip(costs, plan.groups, strict=True)
    assert plan.bottleneck == max(cost(len(group), lengths[group].max()) for cost, group in each)


def test_the_order_of_the_kinds_is_the_optimal_one() -> None:
    # The slow rank must not get the long text: 2 × 10 exceeds what any other plan costs.
    batch = SortedBatch.of(np.array([10, 2, 2, 2]))
    kinds = kinds_of([CalibratedCost(0.0, 2.0, 0.0), CalibratedCost(0.0, 1.0, 0.0)], [4, 4])
    best, bounds, used = optimal_order(batch, kinds)
    assert (best, bounds, used) == (12.0, [0, 1, 4], [1, 0])
    same = [replace(kind, limit=2) for kind in kinds]
    assert optimal_order(batch, same)[0] == 20.0
