"""One model's backward pass beside all-reduces: DDP's bookkeeping, and contention.

The arms, none of them a bucketing that predictions are judged on:

- ``local``: the backward pass alone.
- ``bookkeeping``: DDP over a group of one rank: gradients are copied into a bucket, divided and
  copied back, and nothing is sent. Copying back is all that it does once computation has ended, so
  its own record of that time tells it apart from the rest (``ddp_record``).
- ``buckets``: the same with a bucket for each gradient, which gives what a bucket takes from the
  host. A GPU is idle when these passes begin, so that launches show, and one bucket is timed in
  this way, too. ``messages`` is the number of buckets.
- ``launched``: the backward pass launches all-reduces of one size as DDP does: each when as many
  bytes of gradients are ready. What they take from the pass is theirs, launches included.
- ``continuous``: the backward pass beside all-reduces of one size without pause, more of them than
  it lasts, with how many were done when it ended; and ``all_reduce``, the same all-reduces alone.
  These tell how much longer all-reduces take. Small ones may be done too soon on GPUs, as Python
  launches them more slowly: then nothing is known of their own speed (``BesideMessages``).

In the other arms a GPU is held back equally long before the pass: whatever the host launches is
hidden alike.

An all-reduce without pause takes less from the pass than one of DDP's: half to three quarters of it
on two cores that compute and send (``data/RESULTS.md``).
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from common.benchmarks.buckets.ddp_record import exposed_s
from common.benchmarks.buckets.lasting_messages import MOST, LastingMessages, gradient_dtype
from common.benchmarks.steps import FixedBatchStep
from common.runtime import torch_internals
from common.runtime.group.collective_timing import start_together, time_in_flight
from common.runtime.group.gradient_marks import ready_marks, ready_seconds
from common.runtime.group.one_rank_group import own_group
from common.runtime.timing import clock_for
from common.training.ddp import SETTLING_STEPS, make_ddp

OVERLAP_TIME_COLUMNS = (
    "arm",
    "message_bytes",
    "messages",
    "round",
    "iteration",
    "rank",
    "backward_time_ms",
    "all_reduce_time_ms",
    "messages_done",
    "copy_out_time_ms",
    "gradient_bytes",
)
"""``overlap-times.csv``; ``messages_done``: all-reduces that ended during the backward pass;
``copy_out_time_ms``: in ``bookkeeping``, of all gradients back from their bucket."""
LASTING = 1.6
SHARES = (512, 64, 8)
"""Divisors of the size of all gradients, which give those of the all-reduces beside a pass."""
BUFFER_BYTES = 2**30
"""Memory of the messages beside a pass; as much as the gradients take, if that is more."""
LAUNCHES = MOST + 100
"""Launches for which the device is held back before a pass: all-reduces, and some of its own."""
ONE_BUCKET, EACH_ALONE = 2**20, 2**-20
"""Bucket caps in MiB: all gradients in one bucket, and each in its own (a byte)."""


@dataclass(frozen=True)
class OverlapArm:
    """One condition: ``messages`` all-reduces or buckets of ``size_bytes`` in the backward pass."""

    kind: str
    size_bytes: int = 0
    messages: int = 0


@dataclass(frozen=True)
class OverlappedPass:
    """Seconds of one backward pass, and from its start to the last all-reduce's end.

    ``completed``: all-reduces that ended during the backward pass; ``copy_out_s``: the time in
    which DDP over one rank copied gradients back, NaN where there is no DDP.
    """

    backward_s: float
    all_reduce_s: float
    completed: int = 0
    copy_out_s: float = float("nan")


class OverlapLab:
    """One model's backward pass, to be run beside all-reduces of any size."""

    def __init__(self, step: FixedBatchStep) -> None:
        self.step = step
        self.worker = worker = step.worker
        self.clock = clock_for(worker.device)
        self.gradient_bytes = sum(p.numel() * p.element_size() for p in step.model.parameters())
        self.one_rank_group = own_group(worker)
        self.messages = LastingMessages(
            worker,
            memory_bytes=max(BUFFER_BYTES, self.gradient_bytes),
            dtype=gradient_dtype(step.model.parameters()),
        )
        self.ready_order, self.backward_s = self._watch_backward()

    def arms(self, message_bytes: Sequence[int] = ()) -> tuple[OverlapArm, ...]:
        """Returns the arms, with so many all-reduces of each size that they outlast the pass.

        Alone they take LASTING times as long as the pass, which they make longer. By default they
        are of ``SHARES`` of all gradients. One larger than all gradients is never launched as they
        become ready, so that arm is left out.
        """
        total, least = self.gradient_bytes, self.messages.dtype.itemsize
        arms = [OverlapArm("local"), OverlapArm("bookkeeping")]
        # A CPU is never held back: one bucket is timed by ``bookkeeping``.
        counts = [1] * self.clock.runs_ahead + [len(self.ready_order)]
        arms += [OverlapArm("buckets", total // buckets, buckets) for buckets in counts]
        for size in dict.fromkeys(message_bytes or [max(least, total // s) for s in SHARES]):
            count = self.messages.lasting(size, LASTING * self.backward_s)
            if size <= total:
                arms.append(OverlapArm("launched", size, min(MOST, total // size)))
            arms += [OverlapArm("continuous", size, count), OverlapArm("all_reduce", size, count)]
        return tuple(arms)

    def visit(self, arm: OverlapArm, round_: int, *, passes: int, warmup: int = 1) -> list[dict]:
        """Runs ``passes`` backward passes under an arm's condition, after ``warmup`` others.

        All-reduces alone are run once: that time is the sum of many. Returns this rank's rows of
        OVERLAP_TIME_COLUMNS, but for the rank.
        """
        if arm.kind in ("bookkeeping", "buckets"):
            warmup = max(SETTLING_STEPS, warmup)
        if arm.kind == "all_reduce":
            passes = 1
        measured = self._run(arm, warmup + passes)[warmup:]
        return [
            {
                "arm": arm.kind,
                "message_bytes": arm.size_bytes,
                "messages": arm.messages,
                "round": round_,
                "iteration": iteration,
                "backward_time_ms": timed.backward_s * 1e3,
                "all_reduce_time_ms": timed.all_reduce_s * 1e3,
                "messages_done": timed.completed,
                "copy_out_time_ms": timed.copy_out_s * 1e3,
                "gradient_bytes": self.gradient_bytes,
            }
            for iteration, timed in enumerate(measured)
        ]

    def _run(self, arm: OverlapArm, count: int) -> list[OverlappedPass]:
        """Runs ``count`` backward passes under the arm's condition."""
        if arm.kind in ("bookkeeping", "buckets"):
            passes = self._passes_of_ddp(arm, count)
            gc.collect()  # DDP's hooks go with it
            return passes
        messages = self.messages.make(arm.size_bytes, arm.messages)
        if arm.kind == "all_reduce":
            return [
                OverlappedPass(0.0, time_in_flight(messages, self.worker), arm.messages)
                for _ in range(count)
            ]
        if arm.kind == "launched":
            return [self._timed_backward(as_ready=messages) for _ in range(count)]
        return [self._timed_backward(at_start=messages) for _ in range(count)]

    def _passes_of_ddp(self, arm: OverlapArm, count: int) -> list[OverlappedPass]:
        """Runs passes of DDP over this rank alone, and one more: each is recorded in the next."""
        if arm.kind == "buckets":
            model = self._on_one_rank(EACH_ALONE if arm.messages > 1 else ONE_BUCKET)
            return [self._timed_backward(model, held=False) for _ in range(count)]
        model = self._on_one_rank(ONE_BUCKET)
        torch_internals.record_every_step(model)
        passes, copied_s = [], []
        for _ in range(count + 1):
            passes.append(self._timed_backward(model))
            copied_s.append(exposed_s(torch_internals.ddp_record(model)))
        return [
            replace(timed, copy_out_s=after)
            for timed, after in zip(passes[:-1], copied_s[1:], strict=True)
        ]

    def _timed_backward(
        self,
        model: torch.nn.Module | None = None,
        *,
        held: bool = True,
        at_start: Sequence[Tensor] = (),
        as_ready: Sequence[Tensor] = (),
    ) -> OverlappedPass:
        """Runs a backward pass of ``model`` (by default the step's own) beside all-reduces.

        Those ``at_start`` are launched before the pass begins, those ``as_ready`` in it. The device
        is ``held`` back until the host is ahead.
        """
        self.step.zero_grad()
        loss = self.step.forward(model)
        start_together(self.worker, self.clock, LAUNCHES, launch_included=not held)
        start = self.clock.mark()
        works = [dist.all_reduce(message, async_op=True) for message in at_start]
        before = sum(work.is_completed() for work in works)
        with launched_as_ready(self.step.model.parameters(), as_ready) as launched:
            backward_start = self.clock.mark()
            loss.backward()
            backward_end = self.clock.mark()
        works += launched
        if self.worker.device.type == "cuda":
            torch.cuda.current_stream().synchronize()  # the host is ahead of the backward pass
        completed = sum(work.is_completed() for work in works) - before
        for work in works:
            work.wait()
        end = self.clock.mark()
        self.clock.wait()
        elapsed = self.clock.elapsed_s
        return OverlappedPass(elapsed(backward_start, backward_end), elapsed(start, end), completed)

    def _watch_backward(self) -> tuple[list[torch.nn.Parameter], float]:
        """Returns parameters in the order they are ready, and a pass's seconds; warms up, too."""
        with ready_marks(self.step.model, self.clock) as marks:
            for _ in range(10):
                start = self.clock.mark()
                backward_s = self._timed_backward().backward_s
            ready_s = ready_seconds(marks, start, self.clock)
        parameters = dict(self.step.model.named_parameters())
        order = [parameters[name] for name in sorted(ready_s, key=ready_s.__getitem__)]
        return order, max(self.worker.gather(backward_s))

    def _on_one_rank(self, bucket_cap_mb: float) -> DistributedDataParallel:
        """Makes DDP over this rank alone."""
        return make_ddp(
            self.step.model,
            self.worker.device,
            group=self.one_rank_group,
            bucket_cap_mb=bucket_cap_mb,
        )


@contextmanager
def launched_as_ready(
    parameters: Iterable[torch.nn.Parameter], messages: Sequence[Tensor]
) -> Iterator[list[dist.Work]]:
    """Launches messages in the backward pass inside the block, in their order; yields the launched.

    Each is launched when as many bytes of gradients are ready as it and those before it have.
    """
    due = list(accumulate(message.numel() * message.element_size() for message in messages))
    works: list[dist.Work] = []
    ready_bytes = 0

    def note(parameter: torch.nn.Parameter) -> None:
        nonlocal ready_bytes
        ready_bytes += parameter.numel() * parameter.element_size()
        while len(works) < len(due) and ready_bytes >= due[len(works)]:
            works.append(dist.all_reduce(messages[len(works)], async_op=True))

    with ExitStack() as hooks:
        for parameter in parameters if messages else ():
            hooks.enter_context(parameter.register_post_accumulate_grad_hook(note))
        yield works
