"""Fits to all-reduce tables: known curves are recovered, noise gets a line, tiny tables refuse."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from perfmodel_support import refused

from common.perfmodel.cluster.clusters import load_cluster
from common.perfmodel.cluster.nccl import NO_RAMP, NcclAllReduce, soft_minimum
from common.perfmodel.cluster.nccl_fit import fit_nccl
from common.perfmodel.cluster.nccl_shapes import Paths, Protocols
from common.perfmodel.simulator import simulate_backward

SIZES = 2.0 ** np.arange(10, 34)
A100, H100 = load_cluster("a100-ib"), load_cluster("h100-a3mega")
MIB = 2**20


def paths(*lines: tuple[float, float]) -> np.ndarray:
    """Computes the fastest of several latencies (µs) and bandwidths (GB/s)."""
    return np.min([us * 1e-6 + SIZES / (gb * 1e9) for us, gb in lines], axis=0)


def test_a_straight_line_is_one_path() -> None:
    fitted = fit_nccl(None, None, SIZES, paths((50, 20)))
    assert fitted.shape == "1 path"
    assert fitted.parameters == pytest.approx({"latency_1_us": 50, "bandwidth_1_gb_per_s": 20})
    assert fitted.held_out_error < 1e-6


@pytest.mark.parametrize(
    "lines", [((30, 5), (400, 100)), ((25, 1), (60, 20), (900, 180))], ids=["two", "three"]
)
def test_a_switch_of_protocol_is_found_with_each_sides_latency_and_bandwidth(lines) -> None:
    fitted = fit_nccl(H100, 16, SIZES, paths(*lines))
    assert fitted.shape == f"{len(lines)} paths"
    found = list(fitted.parameters.values())
    assert found == pytest.approx([value for line in lines for value in line], rel=1e-3)


def test_nccls_protocols_with_a_launch_a_share_and_a_ramp_are_recovered() -> None:
    # made here from NCCL's tuner and the four parameters, with no help from the fit
    tuner = NcclAllReduce(A100, 8, ramp=NO_RAMP)
    times = []
    for size in SIZES:
        taken = min(
            (NcclAllReduce(A100, 8, algorithms=(name,), ramp=NO_RAMP) for name in ("Ring", "Tree")),
            key=lambda model, size=size: model.time_s(size),
        )
        choice = next(c for c in taken.choices if c.name == tuner.choice(size))
        transfer = taken.time_s(size) - choice.latency_s
        ramp = soft_minimum(np.array([2.0 * transfer]), np.array([90e-6]))[0]
        times.append(20e-6 + choice.latency_s + transfer / 0.9 + ramp)
    fitted = fit_nccl(A100, 8, SIZES, times)
    assert fitted.shape == "NCCL's protocols"
    expected = {
        "launch_us": 20,
        "share_of_bandwidth": 0.9,
        "ramp_slowdown": 2.0,
        "ramp_us": 90,
    }
    assert fitted.parameters == pytest.approx(expected, rel=0.01)
    assert fitted.time_s(SIZES) == pytest.approx(times, rel=1e-3)


def test_a_noisy_table_gets_a_plain_line_and_is_called_noisy() -> None:
    random = np.random.default_rng(5)
    sizes = SIZES[::3]
    times = (1e-3 + sizes / 10e9) * np.exp(0.3 * random.normal(size=len(sizes)))
    fitted = fit_nccl(A100, 8, sizes, times, std_s=0.3 * times)
    assert fitted.shape == "1 path"
    assert fitted.std_share == pytest.approx(0.3)
    assert any("noisy" in note and "30%" in note for note in fitted.notes)
    # what it says of sizes left out is what leaving them out by hand gives
    for out in range(len(sizes)):
        rest = np.arange(len(sizes)) != out
        others = fit_nccl(
            A100, 8, sizes[rest], times[rest], 0.3 * times[rest], extrapolate=True, check=False
        )
        assert fitted.left_out_s[out] == pytest.approx(others.time_s(sizes[out]))
    assert fitted.within_std == (np.abs(fitted.left_out_s - times) <= 0.3 * times).sum()
    assert f"{fitted.within_std} of {len(sizes)}" in fitted.notes[-1]


@pytest.mark.parametrize(
    ("shape", "logs"),
    [
        (Paths(3), np.log([3e-5, 9e-5, 9e-4, 1e-9, 5e-11, 6e-12])),
        (Protocols(NcclAllReduce(A100, 8)), np.log([2e-5, 0.9, 1.5, 6e-5])),
    ],
    ids=["paths", "protocols"],
)
def test_slopes_are_finite_differences(shape, logs) -> None:
    steps = 1e-6 * np.eye(len(logs))
    expected = [
        (shape.predict(logs + step, SIZES) - shape.predict(logs - step, SIZES)) / 2e-6
        for step in steps
    ]
    found = shape.slopes(logs, SIZES).T
    assert found == pytest.approx(np.array(expected), rel=1e-4, abs=1e-10)


def test_one_wild_point_does_not_bend_the_fit() -> None:
    times = paths((50, 20))
    times[7] *= 1.5
    others = np.arange(len(SIZES)) != 7
    assert fit_nccl(None, None, SIZES, times).time_s(SIZES[others]) == pytest.approx(
        times[others], rel=0.01
    )


def test_beyond_four_times_its_range_a_table_refuses_unless_asked() -> None:
    tiny = SIZES <= 64 * 1024
    sizes, times = SIZES[tiny], paths((50, 20))[tiny]
    fitted = fit_nccl(A100, 8, sizes, times)
    assert fitted.time_s(256 * 1024) > 0
    with refused("25 MiB", "4 times", "0.0625 MiB", "extrapolate=True"):
        fitted.time_s([1024, 25 * MIB])
    asked = fit_nccl(A100, 8, sizes, times, extrapolate=True)
    assert asked.extrapolate
    assert asked.is_extrapolated([256 * 1024, 25 * MIB]).tolist() == [False, True]
    assert any("extrapolated" in note for note in asked.notes)
    assert not any("extrapolated" in note for note in fitted.notes)
    assert asked.time_s(25 * MIB) == pytest.approx(50e-6 + 25 * MIB / 20e9, rel=0.05)


def test_a_fit_serves_the_simulator() -> None:
    from perfmodel_support import make_profile

    profile = make_profile([MIB, MIB], [1e-3, 2e-3])
    fitted = fit_nccl(None, None, SIZES, paths((50, 20)))
    timeline = simulate_backward(profile, fitted, 1.0)
    expected = 2e-3 + 50e-6 + MIB / 20e9
    assert timeline.total_s == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("count", [2, 3, 5])
def test_a_few_points_are_enough_for_a_line(count) -> None:
    sizes = SIZES[:: len(SIZES) // count][:count]
    times = 30e-6 + sizes / 5e9
    assert fit_nccl(A100, 8, sizes, times).time_s(sizes) == pytest.approx(times, rel=0.02)


def test_scalars_and_arrays_agree() -> None:
    fitted = fit_nccl(None, None, SIZES, paths((50, 20)))
    assert isinstance(fitted.time_s(1024), float)
    assert fitted.time_s([[1024, 2048]]).shape == (1, 2)


def test_two_sizes_are_fitted_and_none_of_them_left_out() -> None:
    fitted = fit_nccl(A100, 8, [1024, 2048], [1e-5, 1.5e-5], std_s=[1e-6, 1e-6])
    assert fitted.time_s(1024) == pytest.approx(1e-5, rel=0.01)
    assert fitted.left_out_s is None


def test_mistakes_are_one_line() -> None:
    with refused("at least 2"):
        fit_nccl(A100, 8, [1024], [1e-5])
    with refused("ascend"):
        fit_nccl(A100, 8, [1024, 512], [1e-5, 2e-5])
    with refused("1 standard deviations for 2 times"):
        fit_nccl(A100, 8, [1024, 2048], [1e-5, 2e-5], std_s=[1e-6])
    with refused("at least 0"):
        fit_nccl(A100, 8, [1024, 2048], [1e-5, 2e-5], std_s=[1e-6, -1e-6])
    with refused("12 GPUs"):
        fit_nccl(A100, 12, SIZES, paths((50, 20)))
    with refused("no NVLS"):
        fit_nccl(replace(A100, name="x"), 8, SIZES, paths((50, 20)), algorithms=("NVLS",))
