"""How long a training step takes under DDP and FSDP, from what was measured without either.

What goes in was measured apart: the step as one rank computes it without exchanging anything,
beside the other ranks (for FSDP on a mesh of one rank, with its hooks and copies), and the time of
each collective by itself. An all-gather is measured, not taken for half an all-reduce: between two
hosts gloo's takes three quarters of one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from common.perfmodel.collectives import AllReduceModel
from common.perfmodel.communication import Collective
from common.perfmodel.profile import NO_COSTS, BackwardProfile, DdpCosts
from common.perfmodel.simulator import simulate_backward


@dataclass(frozen=True)
class LocalStep:
    """A step without communication, in the order of its parts.

    Attributes:
        before_s: data, all forward passes, and the backward passes of all micro-batches but the
            last one.
        profile: the last backward pass, in which gradients are exchanged.
        update_s: clipping and optimizer.
    """

    before_s: float
    profile: BackwardProfile
    update_s: float

    @property
    def total_s(self) -> float:
        return self.before_s + self.profile.backward_s + self.update_s


@dataclass(frozen=True)
class StepPrediction:
    """A predicted step; what is not computation is communication that nothing hides."""

    strategy: str
    total_s: float
    computation_s: float

    @property
    def exposed_communication_s(self) -> float:
        return self.total_s - self.computation_s


def predict_ddp_step(
    local: LocalStep,
    network: AllReduceModel,
    bucket_cap_mb: float | None = None,
    costs: DdpCosts = NO_COSTS,
) -> StepPrediction:
    """A step of DDP: its last backward pass as ``simulate_backward`` has it, all else as it was."""
    backward = simulate_backward(local.profile, network, bucket_cap_mb, costs=costs)
    total_s = local.before_s + backward.total_s + local.update_s
    return StepPrediction("DDP", total_s, local.total_s)


def predict_fsdp_step(
    strategy: str,
    alone_s: float,
    update_s: float,
    collectives: Sequence[Collective],
    time_s: Callable[[Collective], float],
    backend: str,
) -> StepPrediction:
    """A step of FSDP2 with these collectives.

    On gloo nothing overlaps: FSDP2 waits for each collective where it is called. On NCCL it
    gathers ahead, and what is predicted is the least that can be seen: the communication that
    does not fit beside the computation.

    Args:
        strategy: its name.
        alone_s: the step on a mesh of one rank, beside the other ranks: hooks and copies, too.
        update_s: clipping and optimizer, of which a rank does its part.
        collectives: of the step.
        time_s: seconds of one of them by itself.
        backend: ``gloo`` or ``nccl``.
    """
    shards = max((c.group_size for c in collectives if c.operation == "all_gather"), default=1)
    computation_s = alone_s - update_s * (1 - 1 / shards)
    communication_s = sum(c.count * time_s(c) for c in collectives)
    if backend == "nccl":
        communication_s = max(0.0, communication_s - computation_s)
    return StepPrediction(strategy, computation_s + communication_s, computation_s)
