"""The hand-derived T(b) against the event-by-event simulator and against numeric minimisation."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from perfmodel_support import MIB, make_profile, refused

from common.perfmodel.collectives import AlphaBeta
from common.perfmodel.ddp.closed_form import ClosedForm, closed_form
from common.perfmodel.model import DdpModel

LAYERS = 24  # with divisors 1, 2, 3, 4, 6, 8, 12, 24
LAYER_BYTES = 1_000_000

latencies = st.floats(0, 0.5)
bandwidths = st.floats(0.02, 50).map(lambda gain: gain * LAYERS * LAYER_BYTES)
models = st.builds(AlphaBeta, latencies, bandwidths)


@given(models, st.sampled_from([1, 2, 3, 4, 6, 8, 12, 24]))
def test_t_of_b_equals_the_simulation_of_equal_layers(network, layers_per_bucket):
    # T_c is 1 s. The bandwidths go from all-reduces of 50 s in sum to 20 ms: both regimes.
    ready = [(layer + 1) / LAYERS for layer in range(LAYERS)]
    profile = make_profile([LAYER_BYTES] * LAYERS, ready)
    bucket_bytes = layers_per_bucket * LAYER_BYTES
    timeline = DdpModel(profile, network).at_cap(bucket_bytes / MIB)
    assert timeline.num_buckets == LAYERS // layers_per_bucket
    form = ClosedForm(LAYERS * LAYER_BYTES, 1.0, LAYERS, network)
    assert form.total_s(bucket_bytes) == pytest.approx(timeline.total_s)


SLOW = ClosedForm(10e6, 1.0, 10, AlphaBeta(0.02, 5e6))


def test_a_pass_exposes_one_all_reduce_or_waits_for_one_bucket_and_pays_every_latency():
    # 10 MB in 1 s: a bucket of 1 MB takes 0.1 s to compute and 0.02 + 0.05 s to reduce.
    fast = replace(SLOW, all_reduce=AlphaBeta(0.02, 20e6))
    assert fast.total_s(1e6) == pytest.approx(1.0 + 0.07)
    # The same with 5 MB/s: 0.1 s for the first bucket, then 10 times 0.02 + 0.2 s.
    assert SLOW.total_s(1e6) == pytest.approx(0.1 + 10 * 0.22)


def test_a_bucket_is_never_smaller_than_a_layer_nor_larger_than_all_gradients():
    assert SLOW.total_s(1.0) == SLOW.total_s(1e6)
    assert SLOW.total_s(1e12) == SLOW.total_s(10e6)


def test_many_bucket_sizes_at_once_give_an_array():
    sizes = np.array([1e6, 2e6, 5e6])
    assert SLOW.total_s(sizes) == pytest.approx([SLOW.total_s(size) for size in sizes])
    assert isinstance(SLOW.total_s(1e6), float)


@given(
    alpha=st.floats(1e-6, 1),
    bandwidth=st.floats(1e6, 1e12),
    gradient_bytes=st.floats(1e6, 1e10),
    compute=st.floats(1e-3, 10),
    layers=st.integers(1, 200),
)
def test_best_bucket_is_the_minimum_on_a_fine_grid(
    alpha, bandwidth, gradient_bytes, compute, layers
):
    form = ClosedForm(gradient_bytes, compute, layers, AlphaBeta(alpha, bandwidth))
    best = form.best_bucket_bytes()
    smallest = gradient_bytes / layers
    assert smallest * (1 - 1e-12) <= best <= gradient_bytes * (1 + 1e-12)
    grid = np.geomspace(smallest, gradient_bytes, 20_001)
    times = form.total_s(grid)
    # No size on the grid is better, and the best on the grid is hardly worse than b*.
    assert form.total_s(best) <= times.min() * (1 + 1e-12)
    assert form.total_s(best) == pytest.approx(times.min(), rel=2e-3)


def test_the_square_root_law_is_the_best_bucket_of_a_slow_network():
    # α = 1 ms, B = 100 MB, T_c = 1 s: b* = B · sqrt(α / T_c) = 3.16 MB.
    form = ClosedForm(100e6, 1.0, 1000, AlphaBeta(1e-3, 50e6))
    assert form.square_root_law_bytes() == pytest.approx(3.1623e6, rel=1e-4)
    assert form.best_bucket_bytes() == form.square_root_law_bytes()


def test_a_fast_network_wants_the_bucket_at_which_the_regimes_meet():
    # g = 10 ns/B, 1/β = 1 ns/B: b₀ = α / 9 ns = 0.111 MB, where a(b₀) = g·b₀.
    form = ClosedForm(100e6, 1.0, 10_000, AlphaBeta(1e-3, 1e9))
    best = form.best_bucket_bytes()
    assert best == pytest.approx(1e-3 / 9e-9)
    assert form.all_reduce.time_s(best) == pytest.approx(form.seconds_per_byte * best)
    assert best < form.square_root_law_bytes()


@pytest.mark.parametrize("factor", [2, 9, 100])
def test_the_square_root_law_grows_with_the_root_of_alpha_and_b_and_falls_with_that_of_g(factor):
    def law(alpha=1e-3, gradient_bytes=1e8, seconds_per_byte=1e-8):
        compute = gradient_bytes * seconds_per_byte
        form = ClosedForm(gradient_bytes, compute, 10, AlphaBeta(alpha, 1e9))
        return form.square_root_law_bytes()

    root = factor**0.5
    assert law(alpha=1e-3 * factor) == pytest.approx(law() * root)
    assert law(gradient_bytes=1e8 * factor) == pytest.approx(law() * root)
    assert law(seconds_per_byte=1e-8 * factor) == pytest.approx(law() / root)


def test_without_latency_the_smallest_bucket_is_best():
    form = ClosedForm(100e6, 1.0, 50, AlphaBeta(0.0, 50e6))
    assert form.best_bucket_bytes() == pytest.approx(2e6)


@pytest.mark.parametrize(
    ("names", "layers"),
    [
        (("wte.weight", "wpe.weight", "blocks.0.ln_1.weight", "blocks.11.ln_1.bias"), 4),
        (("ln_f.weight", "ln_f.bias"), 1),
        (("layers.0.weight", "layers.0.bias", "layers.2.weight"), 2),
        (("0.weight", "0.bias", "2.weight"), 2),
        (("transformer.wte.weight", "transformer.h.0.a.weight", "transformer.h.0.b.weight"), 2),
        (("conv1.weight", "layer1.0.conv1.weight", "layer1.0.bn2.bias", "layer1.1.bn1.bias"), 3),
        (("encoder.block.0.layer.0.q.weight", "encoder.block.0.layer.1.k.weight"), 1),
        (("gradient 0", "gradient 1", "cls_token"), 3),
    ],
)
def test_the_layers_of_a_model_are_told_by_any_names(names, layers):
    count = len(names)
    profile = replace(make_profile([4] * count, range(1, count + 1)), names=names)
    assert closed_form(profile, AlphaBeta(1e-3, 1e9)).layers == layers


@pytest.mark.parametrize(
    ("gradient_bytes", "compute", "layers"),
    [(0, 1.0, 10), (-1e6, 1.0, 10), (1e6, 0.0, 10), (1e6, -1.0, 10), (1e6, 1.0, 0)],
)
def test_impossible_quantities_are_refused(gradient_bytes, compute, layers):
    with refused("above 0"):
        ClosedForm(gradient_bytes, compute, layers, AlphaBeta(1e-3, 1e9))
