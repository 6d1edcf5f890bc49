"""Paired gains: the exact signed-rank interval, against brute force and SciPy's test."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from scipy import stats

from common.analysis.statistics import paired_gain, paired_regret

RNG = np.random.default_rng(7)


@pytest.mark.parametrize("count", [6, 8, 11])
def test_the_interval_holds_what_the_signed_rank_test_does_not_reject(count):
    base = RNG.uniform(90, 110, count)
    times = base * np.exp(RNG.normal(-0.05, 0.04, count))
    gain = paired_gain(times, base)
    logs = np.log(times / base)

    def rejected(saved: float) -> bool:
        shifted = logs - np.log1p(-saved)
        return stats.wilcoxon(shifted, method="exact").pvalue <= 0.05

    inside, tiny = np.linspace(gain.low, gain.high, 9)[1:-1], 1e-6
    assert not any(rejected(saved) for saved in inside)
    assert rejected(gain.low - tiny)
    assert rejected(gain.high + tiny)


@pytest.mark.parametrize("count", [3, 5, 6, 7, 9])
def test_the_confidence_is_exact(count):
    # All signs are equally likely where nothing differs: count those whose interval holds zero.
    sizes = RNG.uniform(0.01, 0.2, count)
    held = [
        paired_gain(np.exp(sizes * signs), np.ones(count))
        for signs in itertools.product((-1, 1), repeat=count)
    ]
    share = np.mean([gain.low <= 0 <= gain.high for gain in held])
    assert held[0].confidence == pytest.approx(share)
    assert (share >= 0.95) == (count >= 6)


def test_a_gain_is_the_share_of_time_saved():
    gain = paired_gain([80, 80, 80, 80, 80, 80], [100] * 6)
    assert (gain.estimate, gain.low, gain.high) == pytest.approx((0.2, 0.2, 0.2))
    assert gain.is_certain
    assert paired_gain([100] * 6, [80] * 6).estimate == pytest.approx(-0.25)


def test_a_regret_is_what_is_added_to_the_best_time():
    regret = paired_regret([110.0] * 6, [100.0] * 6)
    assert (regret.estimate, regret.low, regret.high) == pytest.approx((0.1, 0.1, 0.1))
    assert paired_regret([80.0] * 6, [100.0] * 6).estimate == pytest.approx(-0.2)
    best = RNG.uniform(90, 110, 8)
    uneven = paired_regret(best * np.exp(RNG.normal(0.1, 0.05, 8)), best)
    assert uneven.low < uneven.estimate < uneven.high


def test_one_stalled_round_changes_little():
    base = np.full(12, 100.0)
    times = np.linspace(89, 91, 12)
    stalled = times.copy()
    stalled[3] = 500
    assert paired_gain(stalled, base).estimate == pytest.approx(
        paired_gain(times, base).estimate, abs=0.01
    )
    assert paired_gain(stalled, base).is_certain
