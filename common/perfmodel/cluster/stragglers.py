"""The cost of waiting for the slowest GPU, the straggler, when GPUs differ at random.

Each GPU's computation in a step takes X times its mean, X independent of the others, with mean 1
and a stated standard deviation. A synchronous step waits for the largest of n. Its expectation is

    E[max g(Z)] = ∫ g(z) n φ(z) Φ(z)^(n−1) dz,   with X = g(Z), Z normal

which a fixed grid gives to more digits than the assumption deserves; the largest of n exponential
variables has the harmonic number as its mean (Rényi 1953), and the largest of n Gumbel variables is
one again, ln n scales further (Fisher and Tippett 1928).

Two kinds of difference look alike in one step and not in the next. Where all ranks have the same
work, a rank that is slow stays slow, so the slowest of n is drawn once for a job: the mean over
jobs is the same, but a single job has not that mean. Where each rank has texts of its own, lengths
are drawn anew in each step, and a job of many steps sees the mean.
"""

from __future__ import annotations

import math
from functools import cache
from statistics import NormalDist

import numpy as np
from numpy.typing import ArrayLike, NDArray

from common.errors import UserError, require_known

DISTRIBUTIONS = ("lognormal", "normal", "exponential", "gumbel")
GUMBEL_SCALE = math.sqrt(6) / math.pi
"""Scale of a Gumbel variable with a standard deviation of 1."""
LARGEST_Z, GRID_POINTS = 9.0, 721


def slowest_of(gpus: int, spread: ArrayLike, distribution: str = "lognormal") -> NDArray:
    """Computes the expected time of the slowest of ``gpus``, as a multiple of the mean time.

    Args:
        gpus: number of GPUs; one is as slow as the mean.
        spread: standard deviation of a GPU's time as a share of its mean, any shape; 0 is none.
        distribution: ``lognormal``, ``normal``, or ``exponential``: a fastest time and an
            exponential delay on top, so that few GPUs are much slower; or ``gumbel``: each GPU is
            itself as slow as the largest of its parts, such as its longest text.

    Raises UserError for fewer than 1 GPU, another distribution or a spread outside of [0, 1).
    """
    sigma = _checked(gpus, spread, distribution)
    if gpus == 1:
        return np.ones_like(sigma)
    # A fastest time 1 − σ and a delay of mean σ, of which the largest of n has the mean σ·H_n.
    if distribution == "exponential":
        return 1 + sigma * (float((1 / np.arange(1, gpus + 1)).sum()) - 1)
    if distribution == "gumbel":
        return 1 + sigma * GUMBEL_SCALE * math.log(gpus)
    z, density = _largest_of(gpus)
    if distribution == "normal":
        return 1 + sigma * float(density @ z)
    # A lognormal variable exp(s·z − s²/2) has mean 1, and the stated standard deviation σ with
    # s² = ln(1 + σ²).
    log_sigma = np.sqrt(np.log1p(sigma**2))
    return np.exp(np.multiply.outer(log_sigma, z) - log_sigma[..., None] ** 2 / 2) @ density


def slowest_at(
    gpus: int, spread: ArrayLike, quantile: ArrayLike, distribution: str = "lognormal"
) -> NDArray:
    """Computes a quantile of the time of the slowest of ``gpus``, as a multiple of the mean time.

    It is the quantile q^(1/n) of one GPU's. ``spread`` and ``quantile`` (between 0 and 1) go
    together element by element; the rest is as in ``slowest_of``.
    """
    sigma = _checked(gpus, spread, distribution)
    share = np.asarray(quantile, dtype=float)
    if not ((share > 0) & (share < 1)).all():
        raise UserError(f"quantile {quantile}: between 0 and 1")
    if gpus == 1:
        return np.ones(np.broadcast_shapes(sigma.shape, share.shape))
    # −ln of q^(1/n), which keeps its digits where q^(1/n) is all but 1.
    rarity = -np.log(share) / gpus
    if distribution == "exponential":
        return 1 - sigma - sigma * np.log(-np.expm1(-rarity))
    if distribution == "gumbel":
        return 1 - sigma * GUMBEL_SCALE * (np.euler_gamma + np.log(rarity))
    z = -np.vectorize(NormalDist().inv_cdf, otypes=[float])(-np.expm1(-rarity))
    if distribution == "normal":
        return 1 + sigma * z
    log_sigma = np.sqrt(np.log1p(sigma**2))
    return np.exp(log_sigma * z - log_sigma**2 / 2)


def _checked(gpus: int, spread: ArrayLike, distribution: str) -> NDArray:
    sigma = np.asarray(spread, dtype=float)
    if gpus < 1:
        raise UserError(f"{gpus} GPUs: at least 1 is needed")
    require_known("straggler distribution", distribution, DISTRIBUTIONS)
    if not ((sigma >= 0) & (sigma < 1)).all():
        raise UserError(f"straggler spread {spread}: a share of the mean from 0 to below 1")
    return sigma


def _largest_of(gpus: int) -> tuple[NDArray, NDArray]:
    """Returns a grid and the weight at each point of the largest of ``gpus`` normal variables."""
    # φ(z)·Φ(z)^(n−1), normalised. The logarithm of Φ stays precise where Φ is nearly 1.
    z, log_density, log_cumulative = _normal()
    density = np.exp(log_density + (gpus - 1) * log_cumulative)
    return z, density / density.sum()


@cache
def _normal() -> tuple[NDArray, NDArray, NDArray]:
    z = np.linspace(-LARGEST_Z, LARGEST_Z, GRID_POINTS)
    upper = np.array([0.5 * math.erfc(value / math.sqrt(2)) for value in z])
    return z, -(z**2) / 2, np.log1p(-np.minimum(upper, 1 - 1e-16))
