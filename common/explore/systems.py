"""The systems that the explorer starts from, and what each is on any number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from common.errors import UserError
from common.perfmodel.collectives import AllReduceModel, AlphaBeta, MeasuredAllReduce
from common.perfmodel.ddp.bucketings import Bucketing, distinct_bucketings
from common.perfmodel.ddp.step import StepParts
from common.perfmodel.model import DdpModel
from common.perfmodel.whatif import scale_ranks

CURVE_BYTES = np.geomspace(1024, 2**30, 81)
"""Sizes at which a computed all-reduce becomes a curve that can be stretched."""


@dataclass(frozen=True)
class RunCommand:
    """``ddplab predict`` of a run: the flags that name its tables."""

    flags: tuple[str, ...]


@dataclass(frozen=True)
class ClusterCommand:
    """``ddplab predict`` of a cluster; ``is_this`` is False where it only resembles the system.

    ``flags`` name the model, its micro-batch and its precision.
    """

    cluster: str
    flags: tuple[str, ...]
    is_this: bool = True


@dataclass(frozen=True)
class Placed:
    """A system on so many ranks: the model of its backward pass, and the rest of its step."""

    model: DdpModel
    parts: StepParts


@dataclass(frozen=True, eq=False)
class System:
    """A model on a network, from which the explorer starts.

    Attributes:
        name: name in the list of systems.
        caption: hardware, date and source; recorded, of the reader's own, or computed.
        ranks: the ranks that its all-reduces were measured on, or are computed for at first.
        on: returns the system on this number of ranks, at least 2.
        alone: the step of one rank that exchanges nothing, with its backward pass.
        command: the ``ddplab predict`` that answers for it.
        caps_mib: the caps to search; None for every distinct bucketing.
        measured_ms: backward passes that were measured here, by bucket cap in MiB.
    """

    name: str
    caption: str
    ranks: int
    on: Callable[[int], Placed]
    alone: StepParts
    command: RunCommand | ClusterCommand
    caps_mib: tuple[float, ...] | None = None
    measured_ms: tuple[tuple[float, float], ...] = ()

    @cached_property
    def start(self) -> Placed:
        """Returns the system on the ranks that it starts with."""
        return self.on(self.ranks)

    @cached_property
    def bucketings(self) -> tuple[Bucketing, ...]:
        """Returns all bucketings to search; they depend on the gradients' sizes alone."""
        return distinct_bucketings(self.start.model.profile, self.caps_mib)

    @cached_property
    def line(self) -> AlphaBeta:
        """Returns α and β of the all-reduces on the ranks that the system starts with.

        Raises:
            UserError: the largest message is not slower than the fastest.
        """
        curve = as_curve(self.start.model.network)
        fastest = int(curve.times_s.argmin())
        longer_s = curve.times_s[-1] - curve.times_s[fastest]
        if longer_s <= 0:
            raise UserError(f"{self.name}: the largest message is not slower than the fastest")
        more_bytes = curve.sizes_bytes[-1] - curve.sizes_bytes[fastest]
        return AlphaBeta(float(curve.times_s[fastest]), float(more_bytes / longer_s))

    @property
    def gradient_mib(self) -> float:
        """Returns the size of all gradients in MiB."""
        return self.start.model.profile.total_bytes / 2**20

    def alone_s(self, compute: float = 1.0) -> float:
        """Computes the step of one rank that exchanges nothing.

        Args:
            compute: Factor on the time of both passes.
        """
        passes = self.alone.forward_s + (self.alone.local_backward_s or 0.0)
        return passes * compute + self.alone.update_s


def on_a_ring(model: DdpModel, parts: StepParts, ranks: int) -> Callable[[int], Placed]:
    """Returns ``System.on`` of a system whose all-reduces are known on ``ranks`` ranks.

    On other numbers they are a ring's over the same links (``scale_ranks``). Computation stays as
    it is.
    """

    def on(count: int) -> Placed:
        if count == ranks:
            return Placed(model, parts)

        def scaled(network: AllReduceModel) -> AllReduceModel:
            return scale_ranks(network, measured_ranks=ranks, ranks=count)

        crowded = scaled(model.crowded_network) if model.crowded_network else None
        there = replace(model, network=scaled(model.network), crowded_network=crowded)
        return Placed(there, parts)

    return on


def as_curve(network: AllReduceModel) -> AllReduceModel:
    """Returns a network that ``collectives.scaled`` can stretch; a computed one as a curve."""
    if isinstance(network, AlphaBeta | MeasuredAllReduce):
        return network
    return MeasuredAllReduce(CURVE_BYTES, network.time_s(CURVE_BYTES))
