"""T(b) as figures have it: the star is a measured cap, b* is one of all caps."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from common.analysis.buckets.choice import near_text
from common.analysis.buckets.figures import bucket_times
from common.analysis.buckets.sweep import BucketSweep, evaluate
from common.perfmodel.collectives import AlphaBeta
from common.perfmodel.ddp.best_cap import BestCap, Candidate
from common.perfmodel.ddp.profile import BackwardProfile
from common.perfmodel.model import DdpModel

MIB = 2**20


@pytest.fixture
def profile() -> BackwardProfile:
    """Makes a profile of eight gradients of 1 MiB, one every 10 ms."""
    names = tuple(f"g{i}" for i in range(8))
    return BackwardProfile(names, np.full(8, MIB), np.arange(1, 9) / 100, 0.08)


def measured(times_ms: dict[float, tuple[float, int]]) -> BucketSweep:
    """Makes a sweep of six rounds: per cap its time and its number of buckets."""
    rows = [
        {
            "bucket_cap_mib": cap,
            "round": round_,
            "iteration": 0,
            "num_buckets": buckets,
            "first_bucket_bytes": MIB * 8 // buckets,
            "last_bucket_bytes": MIB * 8 // buckets,
            "forward_time_ms": 1.0,
            "backward_time_ms": time_ms,
            "step_time_ms": time_ms + 2,
        }
        for cap, (time_ms, buckets) in times_ms.items()
        for round_ in range(6)
    ]
    return BucketSweep(pd.DataFrame(rows), 2)


def drawn(figure, label: str) -> list[float]:
    """Returns where on the axis of caps the marker of that label is."""
    lines = {line.get_label(): line for line in figure.axes[0].get_lines()}
    return [float(x) for name, line in lines.items() if label in name for x in line.get_xdata()]


def test_the_star_is_at_a_measured_cap_and_b_star_is_marked_as_not_measured(profile) -> None:
    # By the model two gradients a bucket are best; 4 MiB and one bucket were measured.
    best = DdpModel(profile, AlphaBeta(0.009, MIB / 0.005)).best_cap()
    assert 1 < best.cap_mib < 2
    sweep = measured({4: (110, 2), 8: (130, 1), 32: (128, 1)})
    figure = bucket_times(best, "made up", sweep=sweep, measured_best_mib=4.0)
    assert drawn(figure, "measured caps, 4 MiB") == [4]
    assert drawn(figure, "not measured") == [best.cap_mib]
    low, high = figure.axes[0].get_xlim()
    assert low < best.cap_mib < 32 < high
    known = measured({1.5: (100, 4), 4: (110, 2)})
    assert drawn(bucket_times(best, "made up", sweep=known), "not measured") == []


def test_the_ring_is_around_the_lowest_point_that_is_drawn(profile) -> None:
    # 8 and 32 are one bucketing: apart, 32 alone would be lower than the measured best.
    best = DdpModel(profile, AlphaBeta(0.009, MIB / 0.005)).best_cap()
    sweep = measured({4: (110, 2), 8: (125, 1), 32: (100, 1)})
    accuracy = evaluate(sweep, {cap: best.predicted_s(cap) for cap in (4, 8, 32)})
    figure = bucket_times(
        best, "made up", sweep=sweep, measured_best_mib=accuracy.measured_best_mib
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
