"""Passes that a prediction of DDP starts from: without DDP and watched, and forward under DDP.

The other inputs of a prediction are measured in ``common.runtime.group.collective_timing``
(all-reduces by size) and in ``overlap_lab`` (DDP's bookkeeping, and contention).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from torch.nn.parallel import DistributedDataParallel

from common.benchmarks.steps import FixedBatchStep
from common.runtime.group.gradient_marks import hold_for_marks, ready_marks, ready_seconds
from common.runtime.timing import clock_for

PASS_COLUMNS = ("rank", "iteration", "forward_time_ms", "backward_time_ms", "optimizer_time_ms")
"""``local-step-times.csv``: one row per rank and step without DDP."""


@dataclass(frozen=True)
class WatchedPass:
    """Seconds of a forward and of a backward pass, and from the latter's start to each gradient."""

    forward_s: float
    backward_s: float
    ready_s: dict[str, float]

    def row(self, iteration: int, optimizer_s: float = 0.0) -> dict:
        """Returns this rank's row of PASS_COLUMNS, but for the rank."""
        return {
            "iteration": iteration,
            "forward_time_ms": self.forward_s * 1e3,
            "backward_time_ms": self.backward_s * 1e3,
            "optimizer_time_ms": optimizer_s * 1e3,
        }


@dataclass(frozen=True)
class PassMarks:
    """Marks of a forward and a backward pass; those of gradients hold until the next pass."""

    forward: tuple[Any, Any]
    backward: tuple[Any, Any]
    gradients: dict[str, Any]

    def read(self, clock: Any) -> WatchedPass:
        """Returns the times between the marks, once the device is done."""
        return WatchedPass(
            forward_s=clock.elapsed_s(*self.forward),
            backward_s=clock.elapsed_s(*self.backward),
            ready_s=ready_seconds(self.gradients, self.backward[0], clock),
        )


def watch_pass(
    step: FixedBatchStep,
    clock: Any,
    gradients: dict[str, Any],
    *,
    barrier_before: Literal["forward", "backward"],
) -> PassMarks:
    """Runs a forward and a backward pass without DDP, all ranks at the same time.

    Args:
        step: step that is timed; its gradients are not reset here.
        gradients: marks of the gradients, from ``ready_marks``.
        barrier_before: the pass that ranks begin together, on an idle device. Where that is the
            backward pass, its times do not contain another rank's slow forward pass.
    """
    gradients.clear()
    if barrier_before == "forward":
        step.worker.barrier()
        clock.wait()
    forward_start = clock.mark()
    loss = step.forward()
    forward_end = clock.mark()
    if barrier_before == "backward":
        clock.wait()
        step.worker.barrier()
    hold_for_marks(step.model, clock)
    backward_start = clock.mark()
    loss.backward()
    backward_end = clock.mark()
    return PassMarks(
        forward=(forward_start, forward_end),
        backward=(backward_start, backward_end),
        gradients=gradients,
    )


def passes_without_ddp(
    step: FixedBatchStep,
    *,
    warmup: int,
    passes: int,
    barrier_before: Literal["forward", "backward"],
) -> Iterator[tuple[int, WatchedPass]]:
    """Yields each pass with its number, which is below 0 in warm-up; ``watch_pass`` runs it."""
    clock = clock_for(step.device)
    with ready_marks(step.model, clock) as gradients:
        for iteration in range(-warmup, passes):
            step.zero_grad()
            marks = watch_pass(step, clock, gradients, barrier_before=barrier_before)
            clock.wait()
            yield iteration, marks.read(clock)


def crowd(size_bytes: int, gradient_bytes: int) -> int:
    """Returns how many all-reduces of a size to launch at once, to time several in flight.

    Fewer where each takes long, and 1, which is none in flight with another, where two would be
    more than all gradients.
    """
    return max(1, min(4, 2 * (gradient_bytes // (2 * size_bytes))))


def forward_passes(
    ddp: DistributedDataParallel, step: FixedBatchStep, *, warmup: int, passes: int
) -> Iterator[tuple[int, float]]:
    """Yields the number and the seconds of each measured forward pass under DDP.

    Buffers are broadcast in it. With no backward pass there are no buckets.
    """
    clock = clock_for(step.device)
    for iteration in range(-warmup, passes):
        step.worker.barrier()
        start = clock.mark()
        step.forward(ddp)
        end = clock.mark()
        clock.wait()
        if iteration >= 0:
            yield iteration, clock.elapsed_s(start, end)
