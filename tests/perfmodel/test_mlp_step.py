"""The synthetic MLP's step: its arithmetic against torch, and the published pair of V100s."""

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from common.errors import UserError
from common.models.mlp import MLP
from common.perfmodel.buckets import MIB, assign_buckets
from common.perfmodel.scaling.mlp_step import Mlp, TwoGpuModel, fit_one_device
from common.perfmodel.scaling.published_mlp import (
    LARGEST_SLOWDOWN,
    PCIE3_X16_BYTES_PER_S,
    Explanation,
    explain,
    explain_published,
    read_published,
)

DEFAULTS = (4096, 4096, 3, 2048)
SMALL = (24, 40, 3, 16)
ASSUMED = ((0, 900e9), (100e-6, 900e9), (40e-6, 700e9), (40e-6, 1e15))
"""Latencies and memory's bandwidths, one of them moved at a time."""
ONE = fit_one_device(Mlp.of(*DEFAULTS), {256: 7.6e-3, 4096: 99.77e-3})


@pytest.fixture(scope="module")
def published() -> Explanation:
    return explain_published()


def test_the_defaults_have_the_published_number_of_parameters() -> None:
    assert Mlp.of(*DEFAULTS).parameters == 58_734_592


def test_sizes_order_and_operations_are_those_of_torch() -> None:
    model, ours = MLP(*SMALL), Mlp.of(*SMALL)
    came = []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: came.append(p.numel()))
    with FlopCounterMode(display=False) as forward:
        loss = model(torch.randn(5, SMALL[0])).sum()
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    assert ours.parameters == sum(p.numel() for p in model.parameters())
    assert (ours.profile(1.0).sizes_bytes // 4).tolist() == came
    assert forward.get_total_flops() == 5 * ours.forward_flops
    assert backward.get_total_flops() == 5 * sum(ours.backward_flops)


def test_buckets_at_50_mib_are_those_of_ddp() -> None:
    # Weights in the order they are ready: 32, 64, 64 and 64 MiB, each behind its bias.
    profile = Mlp.of(*DEFAULTS).profile(1.0)
    buckets = assign_buckets(profile.sizes_bytes.tolist(), 50 * MIB)
    sizes = [profile.sizes_bytes[bucket].sum() / MIB for bucket in buckets]
    assert sizes == pytest.approx([96, 64, 64], abs=0.05)


def test_one_device_goes_through_both_of_its_points(published: Explanation) -> None:
    one = published.model.device
    assert one.step_s(256) == pytest.approx(7.60e-3)
    assert one.step_s(4096) == pytest.approx(99.77e-3)
    assert sum(one.passes_s(256)) + one.update_s == pytest.approx(7.60e-3)
    # A V100-PCIe computes 14 TFLOP/s in float32 (data sheet): nothing may be faster, and matrices
    # of this size should come close.
    assert 0.85 * 14e12 < one.flops_per_s < 14e12


def test_one_bandwidth_explains_both_published_steps(published: Explanation) -> None:
    times, _ = read_published()
    model, beta = published.model, published.bandwidth_bytes_per_s
    for batch, measured_s in times[2].items():
        predicted = model.step_s(batch, beta, published.slowdown)
        assert predicted == pytest.approx(measured_s, rel=0.005)
    assert 6.3e9 < published.low < beta < published.high < 6.9e9
    assert 1 < published.slowdown < LARGEST_SLOWDOWN
    assert beta < PCIE3_X16_BYTES_PER_S


def test_with_the_slowdown_others_measured_the_bandwidth_alone_is_enough(
    published: Explanation,
) -> None:
    bandwidth, error = published.at_mean_slowdown
    assert error < 0.01
    assert published.low < bandwidth < published.high
    # Without any contention both are still within the tolerance, and not better.
    assert 0.01 < published.without_slowdown[1] < 0.03


@pytest.mark.parametrize(
    ("alpha_s", "memory_bytes_per_s"),
    [(0, 700e9), *(pytest.param(*case, marks=pytest.mark.slow) for case in ASSUMED)],
)
def test_what_had_to_be_assumed_hardly_moves_the_bandwidth(
    published: Explanation, alpha_s: float, memory_bytes_per_s: float
) -> None:
    times, _ = read_published()
    mlp = published.model.device.mlp
    one = fit_one_device(mlp, times[1], memory_bytes_per_s)
    model = TwoGpuModel(one, 50, alpha_s, memory_bytes_per_s)
    found = explain(model, times[2], times[1])
    assert found.bandwidth_bytes_per_s == pytest.approx(published.bandwidth_bytes_per_s, rel=0.015)
    assert 1.15 < found.slowdown < 1.2


def test_the_small_batch_tells_the_bandwidth_by_hand(published: Explanation) -> None:
    # Almost everything after the first bucket is communication: 224 MiB in what the step has more
    # than the part of it that comes before that bucket is ready.
    one = published.model.device
    forward, backward = one.passes_s(256)
    before = forward + backward * (2 * 8 + 2 * 16 * 1) / (2 * (8 + 2 * 16) + 16) + one.update_s
    by_hand = 58_734_592 * 4 / (41.40e-3 - before)
    assert published.needed[256][0] == pytest.approx(by_hand, rel=0.03)


def test_a_bandwidth_comes_back_from_steps_made_with_it() -> None:
    model = TwoGpuModel(ONE)
    steps = {batch: model.step_s(batch, 3e9, 1.25) for batch in (256, 4096)}
    found = explain(model, steps, {})
    assert found.bandwidth_bytes_per_s == pytest.approx(3e9, rel=0.01)
    assert max(map(abs, found.errors.values())) < 0.005
    assert model.bandwidth_for(256, steps[256], 1.25) == pytest.approx(3e9, rel=1e-3)


def test_two_steps_that_no_bandwidth_joins_keep_a_stated_error() -> None:
    found = explain(TwoGpuModel(ONE), {256: 41.4e-3, 4096: 300e-3}, {})
    assert max(map(abs, found.errors.values())) > 0.2
    assert (found.low, found.high) == (found.bandwidth_bytes_per_s,) * 2


def test_no_bandwidth_makes_a_step_shorter_than_its_computation() -> None:
    assert TwoGpuModel(ONE).bandwidth_for(256, 5e-3) is None


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ({256: 7.6e-3}, "at two batches"),
        ({256: 7.6e-3, 512: 7.0e-3}, "cannot be"),
        ({256: 1e-3, 512: 2e-3}, "the update alone takes 0.783 ms"),
    ],
)
def test_steps_that_one_device_cannot_have_are_refused(steps: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        fit_one_device(Mlp.of(*DEFAULTS), steps)


def test_sizes_below_one_are_refused() -> None:
    with pytest.raises(UserError, match="at least 1"):
        Mlp.of(4096, 4096, 0, 2048)
    assert np.isfinite(Mlp.of(1, 1, 1, 1).profile(1.0).ready_s).all()
