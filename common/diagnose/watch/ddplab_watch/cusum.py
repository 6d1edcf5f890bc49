"""How much speaks for a growth of a series whose noise nobody knows.

A value is ranked among those of up to ``HISTORY`` values before it: while nothing changes, any rank
is as likely as another, whatever the noise is distributed like (Bhattacharya and Frierson, A
nonparametric control chart for detecting small disorders, Annals of Statistics 9, 1981). A rank
becomes a normal score z, and S = max(0, S + z − k) adds up what lies above the usual (Page's
CUSUM). Values join the history when S has come back to 0.

By Siegmund's approximation, S of independent scores crosses a limit h once in (e^x − 1 − x) / 2k²
values, with x = 2k(h + 1.166) (Siegmund, Sequential Analysis, 1985). Where scores that follow each
other have a correlation ρ, their sum varies by λ² = (1 + ρ)/(1 − ρ) more, and the limit is λ²h.

On a shared machine times go up and down as others come and go, which no formula bounds. So
``Levels`` keeps what a series has been at, for how long: a level that it had before is no news.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left, bisect_right, insort
from collections import deque
from itertools import pairwise

HISTORY, LEAST_HISTORY = 240, 20
"""Most values that a value is ranked among, and fewest."""
ALLOWANCE = 1.0
"""k, in standard deviations."""
MOST_SUSPECTS = 60
"""So many values at a new level without an alarm are the usual level."""
USUAL_CORRELATION, USUAL_PAIRS, MOST_CORRELATION = 0.5, 20, 0.8
"""What ρ is taken for before anything is known, with the weight of how many pairs, and its most."""
RISING = 0.8
"""Share of the values that are more than the one before, in what keeps rising."""
LENGTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Blocks of the stretches whose levels are kept."""
_NORMAL = statistics.NormalDist()


def limit(values_per_alarm: float) -> float:
    """Returns h, which S of independent scores crosses once in so many values."""
    return math.log(2 * ALLOWANCE**2 * values_per_alarm) / (2 * ALLOWANCE) - 1.166


class Levels:
    """Keeps the highest level that a series was at for so many steps; a level is a median."""

    def __init__(self) -> None:
        self._highest: dict[int, float] = {}
        """Highest level of stretches, by their steps."""
        self._newest: deque[float] = deque(maxlen=LENGTHS[-1])
        self._count = 0

    def add(self, value: float, steps: int) -> None:
        """Adds the value of a block of so many steps, as many as those before have.

        Stretches of blocks begin half their length apart.
        """
        self._newest.append(value)
        self._count += 1
        newest = [*self._newest]
        for length in LENGTHS:
            if self._count >= length and self._count % max(1, length // 2) == 0:
                self._raise(length * steps, statistics.median(newest[-length:]))

    def _raise(self, steps: int, level: float) -> None:
        self._highest[steps] = max(self._highest.get(steps, -math.inf), level)

    def raise_to(self, levels: Levels) -> None:
        """Adds levels of the same series."""
        for steps, level in levels._highest.items():
            self._raise(steps, level)

    def highest(self, steps: int) -> float:
        """Returns the highest level of stretches of so many steps, and of all longer ones.

        Where there are none of exactly so many, the next shorter ones count, too. Minus infinity
        if there are none at all.
        """
        shorter = (length for length in self._highest if length <= steps)
        shortest = max(shorter, default=steps)
        return max((v for n, v in self._highest.items() if n >= shortest), default=-math.inf)


class Series:
    """Values of a series, and how much speaks for a growth.

    Args:
        steps: steps of a block.
        earlier: levels that the run had before the first value.
    """

    def __init__(self, steps: int, earlier: Levels) -> None:
        self.steps, self.earlier, self.levels = steps, earlier, Levels()
        self.evidence = 0.0
        """S, which is 0 where nothing speaks for a growth."""
        self.suspects: list[float] = []
        """Values since S was 0."""
        self.history: deque[float] = deque()
        self._ordered: list[float] = []
        self._scores: list[float] = []
        """Scores of the suspects, after the newest of those before: a change is no correlation."""
        self._products, self._pairs = USUAL_PAIRS * USUAL_CORRELATION, float(USUAL_PAIRS)

    def add(self, value: float) -> None:
        """Ranks a block's value among those of the history."""
        count = len(self._ordered)
        if count >= LEAST_HISTORY:
            below, upto = (f(self._ordered, value) for f in (bisect_left, bisect_right))
            score = _NORMAL.inv_cdf(((below + upto) / 2 + 0.5) / (count + 1))
            self._scores.append(score)
            self.evidence = max(0.0, self.evidence + score - ALLOWANCE)
        self.suspects.append(value)
        if not self.evidence or len(self.suspects) > MOST_SUSPECTS:
            self._become_usual()

    def _become_usual(self) -> None:
        for value in self.suspects:
            if len(self.history) == HISTORY:
                oldest = self.history.popleft()
                del self._ordered[bisect_left(self._ordered, oldest)]
            self.history.append(value)
            self.levels.add(value, self.steps)
            insort(self._ordered, value)
        for first, second in pairwise(self._scores):
            keep = 1 - 1 / HISTORY
            self._products = keep * self._products + first * second
            self._pairs = keep * self._pairs + 1
        self.evidence, self.suspects, self._scores = 0.0, [], self._scores[-1:]

    @property
    def variance(self) -> float:
        """Returns λ², by which sums of scores vary more than those of independent ones."""
        correlation = min(max(self._products / self._pairs, 0.0), MOST_CORRELATION)
        return (1 + correlation) / (1 - correlation)

    def is_above(self, least: float) -> bool:
        """Returns True if the suspects' level is above any that the series had for as long.

        It is also above those before its first value by ``least``.
        """
        level, steps = statistics.median(self.suspects), len(self.suspects) * self.steps
        return level > self.levels.highest(steps) and level > self.earlier.highest(steps) + least

    def all_levels(self) -> Levels:
        """Returns the levels that the run has had so far."""
        for value in self.suspects:
            self.levels.add(value, self.steps)
        self.earlier.raise_to(self.levels)
        return self.earlier

    def is_rising(self) -> bool:
        """Returns True if most suspects are larger than the one before."""
        rises = sum(b > a for a, b in zip(self.suspects, self.suspects[1:], strict=False))
        return rises >= RISING * (len(self.suspects) - 1)
