"""Laws of scaling, fitted to measured speedups, with intervals.

The laws and their fit are exercise A4.3: least squares of the relative error of S, within bounds,
repeated once with the fitted S in the weights. Here are the intervals of the parameters, and what
follows from a fit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from common.errors import UserError
from common.exercises.scaling_fit import GUSTAFSON, USL, Law, check_points, fit_parameters
from common.samples import Interval, middle, resampled, student_quantile

DRAWS = 400
"""Each draw of a bootstrap is a fit."""
LEAST_ROUNDS = 3
"""Least number of rounds; other bootstraps, without Student's t, need more."""
FITS_WITHIN = 0.05
"""A law describes its points where its largest error is at most this."""


@dataclass(frozen=True, eq=False)
class FittedLaw:
    """A law with the parameters that fit best.

    Attributes:
        ranks, speedup: Points that it was fitted to, N > 1 only.
        parameters: Estimates by name.
        method: Source of the intervals, in words.
        draws: Parameters that are as likely, [DRAWS, parameters]; the band is made of them.
        r_squared: Share of the variance of S over N that the law explains.
    """

    law: Law
    ranks: NDArray
    speedup: NDArray
    parameters: Mapping[str, Interval]
    method: str
    draws: NDArray
    r_squared: float

    def predict(self, ranks: ArrayLike) -> NDArray:
        """Returns the law's speedups at these numbers of ranks."""
        return self.law.predict(np.asarray(ranks, dtype=float), *self._values())

    def band(self, ranks: ArrayLike) -> tuple[NDArray, NDArray]:
        """Returns the 95 % interval of the law at these numbers of ranks."""
        counts = np.asarray(ranks, dtype=float)
        curves = self.law.predict(counts[:, None], *self.draws.T)
        return middle(curves, axis=1)

    @property
    def largest_error(self) -> float:
        """Returns the largest |law over measured − 1| of the points."""
        return float(np.abs(self.predict(self.ranks) / self.speedup - 1).max())

    @property
    def most_speedup(self) -> float:
        """Returns the upper bound of the law's speedup; infinite where it grows without end."""
        values = self._values()
        if self.law is GUSTAFSON:
            return float("inf") if values[0] < 1 else 1.0
        if self.law is USL and np.isfinite(self.peak_ranks):
            return float(self.predict(self.peak_ranks))
        # Amdahl's law, and the Universal Scalability Law with κ = 0, which is the same.
        return 1 / values[0] if values[0] > 0 else float("inf")

    @property
    def peak_ranks(self) -> float | None:
        """Returns √((1 − σ)/κ), where the Universal Scalability Law is highest.

        Infinite where κ is 0; 1 where more ranks never help; None for other laws.
        """
        return _peak(*self._values()) if self.law is USL else None

    @property
    def peak_interval(self) -> tuple[float, float] | None:
        """Returns the 95 % interval of ``peak_ranks``."""
        if self.law is not USL:
            return None
        peaks = [_peak(sigma, kappa) for sigma, kappa in self.draws]
        return middle(peaks, method="nearest")

    def _values(self) -> list[float]:
        return [self.parameters[name].estimate for name in self.law.parameters]


def fit_law(
    law: Law,
    ranks: ArrayLike,
    speedup: ArrayLike,
    *,
    low: ArrayLike | None = None,
    high: ArrayLike | None = None,
    rounds: ArrayLike | None = None,
) -> FittedLaw:
    """Fits a law to measured speedups.

    The intervals of the parameters come from the best that is known, and ``method`` says which:

    - ``rounds`` of three rounds or more: a bootstrap over rounds, so that what the points of a
      round have in common (the speed of the one rank they are divided by) stays together;
      widened by Student's t, as few rounds show too little spread.
    - ``low`` and ``high``: the covariance of least squares with these as the points' errors,
      or with the scatter around the law where that is larger.
    - else the covariance with the scatter around the law.

    Either says what another measurement may give if the law is right. Whether it is, the largest
    error shows.

    Args:
        ranks: Numbers of ranks; 1 may be among them and is left out.
        speedup: Speedup S at each number of ranks.
        low, high: Ends of the 95 % intervals of the speedups.
        rounds: Speedups of each round, [rounds, points].

    Raises:
        UserError: fewer different numbers of ranks above 1 than the law's parameters plus two,
            a speedup that is not a finite number above 0, or sizes that do not match.
    """
    points = _checked(law, ranks, speedup, low, high, rounds)
    values, covariance, scatter = _least_squares(law, points.ranks, points.speedup, points.errors)
    if points.rounds is not None:
        draws = values + _offsets_over_rounds(law, points)
        method = f"bootstrap over {len(points.rounds)} rounds"
    else:
        is_measured = points.errors is not None and scatter <= 1
        method = "errors of the points" if is_measured else "scatter of the points around the law"
        generator = np.random.default_rng(0)
        normal = generator.multivariate_normal(np.zeros(len(values)), covariance, DRAWS * 5)
        # A scatter that was estimated from few points needs Student's wider quantiles.
        freedom = len(points.ranks) - len(law.parameters)
        factor = (
            1.0 if is_measured else scatter * student_quantile(freedom) / student_quantile(np.inf)
        )
        draws = values + normal * factor
    draws = np.clip(draws, 0, law.largest)
    fitted = law.predict(points.ranks, *values)
    spread = ((points.speedup - points.speedup.mean()) ** 2).sum()
    return FittedLaw(
        law=law,
        ranks=points.ranks,
        speedup=points.speedup,
        parameters={
            name: Interval(float(value), float(min(start, value)), float(max(end, value)))
            for name, value, start, end in zip(law.parameters, values, *middle(draws), strict=True)
        },
        method=method,
        draws=draws,
        r_squared=float(1 - ((points.speedup - fitted) ** 2).sum() / spread) if spread else 1.0,
    )


@dataclass(frozen=True, eq=False)
class _Points:
    ranks: NDArray
    speedup: NDArray
    errors: NDArray | None
    rounds: NDArray | None


def _checked(law: Law, ranks, speedup, low, high, rounds) -> _Points:
    """Returns the points with N > 1 as arrays. Raises UserError where there are too few."""
    n, s = np.asarray(ranks, dtype=float), np.asarray(speedup, dtype=float)
    check_points(law, n, s)
    several = n > 1
    errors = None
    if low is not None and high is not None:
        width = np.asarray(high, dtype=float) - np.asarray(low, dtype=float)
        errors = (width / 2 / student_quantile(np.inf))[several]
        # Without any spread in one of them, intervals are no measure of error.
        if not (np.isfinite(errors).all() and (errors > 0).all()):
            errors = None
    by_round = None
    if rounds is not None:
        by_round = np.asarray(rounds, dtype=float)
        if by_round.ndim != 2 or by_round.shape[1] != len(n):
            raise UserError(f"{law.name}: a round needs a speedup for each of {len(n)} points")
        by_round = by_round[:, several]
        by_round = by_round[np.isfinite(by_round).all(axis=1) & (by_round > 0).all(axis=1)]
        by_round = by_round if len(by_round) >= LEAST_ROUNDS else None
    return _Points(n[several], s[several], errors, by_round)


def _offsets_over_rounds(law: Law, points: _Points) -> NDArray:
    """Draws how far parameters may be off, from rounds: [DRAWS, parameters].

    The bootstrap: rounds are drawn with replacement, and the law is fitted to the mean of each
    draw. The variance of such draws is (n − 1)/n of what it should be, and n is small, so they are
    widened by √(n/(n − 1)), and by Student's t over the normal quantile.
    """
    rounds, total = points.rounds, len(points.rounds)
    drawn = resampled(rounds, draws=DRAWS).mean(axis=1)
    fits = np.array([_least_squares(law, points.ranks, row, points.errors)[0] for row in drawn])
    centre = _least_squares(law, points.ranks, rounds.mean(axis=0), points.errors)[0]
    widened = student_quantile(total - 1) / student_quantile(np.inf) * np.sqrt(total / (total - 1))
    return (fits - centre) * widened


def _least_squares(
    law: Law, n: NDArray, speedup: NDArray, errors: NDArray | None
) -> tuple[NDArray, NDArray, float]:
    """Returns parameters, their covariance for errors as given, and the scatter in such units."""
    values, rows, target = fit_parameters(law, n, speedup, errors)
    covariance = np.linalg.pinv(rows.T @ rows)
    freedom = len(n) - len(law.parameters)
    scatter = float(np.sqrt((((rows @ values) - target) ** 2).sum() / freedom))
    return values, covariance, scatter


def _peak(sigma: float, kappa: float) -> float:
    if kappa <= 0:
        return float("inf") if sigma < 1 else 1.0
    return float(max(1.0, np.sqrt(max(0.0, 1 - sigma) / kappa)))
