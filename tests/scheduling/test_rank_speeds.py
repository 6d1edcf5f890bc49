"""Ranks that are alike get one cost; one that becomes slow is found from its steps."""

from __future__ import annotations

import numpy as np
import pytest

from common.scheduling.cost import CalibratedCost
from common.scheduling.rank_speeds import WINDOW, RankCosts, alike

COST = CalibratedCost(2e-3, 1e-4, 1e-8)
SIZES = [(1, 8), (4, 8), (16, 8), (1, 64), (4, 64), (16, 64)]


def test_values_within_the_tolerance_become_one():
    merged = alike([1.0, 2.0, 1.05, 1.98], tolerance=0.1)
    assert merged[0] == merged[2] == pytest.approx(np.sqrt(1.05))
    assert merged[1] == merged[3] == pytest.approx(np.sqrt(2.0 * 1.98))


def test_a_chain_of_small_differences_is_not_one_group():
    assert len(set(alike([1.0, 1.08, 1.16, 1.24], tolerance=0.1))) == 2


def test_ranks_that_calibrate_alike_have_equal_costs():
    costs = RankCosts([COST, COST.scaled(1.03), COST.scaled(0.98)], SIZES).costs
    assert costs[0] == costs[1] == costs[2]
    assert float(costs[0](8, 32)) == pytest.approx(float(COST(8, 32)), rel=0.05)


def test_a_rank_twice_as_slow_from_the_start_is_planned_for():
    ranks = RankCosts([COST, COST.scaled(2)], SIZES)
    fast, slow = (float(cost(8, 32)) for cost in ranks.costs)
    assert slow / fast == pytest.approx(2, rel=1e-6)
    assert fast == pytest.approx(float(COST(8, 32)), rel=1e-6)


def test_a_rank_that_becomes_slow_is_found_within_a_window():
    rng = np.random.default_rng(0)
    seen = [RankCosts([COST, COST], SIZES) for _ in range(2)]  # one on each rank
    for step in range(2 * WINDOW):
        for rank, costs in enumerate(seen):
            slow = 2.0 if rank == 1 and step >= WINDOW else 1.0
            noise = np.exp(rng.normal(0, 0.05))
            costs.note(8, 32, float(COST(8, 32)) * slow * noise)
    ratios = [costs.own_ratio for costs in seen]
    for costs in seen:
        costs.update(ratios)
    # Every rank draws the same conclusion, or they would make different plans.
    assert seen[0].factors == seen[1].factors
    assert seen[0].factors[1] / seen[0].factors[0] == pytest.approx(2, rel=0.1)


def test_without_a_step_nothing_is_corrected():
    assert RankCosts([COST, COST], SIZES).own_ratio == 1.0
