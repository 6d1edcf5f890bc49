"""Student's interval of a geometric mean, by SciPy's own test."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike
from scipy import stats


def students_interval(ratios: ArrayLike, claims: int = 1) -> list[float]:
    """Returns the geometric mean, and the interval of its logarithm."""
    logs = np.log(np.asarray(ratios))
    ends = stats.ttest_1samp(logs, 0).confidence_interval(1 - 0.05 / claims)
    return [float(np.exp(value)) for value in (logs.mean(), *ends)]
