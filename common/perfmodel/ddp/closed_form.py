"""The hand-derived equation for T(b), and the square-root law for b*.

Take L equal layers whose gradients appear evenly: B bytes over a computation of T_c seconds, so a
byte costs g = T_c / B seconds. With buckets of b bytes there are K = B / b of them; bucket i is
ready at i·g·b, and its all-reduce takes a(b) = α + b/β.

*Compute-bound*, a(b) ≤ g·b: each all-reduce is done before the next bucket is ready, only the last
one is exposed::

    T(b) = T_c + a(b)

*Communication-bound*, a(b) ≥ g·b: communication starts when the first bucket is ready and never
rests::

    T(b) = g·b + K·a(b) = g·b + α·B/b + B/β

Both are one expression, T(b) = g·b + a(b) + (K − 1)·max(g·b, a(b)). The communication-bound branch
is a sum of a term that grows with b (waiting for the first bucket) and one that falls with b
(latency paid K times); dT/db = g − α·B/b² = 0 gives the square-root law::

    b* = sqrt(α·B / g) = B · sqrt(α / T_c)

The compute-bound branch grows with b, so if it begins (at b₀ = α / (g − 1/β), where a(b₀) = g·b₀)
before that minimum is reached, b* = b₀. Doubling α multiplies the square root by √2; so does
doubling B at the same g, and at the same T_c it doubles it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from common.errors import UserError
from common.perfmodel.buckets import DEFAULT_CAP_BYTES, MIB
from common.perfmodel.collectives import AllReduceModel, AlphaBeta, as_alpha_beta
from common.perfmodel.ddp.profile import BackwardProfile


@dataclass(frozen=True)
class ClosedForm:
    """The course's quantities.

    Attributes:
        gradient_bytes: B.
        compute_s: T_c, the sum of the layers' times g_l.
        layers: L; a bucket is never smaller than a layer, B / L.
        all_reduce: a(x) = α + x/β.
    """

    gradient_bytes: float
    compute_s: float
    layers: int
    all_reduce: AlphaBeta

    def __post_init__(self) -> None:
        if not (self.gradient_bytes > 0 and self.compute_s > 0 and self.layers >= 1):
            raise UserError("B and T_c must be above 0, and there is at least 1 layer")

    @property
    def seconds_per_byte(self) -> float:
        """Returns g = T_c / B."""
        return self.compute_s / self.gradient_bytes

    def total_s(self, bucket_bytes: ArrayLike) -> float | NDArray:
        """Computes T(b) in seconds; b is clipped to [B / L, B]."""
        b = np.clip(bucket_bytes, self.gradient_bytes / self.layers, self.gradient_bytes)
        compute = self.seconds_per_byte * b
        reduce = self.all_reduce.time_s(b)
        total = compute + reduce + (self.gradient_bytes / b - 1) * np.maximum(compute, reduce)
        return float(total) if np.ndim(bucket_bytes) == 0 else total

    def at_cap_s(self, cap_mib: float | None) -> float:
        """Computes T in seconds at a cap in MiB; None, DDP's default, counts as 25 MiB."""
        return self.total_s(DEFAULT_CAP_BYTES if cap_mib is None else cap_mib * MIB)

    def square_root_law_bytes(self) -> float:
        """Computes sqrt(α·B/g), the minimum of the communication-bound branch, without limits."""
        return float(np.sqrt(self.all_reduce.alpha_s * self.gradient_bytes / self.seconds_per_byte))

    def best_bucket_bytes(self) -> float:
        """Computes b* in bytes, within [B / L, B]."""
        best = self.square_root_law_bytes()
        # If g > 1/β, the compute-bound branch begins at b₀ = α / (g − 1/β) and grows from there.
        gain = self.seconds_per_byte - 1 / self.all_reduce.bandwidth_bytes_per_s
        if gain > 0:
            best = min(best, self.all_reduce.alpha_s / gain)
        return float(np.clip(best, self.gradient_bytes / self.layers, self.gradient_bytes))


def closed_form(profile: BackwardProfile, network: AllReduceModel) -> ClosedForm:
    """Returns the course's quantities: B, T_c, L (embeddings, blocks) and a(x) = α + x/β."""
    return ClosedForm(
        gradient_bytes=profile.total_bytes,
        compute_s=profile.backward_s,
        layers=len(set(map(_layer, profile.names))),
        all_reduce=as_alpha_beta(network),
    )


def _layer(parameter: str) -> str:
    """Returns the layer of a parameter: its name up to the first number, or else its module."""
    numbered = re.match(r"(?:.*?\.)?\d+(?=\.)", parameter)
    return numbered[0] if numbered else parameter.rpartition(".")[0] or parameter
