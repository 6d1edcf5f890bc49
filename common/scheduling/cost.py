"""The cost of a micro-batch to its rank, a function of its size and of its longest text.

Every cost is called as ``cost(batch_size, longest)`` on numbers or arrays, and is non-decreasing
in both. ``most(longest, time)`` is its inverse: the largest batch that costs at most ``time``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from common.errors import UserError
from common.exercises.cost_fit import fit_cost
from common.settings import NonNegative, Settings

Cost = Callable[[Any, Any], Any]
UNLIMITED = 2**31
"""Result of ``most`` if batches of any size cost no more: above the size of any batch."""


@dataclass(frozen=True)
class TokensCost:
    """Tokens with padding: b·m, an integer for integers."""

    def __call__(self, batch_size: Any, longest: Any) -> Any:
        """Returns the tokens of ``batch_size`` texts, padded to the ``longest``."""
        return batch_size * longest

    def most(self, longest: NDArray, time: float) -> NDArray:
        """Returns the largest batches [n] of at most ``time`` tokens, padded to ``longest`` [n]."""
        return np.asarray(time // longest).astype(np.int64)


@dataclass(frozen=True)
class TokensSquaredCost:
    """Pairs of tokens that attention compares: b·m², an integer for integers."""

    def __call__(self, batch_size: Any, longest: Any) -> Any:
        """Returns the pairs of tokens of ``batch_size`` texts, padded to the ``longest``."""
        return batch_size * longest * longest

    def most(self, longest: NDArray, time: float) -> NDArray:
        """Returns the largest batches [n] of at most ``time`` pairs, padded to ``longest`` [n]."""
        return np.asarray(time // (longest * longest)).astype(np.int64)


@dataclass(frozen=True)
class CalibratedCost(Settings):
    """Seconds of a micro-batch's forward and backward pass: c0 + c1·b·m + c2·b·m².

    c0 is the time of any pass (launches), c1 that of the layers for each token, c2 that of
    attention for each pair of tokens. None may be negative: the cost would fall as batches grow.
    """

    c0_s: Annotated[float, NonNegative]
    c1_s: Annotated[float, NonNegative]
    c2_s: Annotated[float, NonNegative]

    def __call__(self, batch_size: Any, longest: Any) -> Any:
        """Returns the seconds for ``batch_size`` texts, padded to the ``longest``."""
        return self._time_s(batch_size, longest, self.c1_s + self.c2_s * longest)

    def _time_s(self, batch_size: Any, longest: Any, per_token_s: Any) -> Any:
        return self.c0_s + batch_size * longest * per_token_s

    def most(self, longest: NDArray, time: float) -> NDArray:
        """Returns the largest batches [n] of at most ``time`` s, padded to ``longest`` [n]."""
        per_token = self.c1_s + self.c2_s * longest
        if not self.c1_s and not self.c2_s:
            return np.full(longest.shape, UNLIMITED if self.c0_s <= time else 0)
        with np.errstate(over="ignore"):
            guess = (time - self.c0_s) / (longest * per_token)
        batch = np.maximum(np.minimum(guess, UNLIMITED), 0).astype(np.int64)
        # The division is rounded, so the guess may be off by one: it is corrected by the cost.
        while (less := (self._time_s(batch, longest, per_token) > time) & (batch > 0)).any():
            batch -= less
        while (
            more := (self._time_s(batch + 1, longest, per_token) <= time) & (batch < UNLIMITED)
        ).any():
            batch += more
        return batch

    @classmethod
    def fit(cls, batch_size: ArrayLike, longest: ArrayLike, time_s: ArrayLike) -> CalibratedCost:
        """Fits the coefficients to n measured steps, by their relative errors.

        Raises UserError for less than one step, and for a time that is not above 0.
        """
        c0_s, c1_s, c2_s = fit_cost(*_steps(batch_size, longest, time_s))
        return cls(c0_s=c0_s, c1_s=c1_s, c2_s=c2_s)

    def relative_error(self, batch_size: ArrayLike, longest: ArrayLike, time_s: ArrayLike) -> float:
        """Computes the median of |predicted − measured| / measured over steps [n]."""
        batch, length, times = _steps(batch_size, longest, time_s)
        return float(np.median(np.abs(self(batch, length) - times) / times))

    def scaled(self, factor: float) -> CalibratedCost:
        """Returns the cost on a rank that takes ``factor`` times as long."""
        return CalibratedCost(self.c0_s * factor, self.c1_s * factor, self.c2_s * factor)


def _steps(*columns: ArrayLike) -> tuple[NDArray, NDArray, NDArray]:
    batch, length, times = (np.asarray(column, dtype=float) for column in columns)
    if not batch.shape == length.shape == times.shape or times.ndim != 1 or not times.size:
        raise UserError(
            f"{batch.size} batch sizes, {length.size} lengths and {times.size} times; a cost is "
            "fitted to one of each for every measured step, at least one"
        )
    if not (np.isfinite(times).all() and (times > 0).all()):
        raise UserError(f"a measured step took {times.min()} s; times must be above 0")
    return batch, length, times
