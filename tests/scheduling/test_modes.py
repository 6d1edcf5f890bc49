"""Modes: the same global batches where that is promised, and other libraries' as they make them.

Oracles: transformers' own function for its order, fairseq's loop written out plainly, and
get_seqlen_balanced_partitions' properties.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from common.errors import UserError
from common.exercises.loss_scale import loss_scale
from common.scheduling.cost import CalibratedCost, TokensCost, TokensSquaredCost
from common.scheduling.length_samplers import (
    budget_for,
    length_grouped_order,
    token_budget_batches,
    token_budget_bounds,
)
from common.scheduling.modes import (
    MODES,
    SAME_BATCH,
    Planner,
    StepPlan,
    epoch_order,
)
from common.scheduling.partition import bounded_plan


def lengths_of(count: int, seed: int = 0) -> NDArray:
    rng = np.random.default_rng(seed)
    return np.clip(rng.lognormal(3, 0.7, count), 2, 256).astype(np.int64)


def samples(plan: StepPlan) -> list[int]:
    return sorted(itertools.chain.from_iterable(plan.groups))


def global_batches(count: int, global_batch: int, seed: int) -> Iterator[NDArray]:
    """Yields whole global batches (indices [B]) of a data set of ``count`` samples, endlessly.

    Each epoch is a permutation of its own. The samples at its end that make no whole batch are
    dropped, others each time. So no sample comes twice within an epoch or within a step.
    """
    epoch = 0
    while True:
        order = epoch_order(count, seed, epoch)
        for start in range(0, count - global_batch + 1, global_batch):
            yield order[start : start + global_batch]
        epoch += 1


def test_each_epoch_is_a_permutation_of_its_own() -> None:
    first, second = (epoch_order(100, 3, epoch).tolist() for epoch in range(2))
    assert sorted(first) == sorted(second) == list(range(100))
    assert first != second


@pytest.mark.parametrize("mode", SAME_BATCH)
def test_modes_that_keep_the_global_batch_have_the_same_samples_in_each_step(mode: str) -> None:
    lengths = lengths_of(300)
    planner = Planner(mode, lengths, 4, 32, seed=7)
    batches = itertools.islice(global_batches(300, 32, seed=7), 20)
    for step, batch in enumerate(batches):
        assert samples(planner(step)) == sorted(batch.tolist())


@pytest.mark.parametrize("mode", MODES)
def test_a_plan_follows_from_seed_and_step_alone(mode: str) -> None:
    lengths = lengths_of(500)
    one, other = (Planner(mode, lengths, 4, 32, seed=1) for _ in range(2))
    in_order = [one(step).groups for step in range(40)]
    steps = np.random.default_rng(0).permutation(40).tolist()
    assert [other(step).groups for step in steps] == [in_order[step] for step in steps]
    assert Planner(mode, lengths, 4, 32, seed=2)(0).groups != in_order[0]


@pytest.mark.parametrize("mode", MODES)
def test_no_sample_comes_twice_in_an_epoch_and_every_rank_has_some(mode: str) -> None:
    planner = Planner(mode, lengths_of(500), 4, 32)
    steps = planner.steps_per_epoch()
    seen = [index for step in range(steps) for index in samples(planner(step))]
    assert len(seen) == len(set(seen)) > 400
    assert all(planner(step).local_batch.min() >= 1 for step in range(2 * steps))


def test_static_deals_equal_counts_in_the_order_drawn() -> None:
    plan = Planner("static", lengths_of(100), 4, 14, seed=5)(0)
    drawn = next(global_batches(100, 14, seed=5))
    assert plan.local_batch.tolist() == [4, 4, 3, 3]
    assert [index for group in plan.groups for index in group] == drawn.tolist()


def test_dynamic_is_the_best_partition_under_the_given_cost_and_limits() -> None:
    lengths = lengths_of(400)
    planner = Planner("dynamic", lengths, 4, 32)
    own = lengths[next(global_batches(400, 32, seed=42))]
    slow = [CalibratedCost(1e-3, 1e-4, 1e-7).scaled(factor) for factor in (1.0, 1.0, 1.0, 2.0)]
    for cost in (TokensCost(), TokensSquaredCost(), slow):
        for limit in (None, 12, [9, 9, 9, 5]):
            plan = planner(0, cost, limit)
            assert plan.slowest_cost(cost) == bounded_plan(own, 4, cost, limit).bottleneck
            assert (plan.local_batch <= (32 if limit is None else np.array(limit))).all()
    assert planner(3).slowest_cost(TokensCost()) <= planner(3, slow).slowest_cost(TokensCost())


def test_karmarkar_karp_is_refused_where_any_rank_may_get_the_larger_share() -> None:
    planner = Planner("karmarkar_karp", lengths_of(400), 3, 32)
    for step in range(4):
        with pytest.raises(UserError, match="gives rank 2 11 samples, and its limit is 10"):
            planner(step, None, (12, 11, 10))
        planner(step, None, 11)


def test_karmarkar_karp_has_equal_counts_and_nearly_equal_tokens() -> None:
    plan = Planner("karmarkar_karp", lengths_of(400), 4, 64)(0)
    static = Planner("static", lengths_of(400), 4, 64)(0)
    assert plan.local_batch.tolist() == [16] * 4
    assert np.ptp(plan.tokens) < 0.3 * np.ptp(static.tokens)
    # Equal counts do not lower the padded bottleneck, whoever gets the longest sample.
    assert plan.padded_tokens.max() == static.padded_tokens.max()


@pytest.mark.parametrize(("count", "batch_size"), [(1000, 4), (1003, 7), (50, 16), (7, 8), (64, 2)])
def test_the_length_grouped_order_is_that_of_transformers(count: int, batch_size: int) -> None:
    torch = pytest.importorskip("torch")
    trainer = pytest.importorskip("transformers.trainer_pt_utils")
    if not hasattr(trainer, "get_length_grouped_indices"):
        pytest.skip("this transformers has no get_length_grouped_indices")
    lengths = lengths_of(count, seed=batch_size)
    permutation = torch.randperm(count, generator=torch.Generator().manual_seed(3)).numpy()
    theirs = trainer.get_length_grouped_indices(
        lengths.tolist(), batch_size, generator=torch.Generator().manual_seed(3)
    )
    assert length_grouped_order(lengths, batch_size, permutation).tolist() == theirs


def test_length_grouped_deals_whole_batches_of_the_order_to_the_ranks() -> None:
    lengths = lengths_of(1000)
    plan = Planner("length_grouped", lengths, 4, 32, seed=9)(2)
    order = length_grouped_order(lengths, 8, epoch_order(1000, 9, 0))
    assert np.array(plan.groups).tolist() == order[64:96].reshape(4, 8).tolist()


def batch_by_size(lengths: list[int], max_tokens: int, max_samples: int) -> list[int]:
    """Runs fairseq's loop over sorted samples: the size of each batch."""
    sizes, batch, longest = [], 0, 0
    for length in lengths:
        longest = max(longest, length)
        full = (batch + 1) * longest > max_tokens or (max_samples and batch == max_samples)
        if batch and full:
            sizes.append(batch)
            batch, longest = 0, length
        batch += 1
    return [*sizes, batch]


@pytest.mark.parametrize("max_samples", [0, 1, 5, 64])
@pytest.mark.parametrize("max_tokens", [256, 300, 1000, 10**6])
def test_the_token_budget_cuts_where_fairseq_does(max_tokens: int, max_samples: int) -> None:
    ascending = np.sort(np.append(lengths_of(300), 256))
    bounds = token_budget_bounds(ascending, max_tokens, max_samples)
    assert np.diff(bounds).tolist() == batch_by_size(ascending.tolist(), max_tokens, max_samples)


def test_a_budgets_batches_hold_every_sample_once_and_change_from_epoch_to_epoch() -> None:
    lengths = lengths_of(300)
    bounds = token_budget_bounds(np.sort(lengths), 400)
    one, other = (
        token_budget_batches(lengths, bounds, np.random.default_rng(seed)) for seed in (1, 2)
    )
    assert sorted(np.concatenate(one).tolist()) == list(range(300))
    assert max(len(batch) * lengths[batch].max() for batch in one) <= 400
    assert {tuple(sorted(batch)) for batch in one} != {tuple(sorted(batch)) for batch in other}


def test_the_default_budget_is_the_smallest_that_fills_the_batches() -> None:
    ascending = np.sort(lengths_of(2000))
    for share in (1, 8, 12.5, 100):
        budget = budget_for(ascending, share)
        mean = 2000 / (len(token_budget_bounds(ascending, budget)) - 1)
        assert mean >= share
        if budget > ascending[-1]:
            assert 2000 / (len(token_budget_bounds(ascending, budget - 1)) - 1) < share
    planner = Planner("token_budget", ascending, 4, 32)
    assert planner.max_tokens == budget_for(ascending, 8)
    steps = planner.steps_per_epoch()
    mean = np.mean([planner(step).global_batch for step in range(steps)])
    assert mean == pytest.approx(32, rel=0.15)


def test_a_step_plan_counts_its_tokens() -> None:
    plan = StepPlan(((4, 0), (2,), (1, 3)), np.array([5, 2, 9, 3, 7]))
    assert plan.local_batch.tolist() == [2, 1, 2]
    assert plan.longest.tolist() == [7, 9, 3]
    assert plan.padded_tokens.tolist() == [14, 9, 6]
    assert plan.tokens.tolist() == [12, 9, 5]
    assert (plan.global_batch, plan.total_tokens) == (5, 26)
    assert plan.slowest_cost(TokensCost()) == 14
    assert plan.slowest_cost([TokensCost(), CalibratedCost(0.0, 2.0, 0.0), TokensCost()]) == 18
    # The same samples in texts of other lengths.
    assert replace(plan, lengths=np.full(5, 4)).padded_tokens.tolist() == [8, 4, 8]


@pytest.mark.parametrize("mode", ["static", "karmarkar_karp", "length_grouped"])
def test_equal_counts_that_a_rank_cannot_hold_are_refused(mode: str) -> None:
    planner = Planner(mode, lengths_of(100), 4, 32)
    assert planner(0, None, 8).local_batch.tolist() == [8] * 4
    with pytest.raises(UserError, match=f"{mode} gives rank 2 8 samples, and its limit is 7"):
        planner(0, None, [8, 8, 7, 9])


def test_a_token_budget_keeps_to_the_smallest_limit() -> None:
    planner = Planner("token_budget", lengths_of(400), 4, 32)
    free = max(planner(step).local_batch.max() for step in range(10))
    limited = [planner(step, None, [5, 6, 7, 8]).local_batch.max() for step in range(10)]
    assert max(limited) == 5 < free


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("statics", [3] * 9, 2, 4), "unknown mode 'statics'; did you mean 'static'"),
        (("static", [3] * 9, 5, 4), "a global batch of 4 samples for 5 ranks"),
        (("static", [3] * 9, 2, 10), "a data set of 9 samples makes no global batch of 10"),
        (("static", [3, 0, 3], 2, 2), "sample 1 has 0 tokens"),
        (("token_budget", [3] * 8 + [40], 2, 4, 0, 39), "max_tokens 39; the longest sample has 40"),
    ],
)
def test_what_cannot_be_planned_is_refused(arguments: tuple, message: str) -> None:
    with pytest.raises(UserError, match=message):
        Planner(*arguments)


def test_a_budget_too_large_for_the_ranks_and_an_unknown_mean_are_refused() -> None:
    with pytest.raises(UserError, match="1 for the whole data set, and there are 2 ranks"):
        Planner("token_budget", [3] * 9, 2, 4, 0, 1000)(0)
    with pytest.raises(UserError, match="unknown mean of the loss 'words'"):
        loss_scale("words", 2, 1, 2)
