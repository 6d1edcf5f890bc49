"""The best partition for ranks that are alike, and what is refused.

Oracles: every assignment of samples to ranks (small batches), and a plain dynamic programme over
contiguous groups (larger ones).
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from partition_support import LENGTHS, Stairs, bottleneck, optimum, problems

from common.errors import UserError
from common.exercises.min_max_partition import SortedBatch, lower_bound
from common.scheduling.cost import CalibratedCost, TokensCost, TokensSquaredCost
from common.scheduling.partition import bounded_plan, min_max_contiguous

COSTS = (TokensCost(), TokensSquaredCost(), CalibratedCost(3e-3, 1.2e-4, 1e-8), Stairs())


def test_no_assignment_is_better_than_the_plan_in_400_cases() -> None:
    for problem in problems(400, seed=1, unequal=False):
        plan = bounded_plan(
            problem.lengths, problem.world_size, problem.costs[0], list(problem.limits)
        )
        best = optimum(problem)
        assert bottleneck(problem, plan.groups) == plan.bottleneck == best, problem
        assert plan.exact
        assert plan.gap == 0
        assert plan.lower_bound == best


def contiguous_optimum(lengths: np.ndarray, world_size: int, cost, limit: int) -> float:
    """Finds the optimum in O(G·B²): best[p] is the smallest bottleneck of the first p samples."""
    descending = np.sort(lengths)[::-1]
    count = len(descending)
    best = np.full(count + 1, np.inf)
    best[0] = 0
    for _ in range(world_size):
        following = np.full(count + 1, np.inf)
        for start in np.flatnonzero(np.isfinite(best)):
            sizes = np.arange(1, min(limit, count - start) + 1)
            if len(sizes):
                costs = np.maximum(best[start], cost(sizes, descending[start]))
                ends = following[start + 1 : start + 1 + len(sizes)]
                np.minimum(ends, costs, out=ends)
        best = following
    return float(best[-1])


@pytest.mark.parametrize("cost", COSTS, ids=lambda cost: type(cost).__name__)
@pytest.mark.parametrize("kind", LENGTHS)
def test_larger_batches_reach_the_optimum_of_contiguous_groups(kind: str, cost) -> None:
    rng = np.random.default_rng(5)
    for count, world_size, limit in ((64, 4, 64), (48, 7, 8), (90, 16, 30), (33, 32, 2)):
        lengths = rng.permutation(LENGTHS[kind](rng, count))
        plan = bounded_plan(lengths, world_size, cost, limit)
        assert plan.bottleneck == contiguous_optimum(lengths, world_size, cost, limit)
        assert sorted(itertools.chain.from_iterable(plan.groups)) == list(range(count))
        assert max(map(len, plan.groups)) <= limit


def test_nothing_is_missed_where_possible_bottlenecks_lie_close_together() -> None:
    rng = np.random.default_rng(8)
    for _ in range(150):
        lengths = LENGTHS["any"](rng, 60)
        ranks = int(rng.integers(3, 12))
        best = contiguous_optimum(lengths, ranks, TokensCost(), 60)
        assert bounded_plan(lengths, ranks, TokensCost()).bottleneck == best


def test_thousand_ranks_are_not_below_the_lower_bound_and_hold_every_sample() -> None:
    lengths = LENGTHS["texts"](np.random.default_rng(2), 4096)
    plan = bounded_plan(lengths, 1024, COSTS[2])
    assert plan.bottleneck >= lower_bound(SortedBatch.of(lengths), 1024, COSTS[2])
    assert sorted(itertools.chain.from_iterable(plan.groups)) == list(range(4096))
    assert len(plan.groups) == 1024
    assert min(map(len, plan.groups)) == 1


def test_every_rank_gets_one_where_few_would_do() -> None:
    # One text is so long that the other five fit beside each other on one more rank.
    assert min_max_contiguous([1, 1, 1, 1, 1, 500], 4, TokensCost()) == [[5], [0, 1, 2], [3], [4]]


def test_a_limit_moves_samples_to_ranks_that_are_already_slow() -> None:
    plan = bounded_plan([8, 1, 1, 1, 1, 1], 2, TokensCost(), 3)
    assert [len(group) for group in plan.groups] == [3, 3]
    assert plan.bottleneck == 24
    assert bounded_plan([8, 1, 1, 1, 1, 1], 2, TokensCost()).bottleneck == 8


def test_the_same_input_gives_the_same_plan_whatever_its_type() -> None:
    lengths = LENGTHS["ties"](np.random.default_rng(3), 40)
    plan = min_max_contiguous(lengths, 5, TokensCost())
    for same in (lengths.tolist(), lengths.astype(np.uint8), tuple(lengths)):
        assert min_max_contiguous(same, 5, TokensCost()) == plan
    ties = [index for group in plan for index in group]
    assert ties == np.argsort(-lengths, kind="stable").tolist()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([3] * 5, 8, TokensCost()), "5 samples for 8 ranks; each rank needs at least one"),
        (([], 1, TokensCost()), "0 samples for 1 ranks"),
        (([3, 0, 2], 2, TokensCost()), "sample 1 has 0 tokens; an empty text"),
        (([3, 1.5, 2], 2, TokensCost()), "whole numbers"),
        (([[3, 1]], 1, TokensCost()), "whole numbers"),
        (([3, 2], 0, TokensCost()), "0 ranks; at least 1"),
        (([3] * 9, 2, TokensCost(), 4), "a global batch of 9 samples, and the ranks' limits add"),
        (([3] * 9, 2, TokensCost(), [4, 4]), "add up to 8"),
        (([3] * 9, 2, TokensCost(), [9, 0]), "rank 1 has a limit of 0 samples; at least 1"),
        (([3] * 9, 2, TokensCost(), [9]), "1 limits for 2 ranks; give one, or one per rank"),
        (([3] * 9, 2, [TokensCost()] * 3), "3 costs for 2 ranks; give one, or one per rank"),
    ],
)
def test_what_has_no_plan_is_refused_in_one_line(arguments: tuple, message: str) -> None:
    with pytest.raises(UserError) as refusal:
        min_max_contiguous(*arguments)
    assert message in str(refusal.value)
    assert "\n" not in str(refusal.value)
