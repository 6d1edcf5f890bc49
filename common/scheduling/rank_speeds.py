"""The relative speeds of ranks: the measured times of their steps over the predicted ones."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from common.scheduling.cost import CalibratedCost

TOLERANCE = 0.1
"""Relative difference below which ranks count as equally fast: a shared machine varies by that."""
WINDOW = 10
"""Number of the newest steps from which a rank's speed is estimated."""


def alike(values: Sequence[float], tolerance: float = TOLERANCE) -> list[float]:
    """Returns the values, with those that are within ``tolerance`` of each other made equal.

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
        calibrated: the cost that was fitted on each rank, in rank order.
        sizes: (batch size, longest) pairs at which ranks are compared.
        tolerance: relative difference below which ranks count as equally fast.
    """

    def __init__(
        self,
        calibrated: Sequence[CalibratedCost],
        sizes: Sequence[tuple[int, int]],
        tolerance: float = TOLERANCE,
    ) -> None:
        self.tolerance = tolerance
        # A typical rank's times are the geometric means over ranks, at each size; one cost is
        # fitted to them. A rank's factor is the median over sizes of its time over the typical one.
        batch_size, longest = np.transpose(sizes)
        times_s = [cost(batch_size, longest) for cost in calibrated]
        typical_s = np.exp(np.mean(np.log(times_s), axis=0))
        self.base = CalibratedCost.fit(batch_size, longest, typical_s)
        """Cost of a rank of typical speed."""
        self.factors = alike(
            [float(np.median(rank_s / typical_s)) for rank_s in times_s], tolerance
        )
        """Time of each rank as a multiple of the typical rank's, in rank order."""
        self._ratios: deque[float] = deque(maxlen=WINDOW)

    @property
    def costs(self) -> list[CalibratedCost]:
        """Returns the cost of each rank; ranks that count as equally fast have equal ones."""
        return [self.base.scaled(factor) for factor in self.factors]

    def note(self, batch_size: int, longest: int, measured_s: float) -> None:
        """Records the time of this rank's forward and backward pass of one micro-batch."""
        self._ratios.append(measured_s / float(self.base(batch_size, longest)))

    @property
    def own_ratio(self) -> float:
        """Returns the median of this rank's recent times over the typical rank's; 1 if none."""
        return float(np.median(self._ratios)) if self._ratios else 1.0

    def update(self, ratios: Sequence[float]) -> None:
        """Sets the factors from the ``own_ratio`` of every rank, in rank order."""
        self.factors = alike(list(ratios), self.tolerance)
