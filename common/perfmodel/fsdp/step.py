"""The time of a training step under FSDP, from what was measured without communication.

What goes in was measured apart: the step on a mesh of one rank, with its hooks and copies, beside
the other ranks; and the time of each collective by itself. An all-gather is measured, not taken for
half an all-reduce: between two hosts gloo's takes three quarters of one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from common.perfmodel.fsdp.communication import Collective


@dataclass(frozen=True)
class StepPrediction:
    """A predicted step; what is not computation is exposed communication."""

    strategy: str
    total_s: float
    computation_s: float

    @property
    def exposed_communication_s(self) -> float:
        return self.total_s - self.computation_s


def predict_fsdp_step(
    strategy: str,
    alone_s: float,
    update_s: float,
    collectives: Sequence[Collective],
    time_s: Callable[[Collective], float],
    backend: str,
) -> StepPrediction:
    """Predicts a step of FSDP2 with these collectives.

    On gloo nothing overlaps: FSDP2 waits for each collective where it is called. On NCCL it
    gathers ahead, and the prediction is a lower bound: only communication that does not fit beside
    the computation is exposed.

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
