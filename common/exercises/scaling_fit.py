"""A4.3: Amdahl's, Gustafson's and the Universal Scalability Law, fitted to measured speedups.

N ranks, speedup S(N) = throughput on N over throughput on 1:

- Amdahl (1967), a fixed problem (strong scaling): S = 1 / (s + (1 − s)/N).
- Gustafson (1988), a problem that grows with N (weak scaling): S = N − s·(N − 1).
- Universal Scalability Law (Gunther 1993, either): S = N / (1 + σ(N − 1) + κN(N − 1)). σ is
  contention for what ranks share, κ the cost of agreement between every pair of ranks. With κ = 0
  it is Amdahl's law.

Each becomes linear in its parameters when it is solved for 1/S, S or N/S, so a fit has one optimum
and needs no start.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from common.errors import UserError

MORE_POINTS = 2
"""A fit needs so many points more than parameters; with fewer, any law fits."""


@dataclass(frozen=True)
class Law:
    """A law.

    Attributes:
        name: of the law.
        parameters: their names.
        predict: speedup from N and the parameters.
        largest: upper bounds of the parameters; the lower ones are 0.
    """

    name: str
    parameters: tuple[str, ...]
    predict: Callable[..., NDArray]
    largest: tuple[float, ...]

    @property
    def least_points(self) -> int:
        """Returns the numbers of ranks above 1 that a fit needs at least."""
        return len(self.parameters) + MORE_POINTS


AMDAHL = Law("Amdahl", ("s",), lambda n, s: 1 / (s + (1 - s) / n), (1.0,))
GUSTAFSON = Law("Gustafson", ("s",), lambda n, s: n - s * (n - 1), (1.0,))
USL = Law(
    "Universal Scalability Law",
    ("σ", "κ"),
    lambda n, sigma, kappa: n / (1 + sigma * (n - 1) + kappa * n * (n - 1)),
    (np.inf, np.inf),
)


def check_points(law: Law, ranks: NDArray, speedup: NDArray) -> None:
    """Raises UserError unless the law can be fitted to these points.

    S(1) = 1 holds under every law, whatever its parameters, so N = 1 does not count as a point.

    Args:
        law: one of AMDAHL, GUSTAFSON and USL.
        ranks, speedup: float64, of any shape.

    Raises:
        UserError: sizes that do not match ("speedups"); numbers of ranks that are not "whole" or
            below 1; a speedup that is not a "finite" number above 0; fewer different numbers of
            ranks above 1 than the law's parameters and ``MORE_POINTS`` ("needs 4 numbers of ranks
            above 1; here are 3"). It begins with the law's name, and has the words in quotes.
    """
    # BEGIN SOLUTION A4.3
    if ranks.shape != speedup.shape or ranks.ndim != 1:
        raise UserError(f"{law.name}: {ranks.size} numbers of ranks and {speedup.size} speedups")
    if not (np.isfinite(ranks).all() and (ranks >= 1).all() and (ranks == np.rint(ranks)).all()):
        raise UserError(f"{law.name}: numbers of ranks must be whole and at least 1")
    if not (np.isfinite(speedup).all() and (speedup > 0).all()):
        raise UserError(f"{law.name}: every speedup must be a finite number above 0")
    found = len(np.unique(ranks[ranks > 1]))
    if found < law.least_points:
        parameters = f"{len(law.parameters)} parameter" + "s" * (len(law.parameters) != 1)
        raise UserError(
            f"{law.name} has {parameters}, so it needs {law.least_points} numbers of ranks above "
            f"1; here are {found}"
        )
    # END SOLUTION


def linear_form(law: Law, n: NDArray, speedup: NDArray) -> tuple[NDArray, NDArray, NDArray]:
    """Solves a law for its parameters: ``columns @ parameters = left side``.

    Args:
        law: one of AMDAHL, GUSTAFSON and USL.
        n, speedup: [points].

    Returns:
        columns [points, parameters], left side [points], and its slope |d left side / d S|
        [points], by which an error of S becomes one of the left side.
    """
    # BEGIN SOLUTION A4.3
    if law is AMDAHL:
        return np.stack([1 - 1 / n], axis=1), 1 / speedup - 1 / n, 1 / speedup**2
    if law is GUSTAFSON:
        return np.stack([n - 1], axis=1), n - speedup, np.ones_like(speedup)
    return np.stack([n - 1, n * (n - 1)], axis=1), n / speedup - 1, n / speedup**2
    # END SOLUTION


def fit_parameters(
    law: Law, n: NDArray, speedup: NDArray, errors: NDArray | None = None
) -> tuple[NDArray, NDArray, NDArray]:
    """Fits a law's parameters by least squares of the speedups' errors, within their bounds.

    Args:
        law: one of AMDAHL, GUSTAFSON and USL.
        n, speedup: [points], N > 1 only, as ``check_points`` wants them.
        errors: [points], standard errors of the speedups, in whose units the errors count; None
            where they are not known: then relative errors count. No argument is changed.

    Returns:
        the parameters [parameters], and the rows [points, parameters] and targets [points] of the
        system that was solved, in units of the errors.
    """
    # BEGIN SOLUTION A4.3
    # A row is divided by the error of its left side: the error of S times the slope. The slope
    # depends on S, which is measured in the first pass and fitted in the second, so that noise in
    # S does not choose the weights.
    from scipy.optimize import nnls

    columns, left, _ = linear_form(law, n, speedup)
    at = speedup
    for _ in range(2):
        _, _, slope = linear_form(law, n, at)
        weights = 1 / (slope * (at if errors is None else errors))
        rows, target = columns * weights[:, None], left * weights
        # Only laws of one parameter have an upper bound, and for these cutting off is the optimum.
        values = np.minimum(nnls(rows, target)[0], law.largest)
        at = np.maximum(law.predict(n, *values), 1e-9)
    return values, rows, target
    # END SOLUTION
