"""Which ranks are slower than others: from what their steps took, against what they should take."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from common.scheduling.cost import CalibratedCost

TOLERANCE = 0.1
"""Ranks whose speeds differ by less are taken to be alike: a shared machine varies by as much."""
WINDOW = 10
"""Newest steps that a rank's speed is judged by."""


def alike(values: Sequence[float], tolerance: float = TOLERANCE) -> list[float]:
    """The values, with those that are within ``tolerance`` of each other made equal.

    From the smallest on, each value joins the group of the one before as long as it is within the
    tolerance of the group's first; a group becomes its geometric mean.
    """
    order = np.argsort(values, kind="stable")
    groups: list[list[int]] = []
    for index in order:
        if groups and values[index] <= values[groups[-1][0]] * (1 + tolerance):
            groups[-1].append(int(index))
        else:
            groups.append([int(index)])
    merged = [0.0] * len(values)
    for group in groups:
        mean = float(np.exp(np.mean(np.log([values[index] for index in group]))))
        for index in group:
            merged[index] = mean
    return merged


class RankCosts:
    """The cost of each rank: calibrated at the start, corrected by the steps that follow.

    Every rank keeps one and updates it with the same ratios at the same step, so that all make the
    same plans.

    Args:
        calibrated: what was fitted on each rank, in rank order.
        sizes: (batch size, longest) pairs by which ranks are compared.
        tolerance: ranks that differ by less are taken to be alike.
    """

    def __init__(
        self,
        calibrated: Sequence[CalibratedCost],
        sizes: Sequence[tuple[int, int]],
        tolerance: float = TOLERANCE,
    ) -> None:
        self.tolerance = tolerance
        batch_size, longest = np.transpose(sizes)
        times_s = [cost(batch_size, longest) for cost in calibrated]
        typical_s = np.exp(np.mean(np.log(times_s), axis=0))
        self.base = CalibratedCost.fit(batch_size, longest, typical_s)
        """Of a rank of medium speed."""
        self.factors = alike([float(np.median(own / typical_s)) for own in times_s], tolerance)
        """How many times as long each rank takes."""
        self._ratios: deque[float] = deque(maxlen=WINDOW)

    @property
    def costs(self) -> list[CalibratedCost]:
        """One per rank; ranks that are alike have equal ones."""
        return [self.base.scaled(factor) for factor in self.factors]

    def note(self, batch_size: int, longest: int, measured_s: float) -> None:
        """What this rank's forward and backward pass of so many samples took."""
        self._ratios.append(measured_s / float(self.base(batch_size, longest)))

    @property
    def own_ratio(self) -> float:
        """The median of what was noted lately: how many times as long this rank takes."""
        return float(np.median(self._ratios)) if self._ratios else 1.0

    def update(self, ratios: Sequence[float]) -> None:
        """Take over the ``own_ratio`` of every rank, in rank order."""
        self.factors = alike(list(ratios), self.tolerance)
