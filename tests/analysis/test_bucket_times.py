"""T(b) as figures have it: the star is a measured cap, b* is one of all caps, and DDP's default is
shown beside the caps, with what a cap gains over it by round."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats
from sweep_support import MIB, bucket_sweep

from common.analysis.buckets.choice import default_facts, gain_text, near_text
from common.analysis.buckets.figures import bucket_times
from common.analysis.buckets.sweep import DEFAULT_NAME, BucketSweep
from common.perfmodel.collectives import AlphaBeta
from common.perfmodel.ddp.best_cap import BestCap, Candidate
from common.perfmodel.ddp.profile import BackwardProfile
from common.perfmodel.model import DdpModel

EIGHT = BackwardProfile(
    tuple("abcdefgh"), np.full(8, MIB), ready_s=np.arange(1, 9) / 100, backward_s=0.08
)
"""Eight gradients of 1 MiB, one every 10 ms; by the model two of them a bucket are best."""
BEST = DdpModel(EIGHT, AlphaBeta(0.009, MIB / 0.005)).best_cap()


def measured(times_ms: dict[float, tuple[float, int]]) -> BucketSweep:
    """Makes a sweep of six rounds: per cap its time and its number of buckets."""
    rounds = {cap: [time_ms] * 6 for cap, (time_ms, _) in times_ms.items()}
    return bucket_sweep(rounds, {cap: buckets for cap, (_, buckets) in times_ms.items()})


def drawn(figure, label: str) -> list[float]:
    """Returns where on the axis of caps the marker of that label is."""
    lines = {line.get_label(): line for line in figure.axes[0].get_lines()}
    return [float(x) for name, line in lines.items() if label in name for x in line.get_xdata()]


def test_the_star_is_at_a_measured_cap_and_b_star_is_marked_as_not_measured() -> None:
    assert 1 < BEST.cap_mib < 2
    sweep = measured({4: (110, 2), 8: (130, 1), 32: (128, 1)})
    figure = bucket_times(BEST, "made up", sweep=sweep, measured_best_mib=4.0)
    assert drawn(figure, "measured caps, 4 MiB") == [4]
    assert drawn(figure, "not measured") == [BEST.cap_mib]
    low, high = figure.axes[0].get_xlim()
    assert low < BEST.cap_mib < 32 < high
    known = measured({1.5: (100, 4), 4: (110, 2)})
    assert drawn(bucket_times(BEST, "made up", sweep=known), "not measured") == []


def test_the_ring_is_around_the_lowest_point_that_is_drawn() -> None:
    # 8 and 32 are one bucketing: apart, 32 alone would be lower than the measured best.
    sweep = measured({4: (110, 2), 8: (125, 1), 32: (100, 1)})
    accuracy = sweep.accuracy_of(BEST.predicted_s)
    figure = bucket_times(
        BEST, "made up", sweep=sweep, measured_best_mib=accuracy.measured_best_mib
    )
    containers = {c.get_label(): c for c in figure.axes[0].containers}
    points = containers["measured (median, quartiles)"].lines[0]
    caps, times = np.asarray(points.get_xdata()), np.asarray(points.get_ydata())
    assert caps.tolist() == [4, 8]
    assert caps[times.argmin()] == accuracy.measured_best_mib == 4


def found(*totals_s: float) -> BestCap:
    """Makes a search: bucketings of the caps from 1 to 2, 2 to 3, … MiB; the last is one bucket."""
    candidates = tuple(
        Candidate(low + 1e-6, low + 1.0, len(totals_s) - place, total, 0.0)
        for place, (low, total) in enumerate(zip(range(1, 9), totals_s, strict=False))
    )
    near = tuple((c.low_mib, c.high_mib) for c in candidates if c.total_s <= min(totals_s) * 1.01)
    best = min(candidates, key=lambda c: c.total_s)
    return BestCap(best.high_mib, best.total_s, near, candidates)


def test_every_interval_of_good_caps_is_told_and_one_bucket_has_no_end() -> None:
    assert near_text(found(1.0, 2.0, 1.005, 2.0)) == "1 to 2, or 3 to 4 MiB"
    assert near_text(found(1.0, 2.0, 3.0, 1.0)) == "1 to 2, or 4 and more MiB"
    assert near_text(found(2.0, 1.0, 1.0, 2.0)) == "2 to 4 MiB"  # they touch
    many = found(1.0, 2.0, 1.0, 2.0, 1.0, 2.0, 1.0, 2.0)
    assert near_text(many) == "1 to 2, 3 to 4, 5 to 6, or 7 to 8 MiB"


# The default


FOUR, TWO = {1.0: 4}, {1.0: 4, None: 2}
BOTH = bucket_sweep({1.0: (80, 45, 60), None: (100, 50, 120)}, TWO, iterations=2)
ALONE = bucket_sweep({1.0: (80, 45, 60)}, FOUR)
FOUR_GRADIENTS = DdpModel(
    BackwardProfile(tuple("abcd"), np.full(4, MIB), np.arange(1, 5) / 100, 0.04),
    AlphaBeta(0.001, MIB / 0.002),
)


def test_a_gain_is_taken_within_a_round():
    # 20 of 100, 5 of 50 and 60 of 120 ms. Of the medians, 60 and 100, it would be 40 %.
    gain = BOTH.gain_over_default(1.0)
    assert gain.estimate == pytest.approx(1 - (0.8 * 0.9 * 0.5) ** (1 / 3))
    logs = np.log([0.8, 0.9, 0.5])
    _, high = stats.ttest_1samp(logs, 0).confidence_interval(0.95)
    assert gain.interval.low == pytest.approx(1 - np.exp(high))
    # Of three rounds no interval is told.
    assert gain_text(gain) == "28.9%: not settled: 3 more rounds"


def test_a_gain_over_six_rounds_is_settled_and_one_of_a_single_round_has_no_interval():
    shares = [0.8, 0.82, 0.78, 0.79, 0.81, 0.8]
    six = bucket_sweep({1.0: 100 * np.array(shares), None: [100] * 6}, TWO)
    low, high = stats.ttest_1samp(np.log(shares), 0).confidence_interval(0.95)
    ends = f"({1 - np.exp(high):.1%} to {1 - np.exp(low):.1%})"
    assert gain_text(six.gain_over_default(1.0)) == f"20.0% {ends}"
    one = bucket_sweep({1.0: [80], None: [100]}, TWO).gain_over_default(1.0)
    assert gain_text(one) == "20.0%: not settled: 5 more rounds"


def test_without_the_default_there_is_no_gain_and_no_row():
    assert ALONE.default() is None
    assert gain_text(ALONE.gain_over_default(1.0)) == "not measured"
    accuracy = ALONE.accuracy_of(lambda cap: 0.05)
    assert default_facts(FOUR_GRADIENTS, ALONE, accuracy) == {
        DEFAULT_NAME: "not measured in this run"
    }


def test_the_defaults_row_is_its_own_and_has_its_prediction():
    accuracy = BOTH.accuracy_of(lambda cap: 0.05)
    found = default_facts(FOUR_GRADIENTS, BOTH, accuracy)
    assert found[f"{DEFAULT_NAME}, measured"] == "100.0 ms"
    assert found["its buckets"] == "2"
    # Gradients of 1 MiB, 10 ms apart: the first bucket has one, the other three, and nothing
    # is left to compute when it is ready at 40 ms. Then 1 + 3 · 2 ms.
    assert found["its T(b), predicted"] == "47.0 ms"
    assert found["predicted against measured"] == "-53.0%"
    assert found["gain of 1 MiB over it, by rounds"] == gain_text(BOTH.gain_over_default(1.0))
    assert not any("nan" in text for text in (*found, *found.values()))
    assert list(accuracy.table["bucket_cap_mib"]) == [1.0]


@pytest.mark.parametrize("measured", [BOTH, ALONE])
def test_the_figure_has_a_line_for_the_default_where_there_is_one(measured):
    figure = bucket_times(
        FOUR_GRADIENTS.best_cap(), "made up", sweep=measured, measured_best_mib=1.0
    )
    lines = {line.get_label(): line for line in figure.axes[0].get_lines()}
    found = [list(line.get_ydata()) for label, line in lines.items() if DEFAULT_NAME in label]
    assert found == ([[100, 100]] if measured is BOTH else [])
