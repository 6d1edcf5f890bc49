"""a(x): the time of an all-reduce of x bytes, as a formula or as a measured curve."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from common.errors import UserError


class AllReduceModel(Protocol):
    """A predictor of the time of an all-reduce."""

    def time_s(self, size_bytes: ArrayLike) -> float | NDArray:
        """Computes the seconds for ``size_bytes``; a scalar for a scalar, else an array."""
        ...


@dataclass(frozen=True)
class AlphaBeta:
    """T = α + x / β: latency plus size over algorithm bandwidth (Hockney 1994)."""

    alpha_s: float
    bandwidth_bytes_per_s: float

    def __post_init__(self) -> None:
        if not self.alpha_s >= 0 or not self.bandwidth_bytes_per_s > 0:
            raise UserError(
                f"α = {self.alpha_s} s, β = {self.bandwidth_bytes_per_s} bytes/s: α must be at "
                "least 0 and β above 0"
            )

    def time_s(self, size_bytes: ArrayLike) -> float | NDArray:
        """Computes the seconds for ``size_bytes``; a scalar for a scalar, else an array."""
        times = self.alpha_s + np.asarray(size_bytes, dtype=float) / self.bandwidth_bytes_per_s
        return float(times) if np.ndim(size_bytes) == 0 else times

    @classmethod
    def fit(cls, size_bytes: ArrayLike, time_s: ArrayLike) -> AlphaBeta:
        """Fits α and β by least squares of the relative error, so that all sizes count alike.

        Where the minimum has α below 0, α is 0. Raises UserError for unusable values.
        """
        alpha, inverse = relative_line(*_checked(size_bytes, time_s))
        if inverse <= 0:
            raise UserError("all-reduce times do not grow with the size: no bandwidth to fit")
        return cls(alpha, 1 / inverse)

    @classmethod
    def from_endpoints(cls, size_bytes: ArrayLike, time_s: ArrayLike) -> AlphaBeta:
        """Applies the course's recipe: α is the smallest message's time, β comes from both ends.

        β = (x_max − x_min) / (t_max − t_min).
        """
        sizes, times = _checked(size_bytes, time_s)
        if times[-1] <= times[0]:
            raise UserError("the largest message is not slower than the smallest: no bandwidth")
        return cls(float(times[0]), float((sizes[-1] - sizes[0]) / (times[-1] - times[0])))


def relative_line(sizes: NDArray, times: NDArray) -> tuple[float, float]:
    """Fits a + b·x to times by least squares of the relative error, Σ ((a + b·x − t) / t)².

    Returns a, which is at least 0, and b, which may be below 0.
    """
    # Each row is divided by its time, a/t + b·(x/t) = 1, so that residuals are relative errors.
    # With a = 0 the one unknown has the closed form Σ(x/t) / Σ(x/t)².
    columns = np.stack([1 / times, sizes / times], axis=1)
    (fixed, slope), *_ = np.linalg.lstsq(columns, np.ones(len(times)), rcond=None)
    if fixed < 0:
        fixed, slope = 0.0, (sizes / times).sum() / ((sizes / times) ** 2).sum()
    return float(fixed), float(slope)


class MeasuredAllReduce:
    """A measured curve, linear between its points.

    It is monotone only where the data are: a measured dip stays. Below the smallest size the time
    is that of the smallest; above the largest it grows with the bandwidth of the largest message.
    """

    def __init__(self, size_bytes: ArrayLike, time_s: ArrayLike) -> None:
        self.sizes_bytes, self.times_s = _checked(size_bytes, time_s)

    def time_s(self, size_bytes: ArrayLike) -> float | NDArray:
        """Computes the seconds for ``size_bytes``; a scalar for a scalar, else an array."""
        sizes = np.asarray(size_bytes, dtype=float)
        times = np.interp(sizes, self.sizes_bytes, self.times_s)
        beyond = sizes > self.sizes_bytes[-1]
        if beyond.any():
            times = np.where(beyond, self.times_s[-1] * sizes / self.sizes_bytes[-1], times)
        return float(times) if np.ndim(size_bytes) == 0 else times


def as_alpha_beta(network: AllReduceModel) -> AlphaBeta:
    """Returns α–β through a measured curve; latency alone where times do not grow with the size."""
    if isinstance(network, AlphaBeta):
        return network
    try:
        return AlphaBeta.fit(network.sizes_bytes, network.times_s)
    except UserError:
        return AlphaBeta(float(np.median(network.times_s)), float("inf"))


# A plausible latency between A100s: nccl-tests measures 32 µs on one node of eight (OCI), NCCL's
# tuner (src/graph/tuning.cc) gives a tree over 2 × 4 GPUs 20 µs; two nodes add a network.
PLAUSIBLE_ALPHA_S = 40e-6


def with_latency(curve: MeasuredAllReduce, alpha_s: float) -> MeasuredAllReduce:
    """Shifts all times of a curve equally, so that its smallest message takes ``alpha_s``.

    For a measurement whose latency is that of its harness. No time falls below ``alpha_s``.
    """
    shifted = curve.times_s - curve.times_s[0] + alpha_s
    return MeasuredAllReduce(curve.sizes_bytes, np.maximum(shifted, alpha_s))


def scaled(
    network: AllReduceModel, *, latency: float = 1.0, transfer: float = 1.0
) -> AllReduceModel:
    """Returns the network with latency and transfer time multiplied by these factors.

    Of a measured curve the shortest time counts as latency, and the rest of each time as transfer;
    so the curve keeps its shape.
    """
    if isinstance(network, AlphaBeta):
        return AlphaBeta(network.alpha_s * latency, network.bandwidth_bytes_per_s / transfer)
    shortest_s = network.times_s.min()
    times_s = shortest_s * latency + (network.times_s - shortest_s) * transfer
    return MeasuredAllReduce(network.sizes_bytes, times_s)


def algorithm_bandwidth(size_bytes: ArrayLike, time_s: ArrayLike) -> NDArray:
    """Computes message size over time, in bytes per second."""
    return np.asarray(size_bytes, dtype=float) / np.asarray(time_s, dtype=float)


def bus_bandwidth(size_bytes: ArrayLike, time_s: ArrayLike, ranks: int) -> NDArray:
    """Computes algorithm bandwidth times 2(n−1)/n, in bytes/s (nccl-tests, PERFORMANCE.md)."""
    return algorithm_bandwidth(size_bytes, time_s) * 2 * (ranks - 1) / ranks


def _checked(size_bytes: ArrayLike, time_s: ArrayLike) -> tuple[NDArray, NDArray]:
    sizes = np.asarray(size_bytes, dtype=float)
    times = np.asarray(time_s, dtype=float)
    if sizes.shape != times.shape or sizes.ndim != 1:
        raise UserError(f"{sizes.size} sizes and {times.size} times: one time for each size")
    if len(sizes) < 2:
        raise UserError(f"an all-reduce curve of {len(sizes)} sizes: at least 2 are needed")
    if not np.isfinite(sizes).all() or not np.isfinite(times).all():
        raise UserError("all-reduce sizes and times must be finite numbers")
    if (np.diff(sizes) <= 0).any():
        row = int(np.argmax(np.diff(sizes) <= 0)) + 1
        raise UserError(
            f"all-reduce sizes must ascend: {sizes[row]:.0f} bytes follows {sizes[row - 1]:.0f}"
        )
    if sizes[0] <= 0 or (times <= 0).any():
        raise UserError("all-reduce sizes and times must be above 0")
    return sizes, times
