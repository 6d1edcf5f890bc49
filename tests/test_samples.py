"""Rounds, steps and intervals, against brute force, closed forms and SciPy."""

from __future__ import annotations

import itertools
import math
import warnings

import hypothesis.strategies as st
import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from scipy import stats

from common.samples import (
    CONFIDENCE,
    LEAST_ROUNDS,
    Interval,
    median_standard_error,
    middle,
    paired_gain,
    paired_ratio,
    per_round,
    resampled,
    rotated,
    slowest_rank,
    student,
    welch,
    widest,
)

RNG = np.random.default_rng(7)


@pytest.mark.parametrize("count", [2, 3, 5, 9, 20])
def test_a_steady_drift_favours_no_item_of_the_rounds(count: int) -> None:
    items = tuple(range(count))
    rounds = [rotated(items, round_) for round_ in range(2 * count)]
    assert all(sorted(visited) == list(items) for visited in rounds)
    # Over each pair of rounds the positions of every item add up to the same.
    for there, back in zip(rounds[::2], rounds[1::2], strict=True):
        assert {there.index(item) + back.index(item) for item in items} == {count - 1}
    assert {visited[0] for visited in rounds} == set(items)


@pytest.mark.parametrize("rounds", [2, 5, 12])
def test_the_widest_interval_is_that_of_the_least_known_ratio_to_the_fastest(rounds: int) -> None:
    noise = np.exp(RNG.normal(0, [0.01, 0.02, 0.1], (rounds, 3)))
    times = pd.DataFrame([2.0, 1.0, 3.0] * noise, columns=["a", "b", math.nan])
    ratios = [paired_ratio(times[arm], times["b"]) for arm in ("a", math.nan)]
    assert widest(times) == pytest.approx(
        max(math.log(ratio.high / ratio.low) / 2 for ratio in ratios)
    )
    gone = times.assign(c=[0.1] * (rounds - 1) + [math.nan])  # an arm that is not measured any more
    assert widest(gone) == widest(times)
    assert widest(times[["b"]]) == pytest.approx(student(np.log(times["b"])).half_width)


def test_without_an_interval_the_width_has_no_end() -> None:
    assert widest(pd.DataFrame()) == widest(pd.DataFrame({"a": [1.0], "b": [2.0]})) == math.inf


STEPS = st.lists(
    st.tuples(
        st.sampled_from([1.0, 4.0, math.nan]),  # a cap: NaN is DDP's default
        st.integers(0, 2),
        st.integers(0, 2),
        st.floats(1, 100),
    ),
    min_size=1,
)


def table_of(rows: list[tuple]) -> pd.DataFrame:
    return pd.DataFrame(rows, columns=["cap", "round", "iteration", "time_ms"])


def by_brute_force(rows: list[tuple]) -> dict[tuple, dict[int, float]]:
    """Returns (cap, round) → iteration → the longest time; the default's cap is None."""
    longest: dict[tuple, dict[int, float]] = {}
    for cap, round_, iteration, time_ms in rows:
        steps = longest.setdefault((None if math.isnan(cap) else cap, round_), {})
        steps[iteration] = max(time_ms, steps.get(iteration, 0.0))
    return longest


@given(STEPS)
def test_a_step_takes_as_long_as_its_slowest_rank(rows: list[tuple]) -> None:
    slowest = slowest_rank(table_of(rows), "time_ms", by=["cap", "round", "iteration"])
    found = {
        (None if math.isnan(cap) else cap, round_, iteration): time_ms
        for (cap, round_, iteration), time_ms in slowest.items()
    }
    assert found == {
        (*place, iteration): time_ms
        for place, steps in by_brute_force(rows).items()
        for iteration, time_ms in steps.items()
    }


@given(STEPS)
def test_a_round_has_the_median_of_its_steps_by_arm(rows: list[tuple]) -> None:
    found = per_round(table_of(rows), "time_ms", "cap")
    expected = by_brute_force(rows)
    assert found.notna().sum().sum() == len(expected)
    for (cap, round_), steps in expected.items():
        own = found[np.nan if cap is None else cap]
        assert own[round_] == np.median([*steps.values()])


def test_several_times_are_each_their_slowest_ranks_in_the_order_of_the_table_if_asked() -> None:
    samples = pd.DataFrame({"arm": ["b", "b", "a"], "x": [1, 2, 3], "y": [5, 4, 6]})
    found = slowest_rank(samples, ["x", "y"], by=["arm"], sort=False)
    assert found.reset_index().to_numpy().tolist() == [["b", 2, 5], ["a", 3, 6]]


def test_a_paired_ratio_is_a_mean_of_logarithms_and_a_gain_is_what_it_saves() -> None:
    base = RNG.uniform(90, 110, 8)
    times = base * np.exp(RNG.normal(-0.1, 0.05, 8))
    ratio, gain = paired_ratio(times, base), paired_gain(times, base)
    logs = stats.ttest_1samp(np.log(times / base), 0).confidence_interval(CONFIDENCE)
    assert np.log([ratio.low, ratio.high]) == pytest.approx([*logs])
    assert ratio.estimate == pytest.approx(stats.gmean(times / base))
    assert (gain.estimate, gain.low, gain.high) == pytest.approx(
        (1 - ratio.estimate, 1 - ratio.high, 1 - ratio.low)
    )
    assert ratio.rounds == 8


def test_an_interval_leaves_out_rounds_without_a_value_and_needs_two() -> None:
    assert paired_ratio([2.0, np.nan, 4.0], [1.0, 1.0, 2.0]).rounds == 2
    single = paired_ratio([2.0, np.nan], [1.0, 1.0])
    assert (single.estimate, single.rounds) == (pytest.approx(2), 1)
    assert np.isnan([single.low, single.high]).all()
    assert np.isnan(student([]).estimate)


@pytest.mark.parametrize("claims", [1, 3, 10])
def test_intervals_that_hold_together_are_each_of_more_confidence(claims: int) -> None:
    values = RNG.normal(0, 1, 6)
    found = student(values, claims=claims)
    assert found.estimate == pytest.approx(values.mean())
    expected = stats.ttest_1samp(values, 0).confidence_interval(1 - (1 - CONFIDENCE) / claims)
    assert (found.low, found.high) == pytest.approx([*expected])


@pytest.mark.parametrize("count", [10, 19, 20, 37])
def test_of_many_rounds_the_tenth_at_either_end_is_trimmed(count: int) -> None:
    values = RNG.standard_t(2, count)
    found = student(values)
    cut = (count // 10 + 1e-9) / count  # SciPy rounds the number of trimmed values down as well
    low, high = stats.mstats.trimmed_mean_ci(values, (cut, cut), alpha=1 - CONFIDENCE)
    assert (found.low, found.high) == pytest.approx((float(low), float(high)))
    assert found.estimate == pytest.approx(stats.trim_mean(values, 0.1))


def test_one_stalled_round_changes_little() -> None:
    base, times = np.full(12, 100.0), np.linspace(89, 91, 12)
    stalled = np.where(np.arange(12) == 3, 500, times)
    found = paired_gain(stalled, base)
    assert found.estimate == pytest.approx(paired_gain(times, base).estimate, abs=0.01)
    assert found.low > 0


def test_a_decreasing_function_swaps_the_ends() -> None:
    found = Interval(2.0, 1.0, 4.0, rounds=5).map(lambda time_s: 8 / time_s)
    assert found == Interval(4.0, 2.0, 8.0, rounds=5)
    assert found.half_width == 3.0
    assert math.isnan(Interval(2.0, math.nan, math.nan).map(np.exp).low)


def test_sides_that_vary_alike_have_the_freedom_of_both_and_one_without_noise_adds_none() -> None:
    alike = welch([10, 12], [0, 2])  # variances of 2, so that the squared error is 2/2 + 2/2
    assert (alike.estimate, alike.half_width) == pytest.approx((10, 4.303 * 2**0.5), rel=2e-4)
    known = welch([10, 12, 14], [4, 4])
    assert (known.estimate, known.half_width) == pytest.approx(
        (8, 4.303 * (4 / 3) ** 0.5), rel=2e-4
    )


@pytest.mark.parametrize(("counts", "spreads"), [((3,), (1,)), ((3, 9), (1, 3))])
def test_intervals_of_means_hold_them_in_nineteen_of_twenty(counts, spreads) -> None:
    noise = np.random.default_rng(1)
    held = 0
    for _ in range(1000):
        sides = [noise.normal(0, spread, n) for n, spread in zip(counts, spreads, strict=True)]
        found = student(*sides) if len(sides) == 1 else welch(*sides)
        held += found.low <= 0 <= found.high
    assert held / 1000 == pytest.approx(CONFIDENCE, abs=0.021)  # three standard errors


def test_equal_values_have_an_interval_without_width() -> None:
    with warnings.catch_warnings(action="error"):
        assert welch([3, 3], [1, 1]) == Interval(2.0, 2.0, 2.0, rounds=2)
        assert student([3, 3, 3]) == Interval(3.0, 3.0, 3.0, rounds=3)


def test_the_bootstrap_is_scipys() -> None:
    values = RNG.normal(3, 1, (20, 2))
    draws = resampled(values, draws=4000).mean(axis=1)
    assert draws.shape == (4000, 2)
    expected = stats.bootstrap(
        (values,), np.mean, axis=0, n_resamples=4000, method="percentile", rng=1
    )
    width = expected.confidence_interval.high - expected.confidence_interval.low
    for end, other in zip(middle(draws), expected.confidence_interval, strict=True):
        assert np.abs(end - other) == pytest.approx(0, abs=0.06 * width.max())
    assert draws.std(axis=0) == pytest.approx(expected.standard_error, rel=0.05)


def test_a_round_is_drawn_as_a_whole_and_the_same_seed_draws_the_same() -> None:
    values = np.arange(5)[:, None] * [1, 10]
    draws = resampled(values, draws=50)
    assert (draws[..., 1] == 10 * draws[..., 0]).all()
    assert (draws == resampled(values, draws=50)).all()
    generator = np.random.default_rng(0)
    first, second = (resampled(values, draws=50, seed=generator) for _ in range(2))
    assert (first == draws).all()
    assert (second != draws).any()


def test_the_middle_of_draws_leaves_as_many_at_either_end() -> None:
    assert middle(np.arange(101.0)) == pytest.approx((2.5, 97.5))
    assert middle(np.arange(101.0), confidence=0.9) == pytest.approx((5, 95))
    assert middle([0.0, 1.0, np.inf], method="nearest") == (0.0, np.inf)
    low, high = middle(np.outer([1, 2], np.arange(101.0)), axis=1)
    assert (low, high) == (pytest.approx([2.5, 5]), pytest.approx([97.5, 195]))


def test_the_standard_error_of_a_median_is_that_of_all_draws_of_rounds() -> None:
    times = np.array([[10.0, 11.0], [12.0, 13.0], [9.0, 9.5], [14.0, math.nan]])
    # All 4⁴ ways to draw four rounds.
    medians = [np.nanmedian(times[[*rounds]]) for rounds in itertools.product(range(4), repeat=4)]
    found = median_standard_error(times, draws=4000)
    assert found == pytest.approx(np.std(medians) / np.nanmedian(times), rel=0.05)
    assert math.isnan(median_standard_error(times[: LEAST_ROUNDS - 1]))
