"""The time of a training step by batch size, as a straight line."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd
from scipy.optimize import nnls

LEAST_BATCHES = 3
"""Measured batch sizes from which on a line is put through the steps' times."""


@dataclass(frozen=True)
class Saturation:
    """The time of a step as fixed_s + batch · per_sequence_s.

    The first part is paid once a step whatever its size: launching kernels, reading the weights,
    the update. The second is what each sequence adds.
    """

    fixed_s: float
    per_sequence_s: float

    @classmethod
    def fit(cls, batch_sizes: pd.Series, steps_per_s: pd.Series) -> Saturation | None:
        """Fits the line to measured rates; None of fewer than ``LEAST_BATCHES``, and where no batch
        takes longer than another."""
        if len(batch_sizes) < LEAST_BATCHES:
            return None
        # Least squares of the relative error: each row is divided by its measured time, so that
        # the line has to give 1 everywhere, and long steps do not outweigh short ones. Neither
        # part of a step can be negative, hence NNLS.
        parts = np.column_stack([steps_per_s, batch_sizes * steps_per_s])
        (fixed_s, per_sequence_s), _ = nnls(parts, np.ones(len(parts)))
        return cls(float(fixed_s), float(per_sequence_s)) if per_sequence_s > 0 else None

    @property
    def half_batch(self) -> float:
        """Returns the batch at which half of the highest rate is reached."""
        return self.fixed_s / self.per_sequence_s

    def step_s(self, batch_size: np.ndarray) -> np.ndarray:
        """Computes the time of a step, in seconds."""
        return self.fixed_s + np.asarray(batch_size) * self.per_sequence_s
