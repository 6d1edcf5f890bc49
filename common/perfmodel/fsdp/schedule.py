"""The time of a step of FSDP2, from the order of its collectives, or from its measured parts.

On NCCL a unit is gathered while the one before it computes; in the backward pass the next unit is
gathered and the last one's gradients are reduced beside the computation of the one between.
Collectives run one after another in the order in which they are issued. So nothing hides the first
gathers and the reduce-scatters of the last block and the root. Source of the order:
``_fsdp_state.py`` and ``_fsdp_param_group.py`` in torch/distributed/fsdp/_fully_shard/ (implicit
forward and explicit backward prefetch of one unit; more, or none, where modules are told). How
often a unit is gathered:
``communication.step_collectives``.

What ``predict_fsdp_step`` takes was measured apart: the step on a mesh of one rank, with its hooks
and copies, beside the other ranks; and the time of each collective by itself. An all-gather is
measured, not taken for half an all-reduce: between two hosts gloo's takes three quarters of one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from common.perfmodel.ddp.recurrence import Overlap, many_cases
from common.perfmodel.fsdp.communication import Collective


@dataclass(frozen=True)
class Issue:
    """A collective of a micro-batch.

    It is issued where segment ``ready`` of the computation begins, and segment ``limit`` cannot
    begin before it has ended; None: nothing in this micro-batch needs it. See ``schedule``.
    """

    operation: str
    unit: str
    ready: int
    limit: int | None


@dataclass(frozen=True)
class Exchange:
    """The parts of a micro-batch that gather parameters, and whether it reduces gradients.

    ``replicated``: what was reduced in a group is reduced over the groups next (HYBRID_SHARD).
    """

    root: bool = False
    forward: bool = False
    backward: bool = False
    reduce: bool = False
    replicated: bool = False


def micro_batches(
    strategy: str, count: int, *, reduces_each: bool = False
) -> list[tuple[int, Exchange]]:
    """Returns (how many, kind) of the micro-batches of a step, in order.

    With ``reduces_each`` every one gathers and reduces as a step of its own does, which is what
    FSDP does where nobody tells it which is the last.
    """
    full = strategy != "SHARD_GRAD_OP"
    hybrid = strategy == "HYBRID_SHARD"
    alone = Exchange(root=True, forward=True, backward=full, reduce=True, replicated=hybrid)
    if count == 1:
        return [(1, alone)]
    if reduces_each:
        return [(1, alone), (count - 2, alone), (1, alone)]
    first = replace(alone, reduce=False, replicated=False)
    middle = replace(first, root=False, forward=full)
    return [(1, first), (count - 2, middle), (1, replace(alone, root=False, forward=full))]


def schedule(blocks: Sequence[str], exchange: Exchange, prefetch: int = 1) -> list[Issue]:
    """Returns the collectives of a micro-batch in the order in which they are served.

    Segments of its computation are, in order: forward of each block, of the head; backward of the
    head, of each block.

    Args:
        blocks: the unit of each block, in the order of the forward pass.
        exchange: what is gathered and reduced.
        prefetch: units that are gathered ahead of the one that computes. In the forward pass it is
            at least one: the host, which waits for nothing, comes to the next unit in time.
    """
    layers = len(blocks)
    head, end = layers, 2 * layers + 2
    issues = []
    if exchange.root:
        issues.append(Issue("all_gather", "root", 0, 0))
    if exchange.forward:
        issues += [
            Issue("all_gather", block, max(0, i - max(1, prefetch)), i)
            for i, block in enumerate(blocks)
        ]
    backward = blocks[::-1]
    first = head + 2  # where the last block's backward pass begins
    if exchange.backward:
        issues += [
            Issue("all_gather", block, head + 1, first + i)
            for i, block in enumerate(backward[:prefetch])
        ]
    for finished in range(layers):  # blocks whose backward pass is over
        if exchange.reduce and finished:
            issues += _reductions(backward[finished - 1], first + finished, exchange)
        if exchange.backward and finished + prefetch < layers:
            at = first + finished
            issues.append(Issue("all_gather", backward[finished + prefetch], at, at + prefetch))
    if exchange.reduce:
        for unit in (*backward[-1:], "root"):
            issues += _reductions(unit, end, exchange)
    return issues


def _reductions(unit: str, ready: int, exchange: Exchange) -> list[Issue]:
    scatter = Issue("reduce_scatter", unit, ready, None)
    return [scatter, replace(scatter, operation="all_reduce")] if exchange.replicated else [scatter]


@dataclass(frozen=True)
class ShardedModel:
    """A sharded model's computation and collectives in a micro-batch; arrays over cases, seconds.

    Attributes:
        blocks: the unit of each block, in the order of the forward pass; equal blocks have one.
        forward_s, backward_s: unit → its pass; ``root`` is all that is in no block.
        collective_s: (operation, unit) → duration of the collective alone.
        copy_s: (operation, unit) → duration of copying what was gathered out of the buffer, or
            what is to be reduced into one.
        prefetch: as in ``schedule``.
        forward_only: units of ``blocks`` without a backward pass, for which none is gathered.
    """

    blocks: tuple[str, ...]
    forward_s: Mapping[str, NDArray]
    backward_s: Mapping[str, NDArray]
    collective_s: Mapping[tuple[str, str], NDArray]
    copy_s: Mapping[tuple[str, str], NDArray]
    prefetch: int = 1
    forward_only: frozenset[str] = frozenset()

    def simulate(self, exchange: Exchange, compute_slowdown: NDArray | float) -> Overlap:
        """Simulates one micro-batch, from its start until its last collective ends."""
        issues = [
            issue
            for issue in schedule(self.blocks, exchange, self.prefetch)
            if issue.unit not in self.forward_only or issue.ready < len(self.blocks)
        ]
        # levels[i] is the computation done when segment i begins; the last one is all of it.
        levels = np.cumsum(self._segments_s(issues), axis=0)
        levels = np.concatenate([np.zeros_like(levels[:1]), levels])
        limits = [issue.limit if issue.limit is not None else len(levels) - 1 for issue in issues]
        # What stops computation is the first collective not yet done that it needs.
        limits = np.minimum.accumulate(limits[::-1])[::-1] if issues else np.array([], dtype=int)
        return many_cases(
            work_s=levels[-1],
            ready_s=levels[[issue.ready for issue in issues]],
            alone_s=[self.collective_s[issue.operation, issue.unit] for issue in issues],
            limit_s=levels[limits],
            compute_slowdown=compute_slowdown,
        )

    def _segments_s(self, issues: list[Issue]) -> NDArray:
        """Returns the seconds of each segment with the copies that belong to it, by case."""
        forward = [self.forward_s[unit] for unit in (*self.blocks, "root")]
        backward = [self.backward_s[unit] for unit in ("root", *self.blocks[::-1])]
        seconds = np.array(np.broadcast_arrays(*forward, *backward), dtype=float)
        for issue in issues:
            if issue.operation == "all_reduce":
                continue  # in place
            segment = issue.limit if issue.operation == "all_gather" else issue.ready - 1
            seconds[segment] += self.copy_s[issue.operation, issue.unit]
        return seconds


def simulate_step(
    model: ShardedModel,
    strategy: str,
    micro_batch_counts: NDArray,
    compute_slowdown: NDArray,
    *,
    reduces_each: bool = False,
) -> tuple[NDArray, NDArray, NDArray]:
    """Simulates a step's passes and returns (total, slowed, exposed) in seconds, over cases.

    Micro-batches are simulated apart: nothing is gathered ahead from one to the next.

    Args:
        micro_batch_counts: (cases,) number of micro-batches of a step.
        compute_slowdown: (cases,) computation beside a collective takes this many times longer.
        reduces_each: as in ``micro_batches``.
    """
    # Each kind of micro-batch is simulated once, for all cases, and counts as often as a case has
    # it: the only one; or the first, the last, and the middle one count − 2 times.
    sums = [np.zeros(len(micro_batch_counts)) for _ in range(3)]
    several = micro_batch_counts > 1
    kinds = []
    if (~several).any():
        kinds += [(count * ~several, kind) for count, kind in micro_batches(strategy, 1)]
    if several.any():
        first, middle, last = micro_batches(strategy, 2, reduces_each=reduces_each)
        kinds += [(several, first[1]), (several, last[1])]
        if (micro_batch_counts > 2).any():
            kinds.append((np.maximum(micro_batch_counts - 2, 0), middle[1]))
    for count, kind in kinds:
        overlap = model.simulate(kind, compute_slowdown)
        parts = (overlap.total_s, overlap.slowed_s, overlap.exposed_s)
        sums = [total + count * part for total, part in zip(sums, parts, strict=True)]
    return sums[0], sums[1], sums[2]


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
        alone_s: seconds of the step on a mesh of one rank, beside the other ranks: hooks and
            copies, too.
        update_s: seconds of clipping and optimizer, of which a rank does its part.
        time_s: function that gives the seconds of one collective by itself.
        backend: ``gloo`` or ``nccl``.
    """
    shards = max((c.group_size for c in collectives if c.operation == "all_gather"), default=1)
    computation_s = alone_s - update_s * (1 - 1 / shards)
    communication_s = sum(c.count * time_s(c) for c in collectives)
    if backend == "nccl":
        communication_s = max(0.0, communication_s - computation_s)
    return StepPrediction(strategy, computation_s + communication_s, computation_s)
