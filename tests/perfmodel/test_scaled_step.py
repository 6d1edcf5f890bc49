"""The step on one and on N ranks against closed forms, and what is proposed to make it scale."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from perfmodel_support import MIB, make_profile, refused

from common.perfmodel.buckets import DdpOptions
from common.perfmodel.collectives import AlphaBeta, MeasuredAllReduce, as_alpha_beta
from common.perfmodel.ddp.profile import DdpCosts
from common.perfmodel.ddp.step import StepOptions, StepParts
from common.perfmodel.model import DdpModel
from common.perfmodel.samples import IN_FLIGHT
from common.perfmodel.scaling.scaled_step import (
    StepModel,
    StepSettings,
    at_bandwidth,
    best_cap_mb,
    first_reaching,
    needed_bandwidth,
    predict,
    propose,
    smallest_that_suffices,
)
from common.perfmodel.scaling.step_model import LinearTime, PassTimes, calibrated

ALPHA, BETA = 0.001, 100 * MIB
"""A latency of 1 ms; a MiB takes 10 ms."""
GRADIENTS = 4
PASSES = PassTimes(LinearTime(0.002, 0.001), LinearTime(0.004, 0.002))


def make_model(network=None, **changes) -> StepModel:
    """Makes a model of four gradients of 1 MiB, ready evenly in time.

    The update takes 5 ms; there is one bucket unless told.
    """
    ready_s = PASSES.backward.time_s(8) * np.arange(1, GRADIENTS + 1) / GRADIENTS
    profile = make_profile([MIB] * GRADIENTS, ready_s, registration=range(GRADIENTS))
    known = {
        "ranks": 2,
        "settings": StepSettings(8, bucket_cap_mb=100.0),
        "together": PASSES,
        "alone": PASSES,
        "profile": profile,
        "networks": {"float32": network or AlphaBeta(ALPHA, BETA)},
        "optimizer_s": 0.005,
    }
    return StepModel(**known | changes)


@pytest.mark.parametrize("batch", [1, 8, 64])
@pytest.mark.parametrize("accumulation", [1, 4])
def test_one_bucket_hides_nothing(batch, accumulation):
    # One bucket is full when the backward pass ends: computation, exchange and update in turn.
    found = predict(make_model(), StepSettings(batch, accumulation, bucket_cap_mb=100.0))
    computed = accumulation * (0.006 + 0.003 * batch)
    exchange = ALPHA + 4 * MIB / BETA
    assert found.step_1_s == pytest.approx(computed + 0.005)
    assert found.step_n_s == pytest.approx(computed + exchange + 0.005)
    assert found.speedup == pytest.approx(2 * (computed + 0.005) / (computed + exchange + 0.005))
    assert found.efficiency == pytest.approx(found.speedup / 2)


def test_buckets_hide_behind_the_backward_pass():
    # A bucket per gradient, sent in 11 ms. With a backward pass of 20 ms the first is ready at
    # 5 ms, and the link then never rests; with one of 204 ms all but the last bucket are hidden.
    settings_ = StepSettings(8, bucket_cap_mb=0.5)
    several = predict(make_model(), settings_)
    assert several.step_n_s == pytest.approx(0.010 + 0.005 + 4 * 0.011 + 0.005)
    large = predict(make_model(), replace(settings_, batch_per_rank=100))
    assert large.step_n_s == pytest.approx(0.102 + 0.204 + 0.011 + 0.005)


def test_each_needless_exchange_costs_as_much_as_the_first():
    once = predict(make_model(), StepSettings(8, 4, bucket_cap_mb=100.0))
    always = predict(make_model(), StepSettings(8, 4, bucket_cap_mb=100.0, exchanges=4))
    assert always.step_n_s - once.step_n_s == pytest.approx(3 * (ALPHA + 4 * MIB / BETA))
    assert always.step_1_s == once.step_1_s


def test_a_16_bit_exchange_follows_its_own_curve_and_pays_for_its_casts():
    cast = AlphaBeta(0.0, 1000 * MIB)  # 1 ms a MiB, there and back
    slow = AlphaBeta(ALPHA, BETA / 4)  # a CPU that adds up float16 at a quarter of the rate
    model = make_model(costs={"fp16": cast}, networks=make_model().networks | {"float16": slow})
    found = predict(model, StepSettings(8, compression="fp16", bucket_cap_mb=100.0))
    exchange = ALPHA + 2 * MIB / (BETA / 4) + 4 * 0.001
    assert found.step_n_s == pytest.approx(0.030 + exchange + 0.005)
    assert found.step_n_s > predict(model).step_n_s
    assert "compression" not in {each.kind for each in propose(model)}
    fast = replace(model, networks=model.networks | {"float16": AlphaBeta(ALPHA, BETA)})
    assert "compression" in {each.kind for each in propose(fast)}


def test_bucket_views_are_not_copied_back_and_casts_stay():
    # One bucket of 4 MiB: copies there and back take 1 ms a MiB, of which half is left.
    copies = {"copy": AlphaBeta(0.0, 1000 * MIB), "fp16": AlphaBeta(0.0, 500 * MIB)}
    networks = dict.fromkeys(("float32", "float16"), AlphaBeta(ALPHA, BETA))
    plain = make_model(costs=copies, networks=networks)
    views = replace(plain, gradient_as_bucket_view=True)
    assert predict(plain).step_n_s - predict(views).step_n_s == pytest.approx(0.002)
    asked = StepSettings(8, compression="fp16", bucket_cap_mb=100.0)
    assert predict(plain, asked).step_n_s == pytest.approx(predict(views, asked).step_n_s)


def test_of_bucketings_that_are_as_fast_the_one_with_fewest_buckets_is_best():
    # All gradients are ready at once and a message has no latency: any buckets take the same.
    model = make_model(AlphaBeta(0.0, BETA))
    late = replace(model.profile, ready_s=np.full(GRADIENTS, model.profile.backward_s))
    model = replace(model, profile=late)
    found = predict(model, StepSettings(8, bucket_cap_mb=best_cap_mb(model)))
    assert found.exchange.num_buckets == 1


@pytest.mark.parametrize("kinds", [("float32",) * 4, ("float32", "bfloat16") * 2])
def test_the_best_cap_is_as_fast_as_any_of_many_caps(kinds):
    model = make_model(AlphaBeta(0.004, BETA))
    model = replace(model, profile=replace(model.profile, kinds=kinds))
    caps = np.linspace(0.01, 5, 300)
    totals = [predict(model, StepSettings(8, bucket_cap_mb=cap)).step_n_s for cap in caps]
    best = predict(model, StepSettings(8, bucket_cap_mb=best_cap_mb(model)))
    assert best.step_n_s == pytest.approx(min(totals))


def test_caps_count_bytes_of_float32_whatever_is_sent():
    model = make_model(networks=dict.fromkeys(("float32", "float16"), AlphaBeta(ALPHA, BETA)))
    for compression in ("none", "fp16"):
        asked = StepSettings(8, compression=compression, bucket_cap_mb=2.0)
        assert predict(model, asked).exchange.num_buckets == 2


def test_calibration_gives_the_measured_step_and_leaves_computation_alone():
    bare = make_model()
    measured = predict(bare).step_n_s + 0.0205
    model = calibrated(bare, measured)
    assert predict(model).step_n_s == pytest.approx(measured)
    # 20.5 ms more for an exchange of 41 ms: half a second a second.
    assert model.contention == pytest.approx(0.5)
    # Accumulation makes one exchange all the same: the same 20.5 ms.
    asked = StepSettings(8, 8, bucket_cap_mb=100.0)
    assert predict(model, asked).step_n_s - predict(bare, asked).step_n_s == pytest.approx(0.0205)
    # A step faster than its own computation is a measurement gone wrong, not a faster network.
    assert predict(calibrated(bare, 0.001)).step_n_s == pytest.approx(0.035)


@given(st.floats(1e-6, 0.01), st.floats(1e-6, 0.01), st.lists(st.integers(1, 500), min_size=2))
def test_a_line_is_found_again(fixed, per_sample, batches):
    times = [fixed + per_sample * batch for batch in batches]
    line = LinearTime.fit(batches, times)
    for batch, time in zip(batches, times, strict=True):
        assert line.time_s(batch) == pytest.approx(time, rel=1e-6)


def test_no_part_of_a_line_is_negative():
    assert LinearTime.fit([1, 2], [1.0, 3.0]).fixed_s == 0  # grows faster than the batch
    assert LinearTime.fit([1, 2], [3.0, 1.0]).per_sample_s == 0  # falls with the batch
    assert LinearTime.fit([4], [2.0]).time_s(8) == pytest.approx(4.0)


def test_where_a_step_was_short_its_messages_were_as_much_shorter_however_many():
    # One bucket, an exchange of 41 ms; the step was 8.2 ms shorter than its pieces: κ is −0.2.
    bare = make_model()
    model = calibrated(bare, predict(bare).step_n_s - 0.0082)
    assert model.contention == pytest.approx(-0.2)
    four = StepSettings(8, bucket_cap_mb=0.5)  # four messages in turn, the first ready at 5 ms
    assert predict(bare, four).step_n_s == pytest.approx(0.020 + 4 * 0.011)
    assert predict(model, four).step_n_s == pytest.approx(0.020 + 4 * 0.8 * 0.011)
    # Half the bytes, in 21 ms, save in proportion.
    half = dict.fromkeys(("float32", "float16"), AlphaBeta(ALPHA, BETA))
    narrow = StepSettings(8, compression="fp16", bucket_cap_mb=100.0)
    steps = [predict(replace(each, networks=half), narrow).step_n_s for each in (bare, model)]
    assert steps[0] - steps[1] == pytest.approx(0.2 * 0.021)


def test_contention_takes_from_computation_what_it_adds_to_a_hidden_message():
    # A bucket per gradient behind a backward pass of 204 ms: three of four messages are hidden.
    asked = StepSettings(100, bucket_cap_mb=0.5)
    bare = make_model(settings=asked)
    model = calibrated(bare, predict(bare).step_n_s + 4 * 0.0022)
    assert model.contention == pytest.approx(0.2)
    found = predict(model)
    assert found.exchange.compute_end_s == pytest.approx(0.204 + 3 * 0.0022)
    assert found.exchange.exposed_communication_s == pytest.approx(0.0132)


def test_gloo_has_two_messages_under_way():
    # With two at a time the first two end together, when one after another would have both done.
    asked = StepSettings(8, bucket_cap_mb=0.5)
    models = {name: make_model(backend=name) for name in ("gloo", "nccl", "")}
    ends = {
        name: [event.end_s for event in predict(model, asked).exchange.events]
        for name, model in models.items()
    }
    assert ends["nccl"] == ends[""] == pytest.approx([0.016, 0.027, 0.038, 0.049])
    assert ends["gloo"][-1] == pytest.approx(0.049)
    assert ends["gloo"][0] > 0.016


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
@pytest.mark.parametrize("cap", [0.5, 2.0, 100.0])
def test_the_step_is_that_of_the_published_model(backend, cap):
    """Without contention and casts: DdpModel.step, put together by hand."""
    copies = AlphaBeta(0.0, 1000 * MIB)  # 1 ms a MiB, there and back
    model = make_model(backend=backend, costs={"copy": copies})
    per_byte = 0.0005 / MIB
    own = DdpModel(
        profile=model.profile,
        network=AlphaBeta(ALPHA, BETA),
        costs=DdpCosts(copy_in_s_per_byte=per_byte, copy_out_s_per_byte=per_byte),
        in_flight=IN_FLIGHT[backend],
    )
    parts = StepParts(forward_s=PASSES.forward.time_s(8), update_s=0.005)
    expected = own.step(parts, StepOptions(DdpOptions(cap), accumulation=1)).total_s
    found = predict(model, StepSettings(8, bucket_cap_mb=cap)).step_n_s
    assert found == pytest.approx(expected)


def test_the_bandwidth_needed_gives_the_efficiency_asked_for():
    model = make_model()
    needed = needed_bandwidth(model, 0.8)
    reached = predict(at_bandwidth(model, needed / BETA)).efficiency
    assert reached == pytest.approx(0.8, rel=1e-3)
    # t1 = 35 ms; 80 % leave 8.75 ms to the exchange, 1 ms of it latency.
    assert needed == pytest.approx(4 * MIB / (0.035 / 0.8 - 0.035 - ALPHA), rel=1e-3)
    assert needed_bandwidth(make_model(AlphaBeta(1.0, BETA)), 0.8) is None


@given(
    st.lists(st.floats(0, 1), min_size=1, max_size=300),
    st.integers(1, 50),
    st.floats(0, 1),
    st.booleans(),
)
def test_the_first_number_that_reaches_a_target_is_found(values, least, target, is_rising):
    """Brute force: each number in turn, of a function that rises, or one that jumps about."""
    values = sorted(values) if is_rising else values
    most = least + len(values) - 1
    expected = next((least + i for i, value in enumerate(values) if value >= target), None)
    found = first_reaching(lambda number: values[number - least], least, most, target)
    if is_rising or found is None:
        assert found == expected
    else:  # a fall between the numbers that are looked at is not seen
        assert values[found - least] >= target


@pytest.mark.parametrize("falls_at", [3, 40, 200])
def test_a_function_that_is_seen_to_fall_is_searched_from_below(falls_at):
    def peaked(number):
        return 1.0 if number == falls_at else number / 1000

    # A peak before the many numbers that reach the target; 3 and 300 are looked at.
    values = {number: peaked(number) for number in range(1, 301)}
    expected = min(number for number, value in values.items() if value >= 0.25)
    assert first_reaching(peaked, 1, 300, 0.25) in (expected, 250)
    falling = {number: 1 - abs(number - falls_at) / 300 for number in range(1, 301)}
    expected = min(number for number, value in falling.items() if value >= 0.9)
    assert first_reaching(falling.get, 1, 300, 0.9) == expected


@pytest.mark.parametrize("name", ["batch_per_rank", "accumulation"])
@pytest.mark.parametrize("target", [0.5, 0.8, 0.9, 0.999])
@pytest.mark.parametrize("cap", [100.0, 1.5])
def test_the_smallest_step_that_hides_an_exchange_is_that_of_brute_force(name, target, cap):
    model = make_model(settings=StepSettings(8, bucket_cap_mb=cap))
    now = model.settings
    most = getattr(now, name) * 16
    steps = [replace(now, **{name: value}) for value in range(getattr(now, name) + 1, most + 1)]
    expected = next((s for s in steps if predict(model, s).exchange_efficiency >= target), None)
    assert smallest_that_suffices(model, now, name, most, target) == expected


def test_times_that_do_not_grow_with_the_size_are_all_latency():
    flat = as_alpha_beta(MeasuredAllReduce([4, 400, 4000], [0.002, 0.0015, 0.001]))
    assert flat.time_s([8, 8e6]).tolist() == [0.0015, 0.0015]


def test_proposals_reach_the_target_with_the_smallest_change():
    found = propose(make_model())
    by_kind = {}
    for each in found:
        by_kind.setdefault(each.kind, each)
    accumulation, batch = by_kind["accumulation"], by_kind["batch_per_rank"]
    # a·30 + 5 over a·30 + 46 ms is 0.79 for a = 5 and 0.86 for 8: of 2, 4, 8 and 16 it is 8.
    assert accumulation.change == "accumulation=8"
    assert accumulation.predicted_efficiency == pytest.approx(245 / 286)
    assert accumulation.global_batch_changed
    # Batch 64: 203 over 244 ms.
    assert batch.change == "batch_per_rank=64"
    assert batch.predicted_step_ms_1 == pytest.approx(203)
    assert batch.predicted_step_ms_n == pytest.approx(244)
    assert not by_kind["bucket_cap_mb"].global_batch_changed
    assert found[-1].kind == "network"
    assert all(each.gain >= 0.03 for each in found)


def test_nothing_is_proposed_where_nothing_helps():
    assert propose(make_model(AlphaBeta(0.0, 1e15))) == []


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: StepSettings(0), "at least 1"),
        (lambda: StepSettings(8, 2, exchanges=3), "3 exchanges in a step of 2"),
        (lambda: StepSettings(8, compression="int8"), "compression 'int8'"),
        (lambda: predict(make_model(), StepSettings(8, compression="bf16")), "of bfloat16"),
        (lambda: make_model(ranks=1), "1 rank"),
        (lambda: make_model(networks={}), "float32"),
        (lambda: LinearTime.fit([], []), "above 0"),
        (lambda: LinearTime.fit([1, 2], [1.0, -1.0]), "above 0"),
        (lambda: LinearTime(-1.0, 0.0), "negative"),
    ],
)
def test_what_cannot_be_gets_one_line(make, message):
    with refused(message):
        make()
