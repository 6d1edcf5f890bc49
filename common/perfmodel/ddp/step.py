"""A whole training step of DDP on one clock: forward and backward passes, exchange, update.

A step of k micro-batches computes k forward and k backward passes. Under ``no_sync`` all backward
passes but the last leave gradients where they are; the last one is simulated bucket by bucket
(``model``). Without ``no_sync`` every backward pass exchanges (``exchanges = k``)::

    step = before + k·forward + (k − e)·backward + e·T(buckets, network) + update

What goes in is measured without DDP, on ranks that compute at the same time. Before the step that
this describes DDP has run a few: buckets are rebuilt by then.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from common.errors import UserError
from common.perfmodel.buckets import DdpOptions
from common.perfmodel.ddp.comm_hooks import CastHook
from common.perfmodel.ddp.timeline import BackwardTimeline

BUCKET_VIEW = "gradient_as_bucket_view"
"""The name of DDP's argument, under which a run's settings and a watched script's facts have it."""


@dataclass(frozen=True)
class StepParts:
    """The parts of a step beside the exchanging backward pass, measured without DDP; seconds.

    Attributes:
        forward_s: the forward pass of one micro-batch.
        update_s: the optimizer, and whatever else follows the backward pass.
        before_s: data, ``zero_grad`` and all else that precedes the first forward pass.
        local_backward_s: a backward pass that exchanges nothing, adding to the gradients that
            are there; None takes the profile's.
    """

    forward_s: float
    update_s: float
    before_s: float = 0.0
    local_backward_s: float | None = None

    def __post_init__(self) -> None:
        parts_s = (self.forward_s, self.update_s, self.before_s, self.local_backward_s or 0.0)
        if not all(seconds >= 0 for seconds in parts_s):
            raise UserError("the parts of a step must not be negative")


@dataclass(frozen=True)
class StepOptions:
    """The settings of a step.

    Attributes:
        ddp, gradient_as_bucket_view, hook: as for ``DdpModel.backward``.
        accumulation: micro-batches of a step.
        exchanges: backward passes that exchange gradients: 1 under ``no_sync``.
    """

    ddp: DdpOptions = field(default_factory=DdpOptions)
    accumulation: int = 1
    exchanges: int = 1
    gradient_as_bucket_view: bool = False
    hook: CastHook | None = None

    def __post_init__(self) -> None:
        if min(self.accumulation, self.exchanges) < 1:
            raise UserError("a step has at least 1 micro-batch and 1 exchange")
        if self.exchanges > self.accumulation:
            raise UserError(
                f"{self.exchanges} exchanges in a step of {self.accumulation} micro-batches"
            )


@dataclass(frozen=True)
class StepSpan:
    """A part of the step; seconds from its start. ``micro_batch`` is None outside of the passes."""

    part: str
    micro_batch: int | None
    start_s: float
    end_s: float


@dataclass(frozen=True)
class StepTimeline:
    """A predicted step.

    Attributes:
        spans: parts of the step in order, without gaps: ``before``, ``forward``, ``backward``,
            ``exchange`` (a backward pass that exchanges) and ``update``.
        backward: the backward pass that exchanges, on its own clock, which starts with the
            ``exchange`` span.
        exchanges: number of backward passes that exchange in the step.
        local_exchange_s: the exchanging backward pass, had it exchanged nothing.
    """

    spans: tuple[StepSpan, ...]
    backward: BackwardTimeline
    exchanges: int
    local_exchange_s: float

    @property
    def total_s(self) -> float:
        """Returns the seconds of the whole step."""
        return self.spans[-1].end_s

    @property
    def exposed_communication_s(self) -> float:
        """Returns the seconds of communication that no computation hides, in all exchanges."""
        return self.exchanges * self.backward.exposed_communication_s

    @property
    def overhead_s(self) -> float:
        """Returns the seconds that DDP adds: exposed communication, copies and contention."""
        return self.exchanges * (self.backward.total_s - self.local_exchange_s)

    @property
    def without_ddp_s(self) -> float:
        """Returns the seconds of the same step on a rank that exchanges nothing."""
        return self.total_s - self.overhead_s


def step_timeline(
    parts: StepParts, options: StepOptions, backward: BackwardTimeline, backward_alone_s: float
) -> StepTimeline:
    """Puts a step together from its parts and a predicted backward pass.

    ``backward_alone_s`` is its duration, had it exchanged nothing.
    """
    local_s = backward_alone_s if parts.local_backward_s is None else parts.local_backward_s
    first_exchange = options.accumulation - options.exchanges
    lengths: list[tuple[str, int | None, float]] = [("before", None, parts.before_s)]
    for micro_batch in range(options.accumulation):
        lengths.append(("forward", micro_batch, parts.forward_s))
        if micro_batch < first_exchange:
            lengths.append(("backward", micro_batch, local_s))
        else:
            lengths.append(("exchange", micro_batch, backward.total_s))
    lengths.append(("update", None, parts.update_s))
    spans, now = [], 0.0
    for part, micro_batch, length in lengths:
        spans.append(StepSpan(part, micro_batch, now, now + length))
        now += length
    return StepTimeline(tuple(spans), backward, options.exchanges, backward_alone_s)
