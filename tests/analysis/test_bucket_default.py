"""DDP's default in a sweep: it is shown beside the caps, and what a cap gains over it by round."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from common.analysis.buckets.choice import default_facts, gain_text
from common.analysis.buckets.figures import bucket_times
from common.analysis.buckets.sweep import DEFAULT_NAME, BucketSweep, evaluate
from common.perfmodel.collectives import AlphaBeta
from common.perfmodel.ddp.profile import BackwardProfile
from common.perfmodel.model import DdpModel

MIB = 2**20
MODEL = DdpModel(
    BackwardProfile(tuple("abcd"), np.full(4, MIB), np.arange(1, 5) / 100, 0.04),
    AlphaBeta(0.001, MIB / 0.002),
)


def sweep(times_ms: dict[float | None, tuple[float, ...]], iterations: int = 1) -> BucketSweep:
    """Makes a sweep: by cap (None: the default) a time for each round."""
    rows = [
        {
            "bucket_cap_mib": np.nan if cap is None else cap,
            "round": round_,
            "iteration": iteration,
            "num_buckets": 2 if cap is None else 4,
            "first_bucket_bytes": MIB,
            "last_bucket_bytes": 3 * MIB if cap is None else MIB,
            "forward_time_ms": 1.0,
            "backward_time_ms": time_ms,
            "step_time_ms": time_ms + 2,
        }
        for cap, rounds in times_ms.items()
        for round_, time_ms in enumerate(rounds)
        for iteration in range(iterations)
    ]
    return BucketSweep(pd.DataFrame(rows), 2)


BOTH = sweep({1.0: (80, 45, 60), None: (100, 50, 120)}, iterations=2)
ALONE = sweep({1.0: (80, 45, 60)})


def test_a_gain_is_taken_within_a_round():
    # 20 of 100, 5 of 50 and 60 of 120 ms. Of the medians, 60 and 100, it would be 40 %.
    gain = BOTH.gain_over_default(1.0)
    assert gain.estimate == pytest.approx(1 - (0.8 * 0.9 * 0.5) ** (1 / 3))
    logs = np.log([0.8, 0.9, 0.5])
    _, high = stats.ttest_1samp(logs, 0).confidence_interval(0.95)
    assert gain.interval.low == pytest.approx(1 - np.exp(high))
    assert (
        gain_text(gain) == "28.9%: not settled: 3 more rounds"
    )  # of three rounds no interval is told


def test_a_gain_over_six_rounds_is_settled_and_one_of_a_single_round_has_no_interval():
    shares = [0.8, 0.82, 0.78, 0.79, 0.81, 0.8]
    six = sweep({1.0: tuple(100 * np.array(shares)), None: (100,) * 6})
    low, high = stats.ttest_1samp(np.log(shares), 0).confidence_interval(0.95)
    ends = f"({1 - np.exp(high):.1%} to {1 - np.exp(low):.1%})"
    assert gain_text(six.gain_over_default(1.0)) == f"20.0% {ends}"
    one = sweep({1.0: (80,), None: (100,)}).gain_over_default(1.0)
    assert gain_text(one) == "20.0%: not settled: 5 more rounds"


def test_without_the_default_there_is_no_gain_and_no_row():
    assert ALONE.default() is None
    assert gain_text(ALONE.gain_over_default(1.0)) == "not measured"
    accuracy = evaluate(ALONE, {1.0: 0.05})
    assert default_facts(MODEL, ALONE, accuracy) == {DEFAULT_NAME: "not measured in this run"}


def test_the_defaults_row_is_its_own_and_has_its_prediction():
    accuracy = evaluate(BOTH, {1.0: 0.05})
    found = default_facts(MODEL, BOTH, accuracy)
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
    figure = bucket_times(MODEL.best_cap(), "made up", sweep=measured, measured_best_mib=1.0)
    lines = {line.get_label(): line for line in figure.axes[0].get_lines()}
    found = [list(line.get_ydata()) for label, line in lines.items() if DEFAULT_NAME in label]
    assert found == ([[100, 100]] if measured is BOTH else [])
