"""Samples in rounds: the order of visits, the time of a step, and intervals of what was measured.

Most noise of a DDP step is per instance, and some comes from a machine that drifts. So arms take
turns in rounds, each round with a fresh instance of each arm, and the unit of an interval is a
round:

- ``signed_rank`` and ``paired_ratio``: Hodges and Lehmann's estimate with the exact interval of
  Wilcoxon's test. A single stalled round hardly moves the estimate, nor, from twelve rounds on, the
  interval; of fewer than six, the interval is one of less than 95 %.
- ``student`` and ``welch``: intervals of means of two values or more, with normal noise.
- ``resampled`` and ``middle``: the bootstrap of any other statistic, from ``LEAST_ROUNDS`` on.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray

Item = TypeVar("Item")

CONFIDENCE = 0.95
DRAWS = 1000
"""Resamples of a bootstrap: the ends of an interval are then known to a twentieth of half its
width."""
LEAST_ROUNDS = 4
"""Number of rounds from which resampling them shows their spread."""
MOST_NOISE = 0.015
"""Standard error of a measured median up to which it judges a prediction."""


def rotated(items: Collection[Item], round_: int) -> tuple[Item, ...]:
    """Returns the order of a round: rotated by one every two rounds, each second round backwards.

    Over two rounds every item has the same mean position, so a steady drift of the machine
    favours none, and over many no item always follows the same other.
    """
    items = tuple(items)
    shift = round_ // 2 % len(items)
    order = items[shift:] + items[:shift]
    return order[::-1] if round_ % 2 else order


def rotated_rounds(
    items: Collection[Item], rounds: int, *, first: int = 0
) -> Iterator[tuple[int, Item]]:
    """Yields ``(round_, item)`` for the rounds from ``first`` up to ``rounds``, in rotated order.

    Args:
        items: visited once a round, each.
        rounds: the number after the last round's.
        first: the first round's number, below 0 where rounds of warm-up come before.
    """
    for round_ in range(first, rounds):
        for item in rotated(items, round_):
            yield round_, item


def slowest_rank(
    samples: pd.DataFrame, column: str | Sequence[str], by: Sequence[str], *, sort: bool = True
) -> pd.Series | pd.DataFrame:
    """Returns the time of each step (or call): a step takes as long as its slowest rank.

    Args:
        samples: a row per step and rank.
        column: a time, or several.
        by: columns that tell steps apart; NaN in one is a value like others.
        sort: whether steps are ordered by these columns, or as in ``samples``.
    """
    columns = column if isinstance(column, str) else [*column]
    return samples.groupby([*by], sort=sort, dropna=False)[columns].max()


def per_round(
    samples: pd.DataFrame, column: str, arm: str, *, step: Sequence[str] = ("iteration",)
) -> pd.DataFrame:
    """Returns the median step of each round: a row per round, a column per arm.

    Args:
        samples: a row per step and rank.
        column: a time, of which a step's is its slowest rank's.
        arm: the column of ``samples`` that names arms.
        step: columns that tell the steps of an arm's round apart.
    """
    slowest = slowest_rank(samples, column, by=[arm, "round", *step])
    return slowest.groupby(["round", arm], dropna=False).median().unstack(arm)


@dataclass(frozen=True)
class Interval:
    """An estimate with its interval.

    Attributes:
        confidence: the share of such intervals that hold the true value.
        rounds: number of rounds that it rests on, where it is known.
    """

    estimate: float
    low: float
    high: float
    confidence: float = CONFIDENCE
    rounds: int | None = None

    @property
    def half_width(self) -> float:
        """Returns half of the interval's width."""
        return (self.high - self.low) / 2

    def map(self, function: Callable[[float], float]) -> Interval:
        """Returns the interval of a monotone function of what was estimated."""
        estimate, *ends = (float(function(end)) for end in (self.estimate, self.low, self.high))
        return replace(self, estimate=estimate, low=min(ends), high=max(ends))


def student_quantile(freedom: float) -> float:
    """Returns how many standard errors either end of an interval is off, by Student's t."""
    from scipy.special import stdtrit  # ranks import this module for its rounds, without SciPy

    return float(stdtrit(freedom, (1 + CONFIDENCE) / 2))


def student(values: ArrayLike) -> Interval:
    """Estimates the mean of at least two values, with Student's interval."""
    from scipy import stats

    with warnings.catch_warnings(action="ignore"):  # equal values have an interval without width
        low, high = stats.ttest_1samp(values, 0).confidence_interval(CONFIDENCE)
    return Interval(float(np.mean(values)), float(low), float(high))


def welch(first: ArrayLike, second: ArrayLike) -> Interval:
    """Estimates the difference of two means, of at least two values each, with Welch's interval."""
    from scipy import stats

    with warnings.catch_warnings(action="ignore"):  # likewise
        test = stats.ttest_ind(first, second, equal_var=False)
    low, high = test.confidence_interval(CONFIDENCE)
    return Interval(float(np.mean(first) - np.mean(second)), float(low), float(high))


def paired_ratio(times: ArrayLike, base_times: ArrayLike) -> Interval:
    """Estimates the ratio of ``times`` to ``base_times``, a pair for each round; any unit.

    What makes a round slow is slow for both, and cancels.
    """
    logs = np.log(np.asarray(times, dtype=float) / np.asarray(base_times, dtype=float))
    return signed_rank(logs).map(np.exp)


def paired_gain(times: ArrayLike, base_times: ArrayLike) -> Interval:
    """Estimates the share that ``times`` save of ``base_times``: 0.1 where a tenth is saved."""
    return paired_ratio(times, base_times).map(lambda ratio: 1 - ratio)


def signed_rank(values: ArrayLike) -> Interval:
    """Estimates the middle of values, of which is assumed only that they are symmetric around it.

    Sources: Hodges and Lehmann's estimate, the median of the means of all pairs (Walsh averages),
    with Wilcoxon's interval (Hollander and Wolfe, Nonparametric Statistical Methods, section 3.3).
    """
    # Each value is paired with itself, too. The interval goes from one of the averages to the one
    # as far from the other end.
    values = np.asarray(values, dtype=float)
    first, second = np.triu_indices(len(values))
    walsh = np.sort((values[first] + values[second]) / 2)
    cut, confidence = _cut(len(values))
    low, high = float(walsh[cut]), float(walsh[len(walsh) - 1 - cut])
    return Interval(float(np.median(walsh)), low, high, confidence, len(values))


@functools.cache
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
        subsets = np.convolve(subsets, [1.0, *[0.0] * (rank - 1), 1.0])
    below = np.cumsum(subsets) / 2**count
    allowed = np.flatnonzero(2 * below <= 1 - CONFIDENCE + 1e-12)
    cut = int(allowed[-1]) if len(allowed) else 0
    return cut, float(1 - 2 * below[cut])


def resampled(
    values: ArrayLike, *, draws: int = DRAWS, seed: int | np.random.Generator = 0
) -> NDArray:
    """Draws as many rounds as there are with replacement (the bootstrap: Efron 1979).

    What is measured in one round shares the state the machine was in and is drawn together.

    Args:
        values: [rounds, …].
        draws: number of resamples.
        seed: seed of the draws; a generator goes on where it is.

    Returns:
        [draws, rounds, …]; a statistic of each resample is one over the second axis.
    """
    values = np.asarray(values)
    rounds = len(values)
    return values[np.random.default_rng(seed).integers(rounds, size=(draws, rounds))]


def middle(
    draws: ArrayLike, *, axis: int = 0, confidence: float = CONFIDENCE, method: str = "linear"
) -> tuple[NDArray, NDArray]:
    """Returns the ends of the interval that holds the middle ``confidence`` of draws.

    ``method`` says between which draws an end may lie (``numpy.quantile``).
    """
    ends = [(1 - confidence) / 2, (1 + confidence) / 2]
    low, high = np.quantile(draws, ends, axis=axis, method=method)
    return low, high


def median_standard_error(times: NDArray, *, draws: int = DRAWS) -> float:
    """Returns the standard error of the median of all times, as a fraction of it.

    Args:
        times: [rounds, iterations]; NaN where a round has fewer. NaN is returned of fewer than
            LEAST_ROUNDS.
    """
    if len(times) < LEAST_ROUNDS:
        return float("nan")
    medians = np.nanmedian(resampled(times, draws=draws).reshape(draws, -1), axis=1)
    return float(medians.std(ddof=1) / np.nanmedian(times))
