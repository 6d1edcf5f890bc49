"""All-reduce models: fits against exact lines and SciPy, curves against their own points."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from perfmodel_support import refused
from scipy.optimize import minimize

from common.perfmodel.collectives import (
    AlphaBeta,
    MeasuredAllReduce,
    algorithm_bandwidth,
    bus_bandwidth,
)

# bytes and seconds of a curve with a dip: twice the message in less time (2×4 A100, NCCL tree)
DIP_BYTES = [4, 26198720, 52397440, 104794880, 209589760, 419179520]
DIP_S = [0.002881, 0.006521, 0.006745, 0.017479, 0.014473, 0.044608]

sizes_strategy = st.lists(st.integers(4, 2**32), min_size=2, max_size=12, unique=True).map(sorted)


def relative_error_squared(sizes, times, alpha, inverse_beta):
    """Computes the objective of the fit, written down once more."""
    return float(np.sum(((alpha + np.array(sizes) * inverse_beta) / np.array(times) - 1) ** 2))


@given(sizes_strategy, st.floats(1e-6, 1e-2), st.floats(1e6, 1e12))
def test_fit_recovers_an_exact_line(sizes, alpha, beta):
    assume(sizes[-1] / beta > 1e-3 * alpha)  # else no time depends on β
    assume(sizes[-1] > 1.5 * sizes[0])
    times = [alpha + size / beta for size in sizes]
    fitted = AlphaBeta.fit(sizes, times)
    # As curves they are equal; α alone is lost in rounding where the smallest message is long.
    assert fitted.time_s(sizes) == pytest.approx(times, rel=1e-9)
    if sizes[0] / beta < 1e3 * alpha:
        assert fitted.alpha_s == pytest.approx(alpha, rel=1e-4)
    assert fitted.bandwidth_bytes_per_s == pytest.approx(beta, rel=1e-4)


@pytest.mark.parametrize("seed", range(10))
def test_a_noisy_fit_is_the_minimum_that_scipy_finds(seed):
    random = np.random.default_rng(seed)
    sizes = np.unique(np.geomspace(4, 2**30, 15).astype(int))
    alpha, beta = 10 ** random.uniform(-5, -3), 10 ** random.uniform(8, 11)
    times = (alpha + sizes / beta) * np.exp(0.3 * random.normal(size=len(sizes)))
    fitted = AlphaBeta.fit(sizes, times)

    def objective(logs):
        return relative_error_squared(sizes, times, *np.exp(logs))

    options = {"xatol": 1e-12, "fatol": 1e-15, "maxiter": 10_000}
    found = minimize(objective, np.log([alpha, 1 / beta]), method="Nelder-Mead", options=options)
    assert fitted.alpha_s == pytest.approx(np.exp(found.x[0]), rel=1e-4)
    assert 1 / fitted.bandwidth_bytes_per_s == pytest.approx(np.exp(found.x[1]), rel=1e-4)


def test_a_fit_never_has_a_negative_latency():
    # Times grow faster than the sizes: an unbounded line would cross zero below 0.
    sizes, times = [1000, 2000, 4000], [1e-6, 3e-6, 8e-6]
    fitted = AlphaBeta.fit(sizes, times)
    assert fitted.alpha_s == 0
    # With α held at 0 the slope is the best there is, by search over a fine grid.
    grid = np.linspace(0.5e-9, 3e-9, 100_001)
    relative = np.outer(grid, sizes) / times - 1
    best = grid[np.argmin(np.sum(relative**2, axis=1))]
    assert 1 / fitted.bandwidth_bytes_per_s == pytest.approx(best, abs=5e-14)


def test_small_and_large_messages_count_alike_in_a_fit():
    # A tenth off at 4 bytes costs as much as a tenth off at 1 GiB; absolute least squares would
    # give the latency away to fit the long times.
    sizes = np.geomspace(4, 2**30, 10)
    times = 1e-4 + sizes / 1e9
    times[-1] *= 1.5
    fitted = AlphaBeta.fit(sizes, times)
    assert fitted.alpha_s == pytest.approx(1e-4, rel=0.1)
    assert np.median(np.abs(fitted.time_s(sizes) / times - 1)) < 0.1


def test_from_endpoints_takes_alpha_from_the_smallest_and_beta_from_the_largest_message():
    model = AlphaBeta.from_endpoints([4, 500_000, 1_000_004], [2e-4, 9.0, 1.2e-3])
    assert model.alpha_s == 2e-4
    assert model.bandwidth_bytes_per_s == pytest.approx(1e9)


@given(sizes_strategy, st.data())
def test_a_measured_curve_goes_through_its_points_and_is_straight_between_them(sizes, data):
    count = len(sizes)
    times = data.draw(st.lists(st.floats(1e-6, 10), min_size=count, max_size=count))
    curve = MeasuredAllReduce(sizes, times)
    assert curve.time_s(sizes) == pytest.approx(times)
    middles = [(low + high) / 2 for low, high in pairwise(sizes)]
    expected = [(low + high) / 2 for low, high in pairwise(times)]
    assert curve.time_s(middles) == pytest.approx(expected)


def test_beyond_its_points_a_curve_keeps_the_last_bandwidth_and_the_first_time():
    curve = MeasuredAllReduce([100, 1000], [0.5, 2.0])
    assert curve.time_s(5000) == pytest.approx(10.0)
    assert curve.time_s(1) == 0.5
    assert curve.time_s([1, 1000, 2000]) == pytest.approx([0.5, 2.0, 4.0])


@pytest.mark.parametrize("model", [AlphaBeta(1e-4, 1e9), MeasuredAllReduce(DIP_BYTES, DIP_S)])
def test_a_scalar_gives_a_float_and_a_sequence_an_array_of_its_shape(model):
    for scalar in (4, 4.0, np.int64(4), 10**12):
        assert type(model.time_s(scalar)) is float
    for sizes in ([4], [4, 10**9], np.array([[4, 8], [16, 10**12]])):
        times = model.time_s(sizes)
        assert isinstance(times, np.ndarray)
        assert times.shape == np.shape(sizes)
        assert times.ravel() == pytest.approx([model.time_s(x) for x in np.ravel(sizes)])


def test_bus_bandwidth_is_algorithm_bandwidth_times_the_traffic_of_a_ring():
    # nccl-tests, doc/PERFORMANCE.md: 2(n−1)/n of the data cross each link; with 2 ranks, all once.
    assert algorithm_bandwidth(1e9, 0.5) == pytest.approx(2e9)
    assert bus_bandwidth(1e9, 0.5, ranks=2) == pytest.approx(2e9)
    assert bus_bandwidth([1e9, 2e9], [0.5, 0.5], ranks=8) == pytest.approx([3.5e9, 7e9])


@pytest.mark.parametrize("make", [MeasuredAllReduce, AlphaBeta.fit, AlphaBeta.from_endpoints])
@pytest.mark.parametrize(
    ("sizes", "times", "words"),
    [
        ([], [], ["0 sizes"]),
        ([4], [1e-3], ["at least 2"]),
        ([4, 16, 8], [1e-3, 2e-3, 3e-3], ["ascend", "8 bytes follows 16"]),
        ([4, 8, 8], [1e-3, 2e-3, 3e-3], ["ascend", "8 bytes follows 8"]),
        ([4, 8], [1e-3, -2e-3], ["above 0"]),
        ([4, 8], [0.0, 2e-3], ["above 0"]),
        ([0, 8], [1e-3, 2e-3], ["above 0"]),
        ([-4, 8], [1e-3, 2e-3], ["above 0"]),
        ([4, 8], [1e-3, float("nan")], ["finite"]),
        ([4, 8], [1e-3, float("inf")], ["finite"]),
        ([4, float("nan")], [1e-3, 2e-3], ["finite"]),
        ([4, 8], [1e-3], ["2 sizes", "1 times"]),
        ([4, 8], [1e-3, 2e-3, 3e-3], ["2 sizes", "3 times"]),
    ],
)
def test_an_unusable_curve_is_refused(make, sizes, times, words):
    with refused(*words):
        make(sizes, times)


def test_times_that_do_not_grow_with_the_size_have_no_bandwidth():
    for make in (AlphaBeta.fit, AlphaBeta.from_endpoints):
        with refused("no bandwidth"):
            make([4, 8, 16], [3e-3, 2e-3, 1e-3])


@pytest.mark.parametrize(
    ("alpha", "beta"), [(-1e-6, 1e9), (1e-6, 0), (1e-6, -1e9), (float("nan"), 1e9)]
)
def test_a_negative_latency_or_no_bandwidth_is_refused(alpha, beta):
    with refused("α", "β"):
        AlphaBeta(alpha, beta)
