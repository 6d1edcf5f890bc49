"""Samples in rounds: the order of visits, the time of a step, and intervals of what was measured.

Most noise of a DDP step is per instance, and some comes from a machine that drifts. So arms take
turns in rounds, each round with a fresh instance of each arm, and the unit of an interval is a
round:

- ``paired_ratio``, ``paired_gain`` and ``paired_difference``: what is compared in the same rounds.
  A stalled round makes the interval wide; of ten or more, it hardly moves it.
- ``mean_ratio``: the same of all the time taken, where rounds are of different work.
- ``student`` and ``welch``: intervals of means of two values or more, with normal noise.
- ``widest``: how wide these intervals are, by which a measurement decides whether to go on.
- ``median``: of cases that are no repetitions; ``resampled`` and ``middle``: the bootstrap of any
  other statistic, from ``LEAST_ROUNDS`` on.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Collection, Sequence
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
"""Least number of rounds that anything is said of, and from which resampling shows their spread."""
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

    @property
    def is_told(self) -> bool:
        """Returns True if there are ends, over rounds enough to say them."""
        is_enough = self.rounds is None or self.rounds >= LEAST_ROUNDS
        return is_enough and not math.isnan(self.low)

    def text(self, form: str | Callable[[float], str] = "{:.2f}", unit: str = "round") -> str:
        """Returns the ends in words, or why they are not told.

        Ends of two rounds may reach from nothing to millions.

        >>> Interval(1.0, 0.9, 1.1, rounds=4).text(), Interval(1.0, 0.0, 4e7, rounds=2).text()
        ('0.90 to 1.10', 'not told (2 rounds; 4 are needed)')

        Args:
            form: format of an end.
            unit: what the rounds are; empty where a reader is told beside how many there were.
        """
        if self.is_told:
            words = form if callable(form) else form.format
            return f"{words(self.low)} to {words(self.high)}"
        if self.rounds is None or not unit:
            return "not told"
        plural = "s" * (self.rounds != 1)
        return f"not told ({self.rounds} {unit}{plural}; {LEAST_ROUNDS} are needed)"

    def map(self, function: Callable[[float], float]) -> Interval:
        """Returns the interval of a monotone function of what was estimated."""
        estimate, *ends = (float(function(end)) for end in (self.estimate, self.low, self.high))
        return replace(self, estimate=estimate, low=min(ends), high=max(ends))


def student_quantile(freedom: float, *, claims: int = 1) -> float:
    """Returns how many standard errors either end of an interval is off, by Student's t.

    Args:
        freedom: degrees of freedom.
        claims: number of intervals that hold all at once with ``CONFIDENCE`` (Bonferroni).
    """
    from scipy.special import stdtrit  # ranks import this module for its rounds, without SciPy

    return float(stdtrit(freedom, 1 - (1 - CONFIDENCE) / (2 * claims)))


def student(values: ArrayLike, *, claims: int = 1) -> Interval:
    """Estimates the mean of values, a value for each round, with Student's interval.

    From ten values on, the tenth at either end is trimmed: a stalled round then changes little. NaN
    is left out. Of a single value the ends are NaN, of none the estimate is, too.

    Args:
        values: [rounds].
        claims: number of intervals that hold all at once with ``CONFIDENCE`` (Bonferroni).

    Source: Yuen, The two-sample trimmed t for unequal population variances, Biometrika 61, 1974.
    """
    values = np.sort(np.asarray(values, dtype=float))
    values = values[~np.isnan(values)]
    count = len(values)
    cut = count // 10
    kept = values[cut : count - cut]
    estimate = float(kept.mean()) if count else np.nan
    off = np.nan
    if count > 1:
        # The deviation is of all values, the trimmed ones moved to the ends of those that are kept.
        deviation = float(np.clip(values, kept[0], kept[-1]).std(ddof=1))
        quantile = student_quantile(len(kept) - 1, claims=claims)
        off = quantile * deviation * np.sqrt(count) / len(kept)
    return Interval(estimate, estimate - off, estimate + off, rounds=count)


def welch(first: ArrayLike, second: ArrayLike, *, claims: int = 1) -> Interval:
    """Estimates the difference of two means, of at least two values each, with Welch's interval.

    Args:
        first, second: [rounds]; they need not be as many.
        claims: number of intervals that hold all at once with ``CONFIDENCE`` (Bonferroni).
    """
    from scipy import stats

    with warnings.catch_warnings(action="ignore"):  # likewise
        test = stats.ttest_ind(first, second, equal_var=False)
    low, high = test.confidence_interval(1 - (1 - CONFIDENCE) / claims)
    rounds = min(len(first), len(second))
    difference = float(np.mean(first) - np.mean(second))
    return Interval(difference, float(low), float(high), rounds=rounds)


def paired_ratio(times: ArrayLike, base_times: ArrayLike, *, claims: int = 1) -> Interval:
    """Estimates the ratio of ``times`` to ``base_times``, a pair for each round; any unit.

    What makes a round slow is slow for both, and cancels. The estimate is the geometric mean of the
    rounds' ratios, with the interval of their logarithms (``student``). Rounds with a NaN are left
    out.

    Args:
        times, base_times: [rounds].
        claims: number of intervals that hold all at once with ``CONFIDENCE`` (Bonferroni).
    """
    logs = np.log(np.asarray(times, dtype=float) / np.asarray(base_times, dtype=float))
    return student(logs, claims=claims).map(np.exp)


def widest(times: pd.DataFrame) -> float:
    """Returns how well arms are told apart: the widest half-width of their ratios.

    The ratios are those to the fastest arm's time, an interval for each; half-widths are those of
    logarithms, relative where they are small. Of a single arm it is that of its time. Arms that the
    last round lacks are not measured any more, and left out. Infinite without an interval.

    Args:
        times: a row per round, a column per arm (``per_round``); any unit.
    """
    logs = np.log(times.loc[:, times.iloc[-1].notna()].to_numpy()) if len(times) else np.empty(0)
    if not logs.size:
        return float("inf")
    fastest = int(np.nanmean(logs, axis=0).argmin())
    ratios = logs - logs[:, [fastest]] if logs.shape[1] > 1 else logs
    arms = [arm for arm in range(logs.shape[1]) if arm != fastest] or [fastest]
    half_width = max(student(ratios[:, arm]).half_width for arm in arms)
    return half_width if half_width >= 0 else float("inf")


def mean_ratio(times: ArrayLike, base_times: ArrayLike, *, claims: int = 1) -> Interval:
    """Estimates the ratio of the mean of ``times`` to that of ``base_times``, a pair each round.

    It is for rounds of different work, such as global batches: a long one counts for more, as it
    does in training, and none is trimmed. Rounds with a NaN are left out.

    Args:
        times, base_times: [rounds], in one unit.
        claims: number of intervals that hold all at once with ``CONFIDENCE`` (Bonferroni).

    Source: Cochran, Sampling Techniques, 3rd edition, chapter 6 (ratio estimators), 1977.
    """
    pairs = np.array([times, base_times], dtype=float)
    pairs = pairs[:, ~np.isnan(pairs).any(axis=0)]
    count = pairs.shape[1]
    if not count:
        return Interval(np.nan, np.nan, np.nan, rounds=0)
    means = pairs.mean(axis=1, keepdims=True)
    center = float(np.log(means[0, 0] / means[1, 0]))
    off = np.nan
    if count > 1:
        deviation = float(np.subtract(*(pairs / means)).std(ddof=1))
        off = student_quantile(count - 1, claims=claims) * deviation / np.sqrt(count)
    return Interval(center, center - off, center + off, rounds=count).map(np.exp)


def paired_gain(times: ArrayLike, base_times: ArrayLike, *, claims: int = 1) -> Interval:
    """Estimates the share that ``times`` save of ``base_times``: 0.1 where a tenth is saved."""
    return paired_ratio(times, base_times, claims=claims).map(lambda ratio: 1 - ratio)


def paired_difference(values: ArrayLike, base: ArrayLike, *, claims: int = 1) -> Interval:
    """Estimates how far ``values`` lie above ``base``, a pair for each round; any unit."""
    return student(np.subtract(values, base), claims=claims)


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


def median(values: ArrayLike) -> Interval:
    """Estimates the median of independent cases, with the interval of the bootstrap over them.

    Ends lie on a value, as there is nothing between a number and infinity.
    """
    low, high = middle(np.median(resampled(values), axis=1), method="inverted_cdf")
    return Interval(float(np.median(values)), float(low), float(high), rounds=len(values))


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
