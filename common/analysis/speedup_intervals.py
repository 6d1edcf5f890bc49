"""How far a speedup can be trusted: intervals from repeated runs, or else from a run's epochs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from scipy import stats

DRAWS, CONFIDENCE = 2000, 0.95
FEW = 8
"""From so many values on, a bootstrap is trusted."""
OVER_RUNS, OVER_EPOCHS, NO_INTERVAL = "repeated runs", "epochs", "nothing: a single epoch"


def ratio_interval(base: list[NDArray], other: list[NDArray]) -> tuple[float, float, str]:
    """95 % interval of base time over the other's, and what it is taken over.

    Repeated runs on both sides: Welch's t on the logarithms of the runs' means, since a bootstrap
    of two or three values is far too narrow. Else over epochs, which do not know how much runs
    differ: a bootstrap, or Welch's t where they are few.
    """
    if len(base) > 1 and len(other) > 1:
        return *_welch(
            *([np.log(np.mean(run)) for run in side] for side in (base, other))
        ), OVER_RUNS
    first, second = np.concatenate(base), np.concatenate(other)
    if len(first) < 2 or len(second) < 2:
        return float("nan"), float("nan"), NO_INTERVAL
    if min(len(first), len(second)) < FEW:
        return *_welch(np.log(first), np.log(second)), OVER_EPOCHS
    draw = np.random.default_rng(0)
    means = [
        times[draw.integers(0, len(times), (DRAWS, len(times)))].mean(axis=1)
        for times in (first, second)
    ]
    low, high = np.quantile(means[0] / means[1], [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return float(low), float(high), OVER_EPOCHS


def _welch(base: Sequence[float], other: Sequence[float]) -> tuple[float, float]:
    """Interval of exp(mean(base) − mean(other)) by Welch's t."""
    middle = np.mean(base) - np.mean(other)
    parts = [np.var(side, ddof=1) / len(side) for side in (base, other)]
    if sum(parts) == 0:
        return float(np.exp(middle)), float(np.exp(middle))
    freedom = sum(parts) ** 2 / sum(
        part**2 / (len(side) - 1) for part, side in zip(parts, (base, other), strict=True)
    )
    off = stats.t.ppf((1 + CONFIDENCE) / 2, freedom) * np.sqrt(sum(parts))
    return float(np.exp(middle - off)), float(np.exp(middle + off))
