"""Amdahl's law, Gustafson's law and the Universal Scalability Law, fitted with intervals.

N ranks, speedup S(N) = throughput on N over throughput on 1:

- Amdahl (1967), a fixed problem (strong scaling): S = 1 / (s + (1 − s)/N).
- Gustafson (1988), a problem that grows with N (weak scaling): S = N − s·(N − 1).
- Universal Scalability Law (Gunther 1993, either): S = N / (1 + σ(N − 1) + κN(N − 1)). σ is
  contention for what ranks share, κ the cost of agreement between every pair of ranks. With κ = 0
  it is Amdahl's law.

Each becomes linear in its parameters when it is solved for 1/S, S or N/S, so a fit has one optimum
and needs no start: least squares of the relative error of S, within bounds, repeated once with the
fitted S in the weights. S(1) = 1 holds under every law, whatever its parameters, so the point N = 1
carries no information and does not count as one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import nnls
from scipy.stats import norm, t

from common.errors import UserError

LEVEL = 0.95
DRAWS = 400
MORE_POINTS = 2
"""A fit needs so many points more than parameters; with fewer, any law fits."""
LEAST_ROUNDS = 3
FITS_WITHIN = 0.05
"""A law describes its points where its largest error is at most this."""


@dataclass(frozen=True)
class Law:
    """A law and its linear form: ``columns(N) @ parameters = left_side(N, S)``.

    Attributes:
        predict: speedup from N and the parameters.
        slope: |d left_side / d S|, by which an error of S becomes one of the left side.
        largest: upper bounds of the parameters; the lower ones are 0.
    """

    name: str
    parameters: tuple[str, ...]
    predict: Callable[..., NDArray]
    columns: Callable[[NDArray], NDArray]
    left_side: Callable[[NDArray, NDArray], NDArray]
    slope: Callable[[NDArray, NDArray], NDArray]
    largest: tuple[float, ...]

    @property
    def least_points(self) -> int:
        """Returns the numbers of ranks above 1 that a fit needs at least."""
        return len(self.parameters) + MORE_POINTS


AMDAHL = Law(
    name="Amdahl",
    parameters=("s",),
    predict=lambda n, s: 1 / (s + (1 - s) / n),
    columns=lambda n: np.stack([1 - 1 / n], axis=1),
    left_side=lambda n, speedup: 1 / speedup - 1 / n,
    slope=lambda n, speedup: 1 / speedup**2,
    largest=(1.0,),
)
GUSTAFSON = Law(
    name="Gustafson",
    parameters=("s",),
    predict=lambda n, s: n - s * (n - 1),
    columns=lambda n: np.stack([n - 1], axis=1),
    left_side=lambda n, speedup: n - speedup,
    slope=lambda n, speedup: np.ones_like(speedup),
    largest=(1.0,),
)
USL = Law(
    name="Universal Scalability Law",
    parameters=("σ", "κ"),
    predict=lambda n, sigma, kappa: n / (1 + sigma * (n - 1) + kappa * n * (n - 1)),
    columns=lambda n: np.stack([n - 1, n * (n - 1)], axis=1),
    left_side=lambda n, speedup: n / speedup - 1,
    slope=lambda n, speedup: n / speedup**2,
    largest=(np.inf, np.inf),
)


@dataclass(frozen=True)
class Estimate:
    """A parameter with its 95 % interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, eq=False)
class FittedLaw:
    """A law with the parameters that fit best.

    Attributes:
        ranks, speedup: the points it was fitted to, N > 1 only.
        parameters: by name.
        method: where the intervals come from, in words.
        draws: parameters that are as likely, [DRAWS, parameters]; of these the band is made.
        r_squared: share of the variance of S over N that the law explains.
    """

    law: Law
    ranks: NDArray
    speedup: NDArray
    parameters: Mapping[str, Estimate]
    method: str
    draws: NDArray
    r_squared: float

    def predict(self, ranks: ArrayLike) -> NDArray:
        """Returns the law's speedups at these numbers of ranks."""
        return self.law.predict(np.asarray(ranks, dtype=float), *self._values())

    def band(self, ranks: ArrayLike) -> tuple[NDArray, NDArray]:
        """Returns the 95 % interval of the law at these numbers of ranks."""
        asked = np.asarray(ranks, dtype=float)
        curves = self.law.predict(asked[:, None], *self.draws.T)
        low, high = np.percentile(curves, _percentiles(), axis=1)
        return low, high

    @property
    def largest_error(self) -> float:
        """Returns the largest |law over measured − 1| of the points."""
        return float(np.abs(self.predict(self.ranks) / self.speedup - 1).max())

    @property
    def describes_points(self) -> bool:
        """Returns True if the law is off by at most ``FITS_WITHIN`` at every point."""
        return self.largest_error <= FITS_WITHIN

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
        low, high = np.percentile(peaks, _percentiles(), method="nearest")
        return float(low), float(high)

    def _values(self) -> list[float]:
        return [self.parameters[name].value for name in self.law.parameters]


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
        law: one of AMDAHL, GUSTAFSON and USL.
        ranks: numbers of ranks; 1 may be among them and is left out.
        speedup: S at each.
        low, high: 95 % intervals of the speedups.
        rounds: [rounds, points], speedups of each round.

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
        known = points.errors is not None and scatter <= 1
        method = "errors of the points" if known else "scatter of the points around the law"
        generator = np.random.default_rng(0)
        normal = generator.multivariate_normal(np.zeros(len(values)), covariance, DRAWS * 5)
        # A scatter that was estimated from few points needs Student's wider quantiles.
        freedom = len(points.ranks) - len(law.parameters)
        factor = 1.0 if known else scatter * _student(freedom) / _student(np.inf)
        draws = values + normal * factor
    draws = np.clip(draws, 0, law.largest)
    bounds = np.percentile(draws, _percentiles(), axis=0).T
    fitted = law.predict(points.ranks, *values)
    spread = ((points.speedup - points.speedup.mean()) ** 2).sum()
    return FittedLaw(
        law=law,
        ranks=points.ranks,
        speedup=points.speedup,
        parameters={
            name: Estimate(float(value), float(min(bound[0], value)), float(max(bound[1], value)))
            for name, value, bound in zip(law.parameters, values, bounds, strict=True)
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
    if n.shape != s.shape or n.ndim != 1:
        raise UserError(f"{law.name}: {n.size} numbers of ranks and {s.size} speedups")
    if not (np.isfinite(n).all() and (n >= 1).all() and (n == np.rint(n)).all()):
        raise UserError(f"{law.name}: numbers of ranks must be whole and at least 1")
    if not (np.isfinite(s).all() and (s > 0).all()):
        raise UserError(f"{law.name}: every speedup must be a finite number above 0")
    several = n > 1
    found = len(np.unique(n[several]))
    if found < law.least_points:
        raise UserError(
            f"{law.name} has {_count(len(law.parameters), 'parameter')}, so it needs "
            f"{law.least_points} numbers of ranks above 1; here are {found}"
        )
    errors = None
    if low is not None and high is not None:
        width = np.asarray(high, dtype=float) - np.asarray(low, dtype=float)
        errors = (width / 2 / _student(np.inf))[several]
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
    drawn = rounds[np.random.default_rng(0).integers(0, total, (DRAWS, total))].mean(axis=1)
    fits = np.array([_least_squares(law, points.ranks, row, points.errors)[0] for row in drawn])
    centre = _least_squares(law, points.ranks, rounds.mean(axis=0), points.errors)[0]
    widened = _student(total - 1) / _student(np.inf) * np.sqrt(total / (total - 1))
    return (fits - centre) * widened


def _least_squares(
    law: Law, n: NDArray, speedup: NDArray, errors: NDArray | None
) -> tuple[NDArray, NDArray, float]:
    """Returns parameters, their covariance for errors as given, and the scatter in units of these.

    A row is divided by the error of its left side: the error of S (or S itself, so that relative
    errors count) times the slope of the left side. The slope depends on S, which is measured in
    the first pass and fitted in the second, so that noise in S does not choose the weights.
    """
    columns, left = law.columns(n), law.left_side(n, speedup)
    at = speedup
    for _ in range(2):
        weights = 1 / (law.slope(n, at) * (at if errors is None else errors))
        rows, target = columns * weights[:, None], left * weights
        # Only laws of one parameter have an upper bound, and for these cutting off is the optimum.
        values = np.minimum(nnls(rows, target)[0], law.largest)
        at = np.maximum(law.predict(n, *values), 1e-9)
    covariance = np.linalg.pinv(rows.T @ rows)
    freedom = len(n) - len(law.parameters)
    scatter = float(np.sqrt((((rows @ values) - target) ** 2).sum() / freedom))
    return values, covariance, scatter


def _peak(sigma: float, kappa: float) -> float:
    if kappa <= 0:
        return float("inf") if sigma < 1 else 1.0
    return float(max(1.0, np.sqrt(max(0.0, 1 - sigma) / kappa)))


def _student(freedom: float) -> float:
    """Returns the two-sided quantile of Student's t; the normal one for infinite freedom."""
    upper = (1 + LEVEL) / 2
    return float(norm.ppf(upper) if np.isinf(freedom) else t.ppf(upper, freedom))


def _percentiles() -> tuple[float, float]:
    return 50 * (1 - LEVEL), 50 * (1 + LEVEL)


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + ("" if number == 1 else "s")
