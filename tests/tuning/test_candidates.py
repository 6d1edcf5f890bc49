"""Predicted settings against closed forms, and candidates that are worth a step."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from common.perfmodel.collectives import AlphaBeta
from common.perfmodel.ddp.profile import NO_COSTS, BackwardProfile, DdpCosts
from common.perfmodel.tables import AllReduceTable
from common.perfmodel.uncertainty import Chance
from common.runtime.records.recorder import Recorder
from common.samples import Interval
from common.tuning import measured as inputs
from common.tuning import tuner
from common.tuning.candidates import APART, predict, predict_all
from common.tuning.ddp_setting import DEFAULT, DdpSetting
from common.tuning.measured import Measured, curve_sizes

MIB = 2**20


def measured(
    costs: DdpCosts = NO_COSTS, kinds: tuple[str, ...] = (), backend: str = "nccl", **network
) -> Measured:
    """Makes the measurements of ten gradients of 4 MiB, one every 10 ms; 20 ms forward."""
    count = 10
    profile = BackwardProfile(
        names=tuple(f"p{i}" for i in range(count)),
        sizes_bytes=np.full(count, 4 * MIB, np.int64),
        ready_s=np.arange(1, count + 1) * 0.01,
        backward_s=count * 0.01,
        kinds=kinds or ("float32",) * count,
        registration=tuple(range(count))[::-1],
    )
    curve = AlphaBeta(**{"alpha_s": 1e-3, "bandwidth_bytes_per_s": 800 * MIB} | network)
    narrow = AlphaBeta(1e-3, 800 * MIB)
    casts = {"fp16": 0.0, "bf16": 1e-12}
    networks = {
        name: AllReduceTable(each, None, 2, "made up")
        for name, each in {"none": curve, "fp16": narrow, "bf16": narrow}.items()
    }
    return Measured(
        forward_s=0.02,
        profile=profile,
        networks=networks,
        costs=costs,
        backend=backend,
        cast_s_per_byte=casts,
    )


def test_a_step_is_the_closed_form_where_one_bucket_is_left_over():
    # 4 MiB take 6 ms, less than the 10 ms between two gradients: only the last one is exposed.
    found = predict(measured(), DdpSetting(4))
    assert found.num_buckets == 10
    assert found.backward_s == pytest.approx(0.1 + 0.006)
    assert found.step_s == pytest.approx(0.02 + 0.106)
    # All in one bucket: 40 MiB take 51 ms after the pass, and compressed half of the 50.
    both = [predict(measured(), DdpSetting(40, compression=name)) for name in ("none", "fp16")]
    assert [each.backward_s for each in both] == pytest.approx([0.1 + 0.051, 0.1 + 0.026])


def test_accumulation_counts_per_micro_batch():
    # Three passes alone and one with the exchange, over four.
    found = predict(measured(), DdpSetting(4, accumulation=4))
    assert found.step_s == pytest.approx((3 * 0.12 + 0.126) / 4)


def test_a_bucket_view_saves_the_copy_back():
    slow = measured(DdpCosts(copy_out_s_per_byte=1e-3 / MIB))
    plain, view = (predict(slow, DdpSetting(40, bucket_view=view)) for view in (False, True))
    assert plain.backward_s - view.backward_s == pytest.approx(0.04)


def test_a_first_bucket_of_its_own_starts_the_exchange_sooner():
    # Communication rests only between the first bucket's 40 ms, from 10 ms on, and the second,
    # ready at 60 ms: T = 0.06 + 0.36; with equal caps 0.05 + 0.4.
    slow = measured(alpha_s=0.0, bandwidth_bytes_per_s=100 * MIB)
    both = [predict(slow, setting) for setting in (DdpSetting(20), DdpSetting(20, first_mib=4))]
    assert [each.backward_s for each in both] == pytest.approx([0.45, 0.42])
    found = predict_all(measured(alpha_s=0.05, bandwidth_bytes_per_s=100 * MIB))
    assert any(each.setting.first_mib for each in found.candidates)
    without = predict_all(measured(alpha_s=0.05, bandwidth_bytes_per_s=100 * MIB), False)
    assert not any(each.setting.first_mib for each in without.candidates)


def test_candidates_are_the_best_first_and_some_way_apart():
    found = predict_all(measured())
    plain = [each for each in found.candidates if each.setting == DdpSetting(each.setting.cap_mib)]
    best_s = min(each.total_s for each in found.bucketings)
    assert plain[0].backward_s <= best_s * 1.006
    caps = sorted(each.setting.cap_mib for each in plain)
    assert all(b / a >= APART for a, b in itertools.pairwise(caps))
    assert found.default.setting == DEFAULT
    changes = [(each.setting.compression, each.setting.accumulation) for each in found.options]
    assert changes == [("fp16", 1), ("none", 2)]


def test_of_caps_that_are_predicted_alike_the_largest_comes_first():
    # Without latency only what is sent last counts: ten buckets end with 4 MiB, and so do nine
    # gradients and one, the largest cap of all that do.
    found = predict_all(measured(alpha_s=0.0, bandwidth_bytes_per_s=10_000 * MIB), False)
    ten, two = found.bucketings[0], found.candidates[0]
    assert ten.num_buckets == 10
    assert two.backward_s == pytest.approx(ten.total_s)
    assert two.num_buckets == 2
    assert int(two.setting.cap_mib) in range(33, 37)


def test_all_bucketings_of_equal_gradients_are_found():
    # With ten equal gradients a bucket holds 1 … 10 of them: ten bucketings.
    assert len(predict_all(measured()).bucketings) == 10


def test_sixteen_bit_gradients_are_not_compressed_and_mixed_ones_are_searched():
    halves = predict_all(measured(kinds=("bfloat16",) * 10))
    assert [each.setting.compression for each in halves.options] == ["none"]
    mixed = predict_all(measured(kinds=("float32", "bfloat16") * 5))
    # Five of each kind: buckets of 1 … 5; above 20 MiB none of these closes, and the order changes.
    assert len(mixed.bucketings) == 6


def test_sizes_to_measure_span_the_model():
    sizes = curve_sizes(40 * MIB)
    assert sizes[0] == 1024
    assert sizes[-1] == 40 * MIB
    assert all(b <= 4 * a for a, b in itertools.pairwise(sizes))
    assert curve_sizes(10) == [1024, 2048]


def test_of_caps_that_compress_alike_the_largest_is_taken():
    # As above: without latency only the last bucket counts, 4 MiB of ten buckets and of two.
    fast = AllReduceTable(AlphaBeta(0.0, 10_000 * MIB), None, 2, "made up")
    found = measured(alpha_s=0.0, bandwidth_bytes_per_s=10_000 * MIB)
    found = replace(found, networks=dict.fromkeys(found.networks, fast))
    compressed = predict_all(found).options[0]
    assert compressed.setting.compression != "none"
    assert compressed.num_buckets == 2
    assert compressed.step_s == pytest.approx(0.02 + 0.1 + 2 / 10_000, rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_reduces_are_timed_in_the_gradients_dtype_and_as_many_bytes(monkeypatch, dtype):
    timed: dict[torch.dtype, list[int]] = {}

    def time_all_reduces(numel: int, dtype: torch.dtype, *_: object, **__: object) -> list:
        timed.setdefault(dtype, []).append(numel * dtype.itemsize)
        return []

    monkeypatch.setattr(inputs, "time_all_reduces", time_all_reduces)
    monkeypatch.setattr(inputs, "_write", lambda *_: None)
    monkeypatch.setattr(inputs, "on_main", lambda *_: None)
    recorder = Recorder(SimpleNamespace(gather=lambda item: [item]), None)
    inputs.measure_all_reduces(measured().profile, dtype, recorder)
    assert set(timed) == {dtype, torch.float16, torch.bfloat16}
    assert set(curve_sizes(40 * MIB)) <= set(timed[dtype])


def test_the_error_to_expect_is_that_of_the_best_setting_and_not_of_its_cap_alone(monkeypatch):
    # The cap alone takes 0.151 s, of which chance moves 10 % up and down; a view saves 40 ms.
    slow = measured(DdpCosts(copy_out_s_per_byte=1e-3 / MIB))
    best = predict(slow, DdpSetting(40, bucket_view=True))
    assert predict(slow, DdpSetting(40)).backward_s == pytest.approx(best.backward_s + 0.04)
    asked = {}

    def chance_at(calibration: object, cap_mib: float) -> Chance:
        asked["cap"] = cap_mib
        return Chance(Interval(0.2, 0.18, 0.22), "all-reduces", 0.1)

    def expectation(model, backend, network, predicted_s, chance) -> str:
        asked.update(predicted_s=predicted_s, chance=chance)
        return "expected"

    monkeypatch.setattr(tuner, "read_calibration", lambda *_, **__: None)
    monkeypatch.setattr(tuner, "chance_at", chance_at)
    monkeypatch.setattr(tuner, "expectation", expectation)
    run = SimpleNamespace(path=Path("run"), environment={"network": "a cable"})
    text = tuner._expected_error(slow, best, SimpleNamespace(run=run))
    assert asked == {
        "cap": 40,
        "predicted_s": best.backward_s,
        "chance": pytest.approx(0.1),
    }
    low_ms, high_ms = best.backward_s * 900, best.backward_s * 1100
    assert f"{low_ms:.1f} to {high_ms:.1f} ms" in text
