"""The shapes that an all-reduce curve of NCCL can have: few parameters, each with a meaning.

- *Paths*: one to three ways to send a message, each with a latency α and a bandwidth β, of which
  the fastest is taken: ``min(αᵢ + x / βᵢ)``. One path is α–β (Hockney 1994). Where the paths cross,
  the library switches protocol or algorithm.
- *Protocols*: which algorithm and protocol NCCL takes at a size is known from its tuner, and so are
  their latencies and bandwidths relative to each other. Free are a launch, the share of the tuner's
  bandwidth that is reached, and the ramp (``nccl``): its slope and its height.

Parameters are fitted as logarithms, so none can be negative. The error is relative and robust
(soft L1), so that small and large messages count alike and one outlier counts little.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations, pairwise

import numpy as np
from numpy.typing import NDArray

from common.perfmodel.cluster.nccl import NO_RAMP, Collective, soft_minimum

TOLERANCE = 1e-6
EVALUATIONS = 100
"""Upper bound on a fit's evaluations; one that has not settled by then is taken as it is."""
TINY = 1e-18
LOGS = (-80.0, 20.0)
"""Bounds on the logarithms of parameters, so that none overflows."""


@dataclass(frozen=True)
class Curve:
    """A measured curve: bytes, seconds, and the relative error that is expected of each time."""

    sizes: NDArray
    times: NDArray
    sigma: NDArray

    def take(self, chosen: NDArray) -> Curve:
        """Returns the curve of some of its points."""
        return Curve(self.sizes[chosen], self.times[chosen], self.sigma[chosen])

    def errors(self, predicted: NDArray) -> NDArray:
        """Computes the logarithm of predicted over measured, in units of the expected error."""
        return np.log(predicted / self.times) / self.sigma


class Paths:
    """The fastest of ``count`` paths with a latency and a bandwidth each."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.name = "1 path" if count == 1 else f"{count} paths"
        self.num_parameters = 2 * count
        self.fewest_points = 2 * count

    def predict(self, logs: NDArray, sizes: NDArray) -> NDArray:
        """Computes the seconds for each size."""
        alpha, per_byte = np.exp(logs.reshape(2, self.count, 1))
        return (alpha + per_byte * sizes).min(axis=0)

    def slopes(self, logs: NDArray, sizes: NDArray) -> NDArray:
        """Computes the derivatives of the times by the logarithms, [sizes, parameters]."""
        # By the logarithm of α a time α + x/β has the derivative α, by that of 1/β it has x/β.
        # Only the parameters of the path that a size takes matter to it; all others get 0.
        alpha, per_byte = np.exp(logs.reshape(2, self.count, 1))
        parts = np.stack([np.broadcast_to(alpha, (self.count, len(sizes))), per_byte * sizes])
        taken = parts.sum(axis=0).argmin(axis=0)
        parts = np.where(np.arange(self.count)[:, None] == taken, parts, 0.0)
        return parts.reshape(2 * self.count, -1).T

    def fit(self, curve: Curve) -> NDArray:
        """Fits the logarithms of the latencies, then of the seconds per byte."""
        return _refine(self, self._start(curve), curve)

    def parameters(self, logs: NDArray) -> dict[str, float]:
        """Returns the parameters by name, with units; the path of short messages first."""
        alpha, per_byte = np.exp(logs.reshape(2, self.count))
        named = {}
        for place, path in enumerate(np.argsort(alpha), start=1):
            named[f"latency_{place}_us"] = alpha[path] * 1e6
            named[f"bandwidth_{place}_gb_per_s"] = 1e-9 / per_byte[path]
        return named

    def _start(self, curve: Curve) -> NDArray:
        """Finds the best cut of the points into neighbours, each with a line of its own."""
        # The minimum of several lines has many local optima, so the fit needs a good start. All
        # cuts into ``self.count`` stretches of at least two points are tried; ``cost`` is the sum
        # that soft L1 minimises, up to constants.
        count = len(curve.sizes)
        segments: dict[tuple[int, int], NDArray] = {}

        def line(low: int, high: int) -> NDArray:
            if (low, high) not in segments:
                segments[low, high] = _line(curve.take(np.arange(low, high)))
            return segments[low, high]

        def cost(logs: NDArray) -> float:
            errors = curve.errors(self.predict(logs, curve.sizes))
            return float(np.sqrt(1 + errors * errors).sum())

        starts = []
        for cuts in combinations(range(2, count - 1), self.count - 1):
            edges = (0, *cuts, count)
            if all(high - low >= 2 for low, high in pairwise(edges)):
                lines = [line(low, high) for low, high in pairwise(edges)]
                starts.append(np.log(np.array(lines).T.ravel()))
        return min(starts, key=cost)


class Protocols:
    """NCCL's own choices of protocol, with a launch, a share of their bandwidth and a ramp."""

    name = "NCCL's protocols"
    num_parameters = 4
    fewest_points = 5

    def __init__(self, collective: Collective) -> None:
        self.tuner = Collective(collective.choices, NO_RAMP)

    def predict(self, logs: NDArray, sizes: NDArray) -> NDArray:
        """Computes the seconds for each size."""
        launch, share, slowdown, height = np.exp(logs)
        latency, transfer = self._parts(sizes)
        return launch + latency + transfer / share + soft_minimum(slowdown * transfer, height)

    def slopes(self, logs: NDArray, sizes: NDArray) -> NDArray:
        """Computes the derivatives of the times by the logarithms, [sizes, parameters]."""
        # The ramp m = ab / √(a² + b²), with a rising and b flat, has dm/d(log a) = m·b²/(a² + b²)
        # and dm/d(log b) = m·a²/(a² + b²).
        launch, share, slowdown, height = np.exp(logs)
        _, transfer = self._parts(sizes)
        rising = slowdown * transfer
        ramp = soft_minimum(rising, height)
        flat = rising * rising / (rising * rising + height * height)
        columns = [np.full(len(sizes), launch), -transfer / share, ramp * (1 - flat), ramp * flat]
        return np.stack(columns, axis=1)

    def fit(self, curve: Curve) -> NDArray:
        """Fits logarithms of launch (s), share of bandwidth, slope and height (s) of the ramp."""
        latency, transfer = self._parts(curve.sizes)
        launch = max(float((curve.times - latency).min()), 1e-6)
        share = min(1.0, float(transfer[-1] / curve.times[-1]))
        return _refine(self, np.log([launch, share, 1.5, 6e-5]), curve)

    def parameters(self, logs: NDArray) -> dict[str, float]:
        """Returns the parameters by name, with units."""
        launch, share, slowdown, height = np.exp(logs)
        return {
            "launch_us": launch * 1e6,
            "share_of_bandwidth": share,
            "ramp_slowdown": slowdown,
            "ramp_us": height * 1e6,
        }

    def _parts(self, sizes: NDArray) -> tuple[NDArray, NDArray]:
        """Returns latency and transfer (s) of the choice that NCCL's tuner takes at each size."""
        transfers, times = self.tuner.transfers_s(sizes), self.tuner.times_s(sizes)
        taken, each = times.argmin(axis=0), np.arange(len(sizes))
        transfer = transfers[taken, each]
        return times[taken, each] - transfer, transfer


def _refine(shape: Paths | Protocols, start: NDArray, curve: Curve) -> NDArray:
    from scipy.optimize import least_squares

    def errors(logs: NDArray) -> NDArray:
        return curve.errors(shape.predict(np.clip(logs, *LOGS), curve.sizes))

    def slopes(logs: NDArray) -> NDArray:
        logs = np.clip(logs, *LOGS)
        scale = curve.sigma * shape.predict(logs, curve.sizes)
        return shape.slopes(logs, curve.sizes) / scale[:, None]

    found = least_squares(
        errors,
        start,
        jac=slopes,
        loss="soft_l1",
        ftol=TOLERANCE,
        xtol=TOLERANCE,
        max_nfev=EVALUATIONS,
    )
    return np.clip(found.x, *LOGS)


def _line(curve: Curve) -> NDArray:
    """Fits latency and seconds per byte with the smallest relative error, both above 0."""
    # Weighted least squares of (α + s·x) / t = 1, by its 2 × 2 normal equations, as this runs for
    # every stretch of every cut. Where α or s would not be above 0, the other is fitted alone.
    weights = 1 / curve.sigma
    columns = np.stack([weights / curve.times, weights * curve.sizes / curve.times])
    (aa, ab), (_, bb) = columns @ columns.T
    a, b = columns @ weights
    determinant = aa * bb - ab * ab
    if determinant > 1e-12 * aa * bb:
        alpha, slope = (bb * a - ab * b) / determinant, (aa * b - ab * a) / determinant
        if alpha > 0 and slope > 0:
            return np.array([alpha, slope])
        if alpha <= 0:
            return np.array([1e-9, b / bb])
    return np.array([a / aa, TINY])
