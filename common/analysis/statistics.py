"""Estimates the standard error of a median."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

MOST_NOISE = 0.015
"""Standard error of a measured median up to which it judges a prediction."""
LEAST_ROUNDS = 4
"""Of fewer, draws with replacement say too little of the spread."""


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
