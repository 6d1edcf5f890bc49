"""The compute side of a prediction: when each gradient of a backward pass is ready."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from common.errors import UserError


@dataclass(frozen=True)
class BackwardProfile:
    """Gradients in the order they become ready, without any communication.

    Attributes:
        sizes_bytes: int64, bytes on the wire.
        ready_s: float, seconds from the start of the backward pass; never decreasing.
        backward_s: seconds until the backward pass ends, at least the last ready time.
        kinds: dtype of each gradient; only equal ones share a bucket.
        registration: place of each parameter in ``module.parameters()``.
        assumptions: sentences on what was not measured and had to be assumed.
        rank_ready_s: float [ranks, gradients], each rank's own ready times where ranks differ;
            a bucket is then ready when its last gradient is on the last rank. Without it,
            ``ready_s`` is taken for the slowest rank's.
    """

    names: tuple[str, ...]
    sizes_bytes: NDArray
    ready_s: NDArray
    backward_s: float
    kinds: tuple[str, ...] = ()
    registration: tuple[int, ...] = ()
    assumptions: tuple[str, ...] = field(default=())
    rank_ready_s: NDArray | None = None

    def __post_init__(self) -> None:
        count = len(self.names)
        if not count:
            raise UserError("a backward profile needs at least one gradient")
        if len(self.sizes_bytes) != count or len(self.ready_s) != count:
            raise UserError("a backward profile needs a size and a ready time for each gradient")
        if not (np.isfinite(self.ready_s).all() and np.isfinite(self.backward_s)):
            raise UserError("gradient-ready times must be finite numbers")
        if (np.diff(self.ready_s) < 0).any() or self.ready_s[0] < 0:
            raise UserError("gradient-ready times must not decrease and not be negative")
        if self.backward_s < self.ready_s[-1]:
            raise UserError(
                f"the backward pass ends at {self.backward_s} s, before its last gradient is "
                f"ready at {self.ready_s[-1]} s"
            )
        if min(self.sizes_bytes) < 1:
            raise UserError("a gradient has at least 1 byte")
        if self.rank_ready_s is not None:
            self._check_ranks(np.asarray(self.rank_ready_s))

    def _check_ranks(self, ranks: NDArray) -> None:
        if ranks.ndim != 2 or ranks.shape[1] != len(self.names) or not len(ranks):
            raise UserError(
                f"ready times of the ranks have shape {ranks.shape}; expected (ranks, "
                f"{len(self.names)}), one for each gradient"
            )
        if not np.isfinite(ranks).all() or (ranks < 0).any():
            raise UserError("ready times of the ranks must be finite and not negative")
        if (late := ranks.max()) > self.backward_s:
            raise UserError(
                f"the backward pass ends at {self.backward_s} s, before a rank's last gradient is "
                f"ready at {float(late)} s"
            )

    @property
    def slowest_ready_s(self) -> NDArray:
        """Returns the seconds at which each gradient is ready on the last rank."""
        return self.ready_s if self.rank_ready_s is None else np.max(self.rank_ready_s, axis=0)

    @property
    def total_bytes(self) -> int:
        """Returns B, the bytes of all gradients."""
        return int(self.sizes_bytes.sum())

    def scaled(self, compute: float = 1.0, size: float = 1.0) -> BackwardProfile:
        """Scales computation time by ``compute`` and gradient sizes by ``size``."""
        sizes = np.maximum(1, np.rint(self.sizes_bytes * size)).astype(np.int64)
        return replace(
            self,
            sizes_bytes=sizes,
            ready_s=self.ready_s * compute,
            backward_s=self.backward_s * compute,
            rank_ready_s=None if self.rank_ready_s is None else self.rank_ready_s * compute,
        )


SecondsBySize = tuple[tuple[float, ...], tuple[float, ...]]
"""Message sizes in bytes, ascending, and seconds for each."""
TERMS = ("copy_in", "copy_out", "launch", "communication_slowdown", "compute_slowdown")
"""Terms that ``DdpCosts.without`` can switch off."""


@dataclass(frozen=True)
class DdpCosts:
    """The costs that DDP adds to computation, besides waiting for the network; none by default.

    Attributes:
        copy_in_s_per_byte: copying a gradient into its bucket and dividing it by the world size.
        copy_out_s_per_byte: copying a reduced bucket back into the gradients.
        communication_slowdown: r: an all-reduce beside computation takes this many times longer.
        compute_slowdown: s: computation beside an all-reduce takes this many times longer.
        lost_compute: (sizes in bytes, seconds): computation that an all-reduce of each size costs
            beside it, where this was measured (``of_size``); replaces ``compute_slowdown``.
        delays: (sizes in bytes, seconds): how much longer an all-reduce of each size takes beside
            computation, where this was measured; replaces ``communication_slowdown``. It is no
            factor, as an all-reduce waits for the processor and its network gets no slower.
        launch_s: time that one bucket takes from the thread that computes, its all-reduce's launch
            included; 0 where ``lost_compute`` holds it, as the pass launched these all-reduces.
    """

    copy_in_s_per_byte: float = 0.0
    copy_out_s_per_byte: float = 0.0
    communication_slowdown: float = 1.0
    compute_slowdown: float = 1.0
    lost_compute: SecondsBySize | None = None
    launch_s: float = 0.0
    delays: SecondsBySize | None = None

    def __post_init__(self) -> None:
        if not min(self.copy_in_s_per_byte, self.copy_out_s_per_byte) >= 0:
            raise UserError("copy costs must not be negative")
        if not min(self.compute_slowdown, self.communication_slowdown) >= 1:
            raise UserError("slowdowns must be at least 1")
        if self.delays and not min(self.delays[1]) >= 0:
            raise UserError("the delay of an all-reduce must not be negative")
        if self.lost_compute and not min(self.lost_compute[1]) >= 0:
            raise UserError("computation lost to an all-reduce must not be negative")
        if not self.launch_s >= 0:
            raise UserError("the cost of launching an all-reduce must not be negative")

    def without(self, *terms: str) -> DdpCosts:
        """Returns the same costs without some of ``TERMS``; slowdowns with what was measured.

        Raises UserError for a term that does not exist.
        """
        off = {
            "copy_in": {"copy_in_s_per_byte": 0.0},
            "copy_out": {"copy_out_s_per_byte": 0.0},
            "launch": {"launch_s": 0.0},
            "communication_slowdown": {"communication_slowdown": 1.0, "delays": None},
            "compute_slowdown": {"compute_slowdown": 1.0, "lost_compute": None},
        }
        changes: dict = {}
        for term in terms:
            if term not in off:
                raise UserError(f"no term {term!r} to switch off; there are {', '.join(TERMS)}")
            changes |= off[term]
        return replace(self, **changes)

    def as_bucket_view(self) -> DdpCosts:
        """Returns the costs under ``gradient_as_bucket_view=True``: nothing is copied back.

        Copying in, with division, remains: ``zero_grad`` sets gradients to None by default, so
        each backward pass makes them anew, outside of the buckets (``mark_variable_ready_dense``
        and ``finalize_bucket_dense`` in reducer.cpp).
        """
        return replace(self, copy_out_s_per_byte=0.0)

    def beside_computation(self, sizes_bytes: NDArray, alone_s: NDArray) -> tuple[NDArray, NDArray]:
        """Returns how long all-reduces take beside computation, and how much of it is then done.

        Both in seconds; they take ``alone_s`` with nothing beside them.
        """
        if self.delays is None:
            duration = alone_s * self.communication_slowdown
        else:
            duration = alone_s + of_size(self.delays, sizes_bytes)
        if self.lost_compute is None:
            return duration, duration / self.compute_slowdown
        lost = of_size(self.lost_compute, sizes_bytes)
        duration = np.maximum(duration, lost)
        return duration, duration - lost


def of_size(curve: SecondsBySize, sizes_bytes: NDArray) -> NDArray:
    """Interpolates seconds by size: the first below, and in proportion to the last beyond."""
    known_bytes, known_s = curve
    beyond = known_s[-1] * np.asarray(sizes_bytes) / known_bytes[-1]
    within = np.interp(sizes_bytes, known_bytes, known_s)
    return np.where(sizes_bytes > known_bytes[-1], beyond, within)


NO_COSTS = DdpCosts()
