"""Estimates from samples in rounds: a median's standard error, and whether one setting is faster.

Most noise of a DDP step is per instance, and some comes from a machine that drifts. A round has
one fresh instance of each setting, so the unit of a comparison is the ratio of a round. The
estimate is Hodges and Lehmann's, the median of the means of all pairs (Walsh averages) of the
ratios' logarithms; the interval is that of Wilcoxon's signed-rank test (Hollander and Wolfe,
Nonparametric Statistical Methods, section 3.3). No distribution is assumed but that it is
symmetric. A single stalled round hardly moves the estimate, nor, from twelve rounds on, the
interval.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray

MOST_NOISE = 0.015
"""Standard error of a measured median up to which it judges a prediction."""
LEAST_ROUNDS = 4
"""Least number of rounds: draws with replacement from fewer say too little of the spread."""
CONFIDENCE = 0.95
"""Confidence of an interval; with few rounds it may be less, and ``Gain.confidence`` says how
much."""


def median_standard_error(times: NDArray, *, draws: int = 1000, seed: int = 0) -> float:
    """Returns the standard error of the median of all times, as a fraction of it.

    The standard deviation of medians of as many rounds, drawn with replacement (the bootstrap:
    Efron 1979); what is measured in one round shares the state the machine was in.

    Args:
        times: [rounds, iterations]; NaN where a round has fewer. NaN is returned of fewer than
            LEAST_ROUNDS.
    """
    if len(times) < LEAST_ROUNDS:
        return float("nan")
    generator = np.random.default_rng(seed)
    rounds = generator.integers(len(times), size=(draws, len(times)))
    medians = np.nanmedian(times[rounds].reshape(draws, -1), axis=1)
    return float(medians.std(ddof=1) / np.nanmedian(times))


def instance_times(samples: pd.DataFrame) -> pd.DataFrame:
    """Returns seconds of each instance's step by round (index) and setting (columns).

    A step is as long as its slowest rank's; an instance's is the median of its steps.
    """
    slowest = samples.groupby(["setting", "round", "iteration"])["step_time_ms"].max()
    return slowest.groupby(["round", "setting"]).median().unstack() / 1e3


def all_instance_times(samples: pd.DataFrame) -> pd.DataFrame:
    """Returns ``instance_times`` over all stages; their rounds are numbered one after another."""
    parts = [instance_times(part) for _, part in samples.groupby("stage", sort=False)]
    return pd.concat(parts, ignore_index=True)


def spread(times_s: pd.Series) -> float:
    """Computes the relative spread of one setting's instances: standard deviation over median."""
    return float(times_s.std(ddof=1) / times_s.median())


@dataclass(frozen=True)
class Gain:
    """The share of its time that a step saves.

    Attributes:
        estimate: 0.1 where a step takes nine tenths of the time; negative where it is slower.
        low, high: the interval.
        confidence: how sure the interval is, exactly; with fewer than six rounds below 95 %.
        rounds: how many it rests on.
    """

    estimate: float
    low: float
    high: float
    confidence: float
    rounds: int

    @property
    def is_certain(self) -> bool:
        """Returns True if the whole interval is a gain."""
        return self.low > 0


@dataclass(frozen=True)
class Regret:
    """The cost of a choice: 0.1 where a step takes a tenth longer than the best; with interval."""

    estimate: float
    low: float
    high: float

    @property
    def half_width(self) -> float:
        """Returns half of the interval's width."""
        return (self.high - self.low) / 2


def paired_regret(times: Sequence[float], best_times: Sequence[float]) -> Regret:
    """Estimates by which share ``times`` exceed ``best_times``, a pair for each round; any unit."""
    gain = paired_gain(times, best_times)
    return Regret(-gain.estimate, -gain.high, -gain.low)


def paired_gain(times: Sequence[float], base_times: Sequence[float]) -> Gain:
    """Estimates the share that ``times`` save of ``base_times``, a pair for each round; any unit.

    Sources: Hodges and Lehmann's estimate with Wilcoxon's interval (the module's docstring).
    """
    logs = np.log(np.asarray(times, float) / np.asarray(base_times, float))
    # The Walsh averages: means of all pairs of rounds, each round with itself, too. Their median is
    # the estimate; the interval goes from one of them to the one as far from the other end.
    first, second = np.triu_indices(len(logs))
    walsh = np.sort((logs[first] + logs[second]) / 2)
    cut, confidence = _cut(len(logs))
    low, high = walsh[cut], walsh[len(walsh) - 1 - cut]
    # From the logarithm of a ratio to the share that is saved, 1 − ratio; so low and high swap.
    estimate, low_saved, high_saved = -np.expm1([np.median(walsh), high, low])
    return Gain(
        estimate=float(estimate),
        low=float(low_saved),
        high=float(high_saved),
        confidence=confidence,
        rounds=len(logs),
    )


def _cut(count: int) -> tuple[int, float]:
    """Returns the number of Walsh averages to leave out at either end, and the confidence then.

    Under Wilcoxon's hypothesis the sum of the ranks of the positive values has the distribution of
    the sum of a random subset of 1 … n (``count``).
    """
    # subsets[s] counts the subsets of 1 … rank whose sum is s. Each subset exists without the next
    # rank, and with it, where its sum is larger by that rank. As many averages are cut as keep both
    # tails within 1 − CONFIDENCE; where none may be, the interval is that of all averages.
    subsets = np.ones(1)
    for rank in range(1, count + 1):
        with_rank = np.concatenate([np.zeros(rank), subsets])
        subsets = np.concatenate([subsets, np.zeros(rank)]) + with_rank
    below = np.cumsum(subsets) / 2**count
    allowed = np.flatnonzero(2 * below <= 1 - CONFIDENCE + 1e-12)
    cut = int(allowed[-1]) if len(allowed) else 0
    return cut, float(1 - 2 * below[cut])
