"""How long a training step takes under DDP and FSDP, from what was measured without either.

Three measurements go in: the step as one rank computes it without exchanging anything, beside the
other ranks; an all-reduce's time by size; and the collectives of the strategy
(``common.perfmodel.communication``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from common.perfmodel.collectives import AllReduceModel
from common.perfmodel.communication import Collective, wire_bytes
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


def collective_time_s(collective: Collective, network: AllReduceModel, backend: str) -> float:
    """Seconds of one such collective: an all-reduce of its size, in proportion to what is sent.

    A ring all-gather is the second half of an all-reduce and sends half as much; so does a
    reduce-scatter on NCCL, where gloo's is an all-reduce.
    """
    whole = Collective("all_reduce", "", collective.size_bytes, 1, collective.group_size)
    share = wire_bytes(collective, backend) / wire_bytes(whole, backend)
    return float(network.time_s(collective.size_bytes)) * share


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
    local: LocalStep,
    strategy: str,
    collectives: Sequence[Collective],
    network: AllReduceModel,
    backend: str,
) -> StepPrediction:
    """A step of FSDP2 with these collectives; each rank updates its part of the parameters only.

    On gloo nothing overlaps: FSDP2 waits for each collective where it is called. On NCCL it
    gathers ahead, and what is predicted is the least that can be seen: the communication that
    does not fit beside forward and backward passes.
    """
    shards = max((c.group_size for c in collectives if c.operation == "all_gather"), default=1)
    computation_s = local.total_s - local.update_s * (1 - 1 / shards)
    communication_s = sum(c.count * collective_time_s(c, network, backend) for c in collectives)
    if backend == "nccl":
        beside_s = local.before_s + local.profile.backward_s
        communication_s = max(0.0, communication_s - beside_s)
    return StepPrediction(strategy, computation_s + communication_s, computation_s)
