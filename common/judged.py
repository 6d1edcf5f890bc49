"""What may be said of a measurement: an estimate with its interval, and a verdict.

Everything that is called faster, slower or best is judged here, from medians of rounds
(``samples.per_round``), and every number that a reader meets comes with the verdict:

- *settled*: the interval does not hold the value of two things that do not differ;
- *hidden by noise*: it does;
- *not settled*: there were too few rounds to say either;
- *disturbed*: the machine had other work meanwhile, so the rounds are no repetitions;
- *not measured*.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np
import pandas as pd

from common.samples import LEAST_ROUNDS, Interval, paired_ratio, student_quantile

QUIET, DRIFTING, DISTURBED = "quiet", "drifting", "disturbed"
NOT_WITNESSED = "not witnessed"
"""States of the machine during a measurement; the last one where nothing watched it."""
MOST_ROUNDS = 200
"""Number of rounds above which a difference is called too small to be settled."""
FIRST_PAGE_ROUNDS = 6
"""Least number of rounds behind a number that goes to a first page."""


class Verdict(StrEnum):
    """What a number is worth."""

    SETTLED = "settled"
    HIDDEN = "hidden by noise"
    OPEN = "not settled"
    DISTURBED = "disturbed"
    NOT_MEASURED = "not measured"


@dataclass(frozen=True)
class Judged:
    """A number with all that decides whether it may be said.

    Attributes:
        interval: estimate, interval and number of rounds.
        null: the value where nothing differs: 1 for a ratio, 0 for a gain; None for a level, such
            as tokens per second, which is not compared with anything.
        scope: what it was measured of: model and gradient bytes, ranks, network, precision.
        machine: state of the machine: QUIET, DRIFTING, DISTURBED or NOT_WITNESSED.
        least_rounds: number of rounds below which nothing is settled.
    """

    interval: Interval
    null: float | None = 1.0
    scope: str = ""
    machine: str = NOT_WITNESSED
    least_rounds: int = LEAST_ROUNDS

    @property
    def estimate(self) -> float:
        """Returns the estimate; NaN where nothing was measured."""
        return self.interval.estimate

    @property
    def rounds(self) -> int:
        """Returns the number of rounds that the interval rests on."""
        return self.interval.rounds or 0

    @property
    def verdict(self) -> Verdict:
        """Returns what the number is worth."""
        if math.isnan(self.estimate):
            return Verdict.NOT_MEASURED
        if self.machine == DISTURBED:
            return Verdict.DISTURBED
        if self.rounds < self.least_rounds:
            return Verdict.OPEN
        low, high = self.interval.low, self.interval.high
        is_hidden = math.isnan(low) or (self.null is not None and low <= self.null <= high)
        return Verdict.HIDDEN if is_hidden else Verdict.SETTLED

    @property
    def is_settled(self) -> bool:
        """Returns True if the number may be said."""
        return self.verdict is Verdict.SETTLED

    @property
    def reason(self) -> str:
        """Returns why the number is not settled, in words; empty where it is."""
        match self.verdict:
            case Verdict.SETTLED:
                return ""
            case Verdict.NOT_MEASURED:
                return "not measured"
            case Verdict.DISTURBED:
                return "the machine had other work meanwhile"
            case Verdict.OPEN:
                more = (self.rounds_to_settle or self.least_rounds) - self.rounds
                return f"{more} more round{'s' * (more != 1)}"
        return f"within noise over {self.rounds} rounds"

    @property
    def said(self) -> str:
        """Returns the verdict; where only rounds lack, with how many more."""
        return f"{self.verdict}: {self.reason}" if self.verdict is Verdict.OPEN else self.verdict

    @property
    def difference(self) -> Interval:
        """Returns how far the number is from ``null``, where nothing differs, with its interval."""
        return self.interval.map(lambda value: value - self.null)

    def map(self, function: Callable[[float], float], **changed: object) -> Judged:
        """Returns a monotone function of the number; ``changed`` are fields, such as ``null``."""
        return replace(self, interval=self.interval.map(function), **changed)

    def change(self, unit: str = "round") -> str:
        """Returns the difference in per cent, as the verdict lets it be told.

        A settled one has an estimate, one that is hidden by noise the ends that it lies between;
        of any other it is empty.

        Args:
            unit: what the rounds are.
        """
        ends = self.difference.text("{:+.1%}", unit)
        if self.is_settled:
            return f"{self.difference.estimate:+.1%} ({ends})"
        return ends if self.verdict is Verdict.HIDDEN else ""

    @property
    def rounds_to_settle(self) -> int | None:
        """Returns about how many rounds would settle the number if the estimate is right.

        None where it is settled or its interval is not told, or where more than ``MOST_ROUNDS``
        would be needed.
        """
        half_width = self.interval.half_width if self.interval.is_told else 0.0
        if self.is_settled or self.null is None or not half_width > 0:
            return None
        # The half-width is a quantile times the deviation of a round over the root of the rounds.
        # Intervals of ratios are those of logarithms, about the same where they are narrow.
        difference = abs(self.estimate - self.null)
        deviation = half_width * math.sqrt(self.rounds) / student_quantile(self.rounds - 1)
        for rounds in range(max(self.rounds + 1, self.least_rounds), MOST_ROUNDS + 1):
            if student_quantile(rounds - 1) * deviation / math.sqrt(rounds) < difference:
                return rounds
        return None


@dataclass(frozen=True)
class Fastest:
    """Which of several arms takes the least time.

    Attributes:
        arm: the arm that looks fastest.
        rival: the arm that is told from it the least.
        lead: the rival's time over the fastest's; settled only where every other arm is slower.
        tied: arms that are not told from the fastest, itself among them, in the table's order.
    """

    arm: Hashable
    rival: Hashable
    lead: Judged
    tied: tuple[Hashable, ...]


def compared(
    times: pd.DataFrame,
    base: Hashable,
    *,
    claims: int | None = None,
    ratio: Callable[..., Interval] = paired_ratio,
    **known: object,
) -> dict[Hashable, Judged]:
    """Judges each arm's time over that of one arm.

    Args:
        times: a row per round, a column per arm (``samples.per_round``); any unit.
        base: the arm that the others are compared with.
        claims: number of comparisons that a reader is shown together, whose intervals hold all at
            once; by default as many as there are other arms.
        ratio: the estimator: ``samples.paired_ratio`` or ``samples.mean_ratio``.
        known: further fields of ``Judged``.

    Returns:
        The ratios by arm, without the base.
    """
    others = [arm for arm in times.columns if not _same(arm, base)]
    count = max(1, len(others)) if claims is None else claims
    base_times = times[base]
    return {arm: Judged(ratio(times[arm], base_times, claims=count), **known) for arm in others}


def fastest(
    times: pd.DataFrame,
    *,
    claims: int = 1,
    ratio: Callable[..., Interval] = paired_ratio,
    **known: object,
) -> Fastest | None:
    """Finds the fastest arm, and whether it is told from every other one.

    The arm that looks best is compared with each other arm, by default at the confidence of a
    single comparison. To name the best of one table that is enough: it is called best only if it
    beats all of them, and where arms are equal this happens by chance in at most 5 % of tables,
    whatever their number (Gutmann and Maymin, Is the selected population the best?, Annals of
    Statistics 15, 1987).

    Args:
        times: a row per round, a column per arm; any unit.
        claims: number of comparisons that hold all at once. Where a reader is also shown which arms
            are slower than the best, that is all pairs: any of them could have been shown.
        ratio: the estimator, as in ``compared``.
        known: further fields of ``Judged``.

    Returns:
        None where fewer than two arms were measured.
    """
    times = times.dropna(axis=1, how="all")
    if times.shape[1] < 2:
        return None
    # Rounds that lack an arm would favour arms that were visited in fast rounds only.
    whole = times.dropna() if len(times.dropna()) else times
    arm = whole.apply(lambda column: ratio(column, np.ones(len(column))).estimate).idxmin()
    against = compared(times, arm, claims=claims, ratio=ratio, **known)
    rival = min(against, key=lambda other: (_low(against[other]), against[other].estimate))
    over = iter(against.items())  # in the table's order; NaN is no key that could be looked up
    of_arms = [(arm, None) if _same(name, arm) else next(over) for name in times.columns]
    tied = [name for name, ratio in of_arms if ratio is None or not ratio.is_settled]
    return Fastest(arm, rival, against[rival], tuple(tied))


def rival_of(times: pd.DataFrame, arm: Hashable, **how: object) -> Judged | None:
    """Judges the time of an arm's closest rival over that of the arm; None of a single arm.

    That is the one that is told the most to be faster. The arm was chosen before anything was
    measured, so all others are held against it at once: where none differs, one is told to be
    faster in at most 5 % of tables.

    Args:
        times: a row per round, a column per arm; any unit.
        arm: the arm that was chosen.
        how: further arguments of ``compared``.
    """
    ratios = compared(times, arm, **how).values()
    return min(ratios, key=lambda ratio: (_high(ratio), ratio.estimate), default=None)


def _high(judged: Judged) -> float:
    """Returns the upper end; above all others where there is none."""
    return math.inf if math.isnan(judged.interval.high) else judged.interval.high


def _low(judged: Judged) -> float:
    """Returns the lower end; below all others where there is none."""
    return -math.inf if math.isnan(judged.interval.low) else judged.interval.low


def _same(first: Hashable, second: Hashable) -> bool:
    """Returns True for one arm; NaN, the cap of DDP's default, is one as well."""
    return first == second or (first != first and second != second)
