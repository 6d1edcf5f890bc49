"""The time of a pass over a batch: a fixed part, and one in proportion to the batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from common.errors import UserError


@dataclass(frozen=True)
class LinearTime:
    """t(b) = fixed + per_sample · b, in seconds."""

    fixed_s: float
    per_sample_s: float

    def __post_init__(self) -> None:
        if not (self.fixed_s >= 0 and self.per_sample_s >= 0):
            raise UserError("a pass takes no negative time")

    def time_s(self, batch: float) -> float:
        """Computes the seconds for a batch of so many samples."""
        return self.fixed_s + self.per_sample_s * batch

    @classmethod
    def fit(cls, batches: Sequence[float], times_s: Sequence[float]) -> LinearTime:
        """Fits both parts by least squares of the relative error; neither is below 0.

        One batch size alone gives a time in proportion to the batch.
        Raises UserError for no times, or times that are not above 0.
        """
        sizes, times = np.asarray(batches, float), np.asarray(times_s, float)
        if not len(times) or not (np.isfinite(times) & (times > 0) & (sizes > 0)).all():
            raise UserError("times of passes and their batches must be above 0")
        # Each row is divided by its time, (fixed + per_sample · b) / t = 1, so that residuals are
        # relative errors. Where one part would be below 0, the other is fitted alone.
        slope = float((sizes / times).sum() / ((sizes / times) ** 2).sum())
        if len(set(sizes)) == 1:
            return cls(0.0, slope)
        columns = np.stack([1 / times, sizes / times], axis=1)
        (fixed, per_sample), *_ = np.linalg.lstsq(columns, np.ones(len(times)), rcond=None)
        if fixed < 0:
            return cls(0.0, slope)
        if per_sample < 0:
            return cls(float((1 / times).sum() / (1 / times**2).sum()), 0.0)
        return cls(float(fixed), float(per_sample))


@dataclass(frozen=True)
class PassTimes:
    """Forward and backward pass of one micro-batch without any exchange."""

    forward: LinearTime
    backward: LinearTime

    def time_s(self, batch: float) -> float:
        """Computes the seconds of both."""
        return self.forward.time_s(batch) + self.backward.time_s(batch)
