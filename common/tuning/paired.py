"""Is one setting faster than another? Times compared within rounds, with an exact interval.

Most noise of a DDP step is per instance, and some comes from a machine that drifts. A round has
one fresh instance of each, so the unit is the ratio of a round. The estimate is Hodges and
Lehmann's, the median of the means of all pairs (Walsh averages) of the ratios' logarithms; the
interval is that of Wilcoxon's signed-rank test (Hollander and Wolfe, Nonparametric Statistical
Methods, section 3.3). No distribution is assumed but that it is symmetric. A single stalled round
hardly moves the estimate, nor, from twelve rounds on, the interval.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

CONFIDENCE = 0.95


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
        """Whether the whole interval is a gain."""
        return self.low > 0


@dataclass(frozen=True)
class Regret:
    """What a choice costs: 0.1 where a step takes a tenth longer than the best; with interval."""

    estimate: float
    low: float
    high: float

    @property
    def half_width(self) -> float:
        """Half of the interval's width."""
        return (self.high - self.low) / 2


def paired_regret(times: Sequence[float], best_times: Sequence[float]) -> Regret:
    """How much longer ``times`` are than ``best_times``, a pair for each round; any unit."""
    gain = paired_gain(times, best_times)
    return Regret(-gain.estimate, -gain.high, -gain.low)


def paired_gain(times: Sequence[float], base_times: Sequence[float]) -> Gain:
    """What ``times`` save of ``base_times``, a pair for each round; any unit."""
    logs = np.log(np.asarray(times, float) / np.asarray(base_times, float))
    first, second = np.triu_indices(len(logs))
    walsh = np.sort((logs[first] + logs[second]) / 2)
    cut, confidence = _cut(len(logs))
    low, high = walsh[cut], walsh[len(walsh) - 1 - cut]
    saved = -np.expm1([np.median(walsh), high, low])
    return Gain(*map(float, saved), confidence, len(logs))


def _cut(count: int) -> tuple[int, float]:
    """How many Walsh averages to leave out at either end, and how sure the interval then is.

    The sum of the ranks of the positive values has the distribution of the sum of a random subset
    of 1 … n.
    """
    subsets = np.ones(1)
    for rank in range(1, count + 1):
        with_rank = np.concatenate([np.zeros(rank), subsets])
        subsets = np.concatenate([subsets, np.zeros(rank)]) + with_rank
    below = np.cumsum(subsets) / 2**count
    allowed = np.flatnonzero(2 * below <= 1 - CONFIDENCE + 1e-12)
    cut = int(allowed[-1]) if len(allowed) else 0
    return cut, float(1 - 2 * below[cut])
