"""FSDP's schedule: as many collectives as PyTorch makes, and times known in closed form."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from common.perfmodel.fsdp.communication import step_collectives
from common.perfmodel.fsdp.schedule import (
    Exchange,
    ShardedModel,
    micro_batches,
    schedule,
    simulate_step,
)
from common.perfmodel.one_device.architecture import GPT2Config

KINDS = [("all_gather", "block"), ("all_gather", "root")]
KINDS += [("reduce_scatter", "block"), ("reduce_scatter", "root")]


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
@pytest.mark.parametrize(("accumulation", "prefetch"), [(1, 1), (2, 1), (5, 1), (2, 0), (2, 2)])
def test_a_step_has_the_collectives_that_are_counted_elsewhere(strategy, accumulation, prefetch):
    # step_collectives is held against what two ranks really send (test_communication)
    config = GPT2Config.named("gpt2")
    counted = Counter()
    for part in step_collectives(config, strategy, 8, accumulation=accumulation):
        counted[part.operation, part.unit] += part.count
    found = Counter()
    for times, exchange in micro_batches(strategy, accumulation):
        for issue in schedule(["block"] * config.n_layer, exchange, prefetch):
            found[issue.operation, issue.unit] += times
    assert found == counted


@pytest.mark.parametrize("prefetch", [0, 1, 2, 9])
@pytest.mark.parametrize("exchange", [Exchange(True, True, True, True), Exchange(reduce=True)])
def test_collectives_are_issued_in_order_and_before_they_are_needed(exchange, prefetch):
    issues = schedule(["block"] * 5, exchange, prefetch)
    assert [issue.ready for issue in issues] == sorted(issue.ready for issue in issues)
    assert all(issue.limit is None or issue.ready <= issue.limit for issue in issues)
    assert all(issue.ready <= 2 * 5 + 2 for issue in issues)


def model(
    block_s: float, head_s: float, gather_s: float, scatter_s: float, root_s: float, layers: int = 4
) -> ShardedModel:
    times = (gather_s, root_s, scatter_s, root_s)
    collectives = {kind: np.array([time]) for kind, time in zip(KINDS, times, strict=True)}
    copies = {kind: np.zeros(1) for kind in KINDS}
    return sharded_model(layers, np.array([block_s]), np.array([head_s]), collectives, copies)


def sharded_model(
    layers: int, block_s: NDArray, head_s: NDArray, collectives: dict, copies: dict
) -> ShardedModel:
    """Makes a model of equal blocks whose backward passes take twice the forward passes."""
    forward = {"block": block_s, "root": head_s}
    backward = {unit: 2 * seconds for unit, seconds in forward.items()}
    return ShardedModel(("block",) * layers, forward, backward, collectives, copies)


def step(sharded: ShardedModel, strategy: str, count: int = 1, slow: float = 1.0) -> tuple:
    found = simulate_step(sharded, strategy, np.array([count]), np.array([slow]))
    return tuple(float(part[0]) for part in found)


def test_fast_collectives_leave_the_first_gathers_and_the_last_reductions():
    # Everything between is hidden: blocks of 10 s beside collectives of 1 s.
    total, slowed, exposed = step(model(10, 4, 1, 1, 3), "FULL_SHARD")
    computation = 3 * (4 * 10 + 4)
    assert exposed == pytest.approx((3 + 1) + (1 + 3))  # root and first block; last block and root
    assert (total, slowed) == (pytest.approx(computation + exposed), 0)


def test_slow_collectives_follow_one_another_without_a_gap():
    # Computation is almost nothing: the step is what is sent, all gathers and reductions.
    full, _, _ = step(model(1e-6, 1e-6, 5, 7, 3), "FULL_SHARD")
    assert full == pytest.approx(2 * 4 * 5 + 4 * 7 + 2 * 3, rel=1e-4)
    grad_op, _, _ = step(model(1e-6, 1e-6, 5, 7, 3), "SHARD_GRAD_OP")
    assert grad_op == pytest.approx(4 * 5 + 4 * 7 + 2 * 3, rel=1e-4)


def test_computation_waits_for_what_it_needs():
    # Two blocks, gathers of 6 s beside blocks of 1 s (head 1): root 0-1, gathers 1-7 and 7-13,
    # blocks 7-8 and 13-14, head forward 14-15, backward 15-17; the last block is gathered from the
    # head's backward pass on, 15-21, the first one 21-27; backward 21-23 and 27-29; the last
    # block's gradients are reduced 27-28, as its gather was issued before; then 29-30 and 30-31.
    total, _, exposed = step(model(1, 1, 6, 1, 1, layers=2), "FULL_SHARD")
    assert total == pytest.approx(31)
    assert exposed == pytest.approx(31 - 9)


def test_what_is_not_gathered_ahead_is_waited_for_behind_what_is_reduced():
    # Each of four blocks waits for its second gather, three of them also for a reduction before.
    none_ahead = replace(model(10, 4, 1, 1, 3), prefetch=0)
    total, _, exposed = step(none_ahead, "FULL_SHARD")
    assert exposed == pytest.approx((3 + 1) + (1 + 3 * (1 + 1)) + (1 + 3))
    assert total == pytest.approx(132 + exposed)


@pytest.mark.parametrize(("prefetch", "expected_s"), [(0, 19), (1, 19), (2, 15)])
def test_two_units_ahead_hide_the_gathers_of_short_blocks_beside_a_long_one(prefetch, expected_s):
    # Root 0-1, long 1-2, which computes 2-12; the first short one is gathered 2-8, the second from
    # 12 on, when the first computes (12-13), or two ahead 8-14. Heads and reductions take nothing.
    forward = {"long": np.array([10.0]), "short": np.array([1.0]), "root": np.array([0.0])}
    gathers = {"long": 1.0, "short": 6.0, "root": 1.0}
    calls = {("all_gather", unit): np.array([time]) for unit, time in gathers.items()}
    calls |= {("reduce_scatter", unit): np.zeros(1) for unit in gathers}
    sharded = ShardedModel(
        blocks=("long", "short", "short"),
        forward_s=forward,
        backward_s=dict.fromkeys(forward, np.zeros(1)),
        collective_s=calls,
        copy_s=dict.fromkeys(calls, np.zeros(1)),
        prefetch=prefetch,
    )
    assert step(sharded, "SHARD_GRAD_OP")[0] == pytest.approx(expected_s)


def test_micro_batches_gather_again_or_not_and_reduce_once():
    one, _, _ = step(model(10, 4, 1, 1, 3), "FULL_SHARD")
    three, _, exposed = step(model(10, 4, 1, 1, 3), "FULL_SHARD", count=3)
    # a later micro-batch waits for its first block's gather only
    assert exposed == pytest.approx((3 + 1) + 1 + (1 + 1 + 3))
    assert three == pytest.approx(one + 2 * (132 + 1))
    kept, _, exposed = step(model(10, 4, 1, 1, 3), "SHARD_GRAD_OP", count=3)
    assert exposed == pytest.approx((3 + 1) + (1 + 3))
    assert kept == pytest.approx(3 * 132 + exposed)


def test_computation_beside_communication_is_slowed_and_accounted_for():
    plain = step(model(10, 4, 1, 1, 3), "FULL_SHARD")
    total, slowed, exposed = step(model(10, 4, 1, 1, 3), "FULL_SHARD", slow=2.0)
    # 3 + 4 gathers and 3 reductions are hidden, 1 s each, of which half a second's work is lost
    assert slowed == pytest.approx((3 + 4 + 3) * 0.5)
    assert exposed == pytest.approx(plain[2])
    assert total == pytest.approx(plain[0] + slowed)


def test_several_cases_are_simulated_as_each_by_itself():
    together = model(10, 4, 1, 1, 3)
    sizes = {kind: np.array([1.0, 20.0, 20.0]) for kind in KINDS}
    three = sharded_model(
        *(4, np.array([10.0, 10.0, 10.0]), np.array([4.0, 4.0, 4.0]), sizes),
        {kind: np.zeros(3) for kind in KINDS},
    )
    counts, slow = np.array([1, 3, 2]), np.array([1.0, 1.5, 1.0])
    found = simulate_step(three, "FULL_SHARD", counts, slow)
    for case in range(3):
        alone = sharded_model(
            *(4, together.forward_s["block"], together.forward_s["root"]),
            {kind: time[case : case + 1] for kind, time in sizes.items()},
            {kind: np.zeros(1) for kind in KINDS},
        )
        expected = simulate_step(alone, "FULL_SHARD", counts[[case]], slow[[case]])
        assert [part[case] for part in found] == pytest.approx([part[0] for part in expected])


def test_groups_reduce_among_themselves_after_each_reduction():
    # Computation is almost nothing: gathers, and a scatter and an all-reduce for each unit.
    plain = model(1e-6, 1e-6, 5, 7, 3)
    sums = {("all_reduce", "block"): np.array([2.0]), ("all_reduce", "root"): np.array([4.0])}
    groups = replace(plain, collective_s=plain.collective_s | sums)
    hybrid, _, _ = step(groups, "HYBRID_SHARD")
    assert hybrid == pytest.approx(2 * 4 * 5 + 4 * (7 + 2) + (2 * 3 + 4), rel=1e-4)


def test_blocks_of_two_kinds_take_their_own_times():
    # An encoder and a decoder: fast collectives leave the first gathers and the last reductions.
    kinds = [(operation, unit) for operation, unit in KINDS if unit == "root"]
    kinds += [(operation, unit) for operation, _ in KINDS[::2] for unit in ("encoder", "decoder")]
    forward = {name: np.array([time]) for name, time in (("encoder", 10.0), ("decoder", 20.0))}
    forward["root"] = np.array([4.0])
    two = ShardedModel(
        blocks=("encoder", "encoder", "decoder"),
        forward_s=forward,
        backward_s={name: 2 * time for name, time in forward.items()},
        collective_s={kind: np.ones(1) for kind in kinds},
        copy_s={kind: np.zeros(1) for kind in kinds},
    )
    total, _, exposed = step(two, "FULL_SHARD")
    assert exposed == pytest.approx((1 + 1) + (1 + 1))
    assert total == pytest.approx(3 * (10 + 10 + 20 + 4) + exposed)
