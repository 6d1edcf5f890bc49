"""A backward pass under DDP bucket by bucket: when each is ready, reduced and copied back.

On the CPU the profiler watches, so that DDP takes the path it always takes; what the profiler adds
shows in ``backward_ms`` beside the passes that nobody watched. On a GPU a communication hook marks
CUDA events, as all-reduces are kernels of one stream there: a bucket's starts when it is ready and
the one before is done. The same marks serve a latency hook, whose thread no profiler sees.
"""

# No "from __future__ import annotations": DDP looks at the annotations of its hook.
import logging
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile, record_function

from common.benchmarks.buckets.ddp_record import describe_buckets
from common.benchmarks.buckets.latency_hook import LatencyHook
from common.benchmarks.steps import FixedBatchStep
from common.errors import UserError
from common.runtime import torch_internals
from common.runtime.group.process_group import Worker
from common.runtime.timing import clock_for
from common.traces.bucket_trace import BACKWARD, BUCKET_FIELDS, bucket_rows
from common.traces.profiler_trace import Event, read_trace
from common.training.recording.tracing import silence_profiler

TIMELINE_COLUMNS = ("bucket_cap_mib", "iteration", "rank", *BUCKET_FIELDS)
"""``bucket-timeline.csv``: one row per cap, watched pass, rank and bucket (counted from 0)."""

logger = logging.getLogger(__name__)


class BucketMarks:
    """Stands in for a DDP instance where a hook is registered: marks what the hook is given.

    A bucket is marked when DDP hands it over, which is when it is ready, and when it comes back;
    the marks are the clock's, CUDA events on a GPU and readings on the CPU. It is for hooks that
    serve one bucket after another. By itself it exchanges as DDP does.

    Over gloo on a GPU a bucket comes back on a thread of gloo's, whose stream is the one that
    computes: a mark there is reached after all kernels of the backward pass that wait in it. So the
    mark is made in a stream of its own. It says when the CPU has the sum; the copy of it to the
    device, which comes next, is not in it.
    """

    def __init__(self, ddp: DistributedDataParallel, worker: Worker) -> None:
        self.ddp, self.worker, self.clock = ddp, worker, clock_for(worker.device)
        over_gloo = worker.device.type == "cuda" and worker.backend == "gloo"
        self._own_stream = torch.cuda.Stream(worker.device) if over_gloo else None
        self.clear()

    def clear(self) -> None:
        """Forgets the marks of the pass before, as a new one begins."""
        self._sizes: dict[int, int] = {}
        self._ready: dict[int, object] = {}
        self._done: dict[int, object] = {}

    def register_comm_hook(self, state: object, hook: Callable) -> None:
        """Registers ``hook`` with the DDP instance, with marks around what it does."""

        def marked(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
            buffer, index = bucket.buffer(), bucket.index()
            self._sizes[index] = buffer.numel() * buffer.element_size()
            self._ready[index] = self.clock.mark()

            def back(future: torch.futures.Future) -> torch.Tensor:
                stream = self._own_stream
                with torch.cuda.stream(stream) if stream is not None else nullcontext():
                    self._done[index] = self.clock.mark()
                return future.value()

            return hook(state, bucket).then(back)

        self.ddp.register_comm_hook(state, marked)

    def average(self, _: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Averages a bucket over the ranks, as DDP does without a hook."""
        buffer = bucket.buffer().div_(self.worker.world_size)
        work = dist.all_reduce(buffer, async_op=True)
        return work.get_future().then(lambda future: future.value()[0])

    def rows(self, start: object, end: object) -> list[dict]:
        """Returns rows of BUCKET_FIELDS for the latest pass, from its marks ``start`` to ``end``.

        A bucket's exchange starts when the one before is done. Copies and launches are not seen:
        only the last bucket's copy back shows, in the pass's end.
        """

        def since_ms(mark: object) -> float:
            return self.clock.elapsed_s(start, mark) * 1e3

        unknown = float("nan")
        whole_ms = since_ms(end)
        compute_end_ms = max(since_ms(mark) for mark in self._ready.values())
        rows: list[dict] = []
        # Buckets go one after another: an exchange starts when its bucket is ready and the one
        # before is done (free_ms). Copies back begin after the computation, in the same order, and
        # the last one ends with the pass.
        free_ms, copied_ms = 0.0, compute_end_ms
        for index in sorted(self._sizes):
            ready_ms, end_ms = since_ms(self._ready[index]), since_ms(self._done[index])
            copied_ms = whole_ms if index == max(self._sizes) else max(copied_ms, end_ms)
            moments = (ready_ms, max(ready_ms, free_ms), end_ms, copied_ms)
            values = (index, self._sizes[index], 0, unknown, unknown, *moments)
            values += (compute_end_ms, whole_ms)
            rows.append(dict(zip(BUCKET_FIELDS, values, strict=True)))
            free_ms = end_ms
        return rows


def watch(
    ddp: DistributedDataParallel,
    model: nn.Module,
    step: FixedBatchStep,
    *,
    passes: int,
    warmup_steps: int,
    hook: LatencyHook | None = None,
) -> list[dict]:
    """Watches passes of a fresh DDP instance, bucket by bucket. All ranks call it.

    Args:
        ddp: the instance, without a hook.
        model: ``ddp``, or ``ddp`` compiled.
        passes: number of passes to keep.
        warmup_steps: steps before these, in which DDP forms its buckets.
        hook: delays every bucket; it is registered here.

    Returns rows of TIMELINE_COLUMNS, but for the cap and the rank; none where a trace does not show
    what it should (a warning says so).
    """
    torch_internals.record_every_step(ddp)
    marks = None
    if hook or step.device.type == "cuda":
        marks = BucketMarks(ddp, step.worker)
        if hook:
            hook.register(marks)
        else:
            marks.register_comm_hook(None, marks.average)
    for _ in range(warmup_steps):
        watched_step(model, step)
    if marks:
        pass_rows = [marked_pass(marks, model, step) for _ in range(passes)]
    else:
        traces = [traced_pass(model, step) for _ in range(passes)]
        # DDP's record of rebuilt buckets is up to date one step after they were rebuilt.
        buckets = describe_buckets(torch_internals.ddp_record(ddp), step)
        sizes_bytes = [row["size_bytes"] for row in buckets]
        try:
            pass_rows = [bucket_rows(events, sizes_bytes) for events in traces]
        except UserError as error:
            logger.warning("bucket timeline left out: %s", error)
            pass_rows = []
    step.zero_grad()
    return [{"iteration": i} | row for i, rows in enumerate(pass_rows) for row in rows]


def watched_step(
    model: nn.Module, step: FixedBatchStep, watching: AbstractContextManager | None = None
) -> tuple[object, object]:
    """Runs a training step, whose backward pass all ranks begin together; returns its two marks.

    ``watching`` is entered before the ranks meet, and left when the pass is over.
    """
    clock = clock_for(step.device)
    step.zero_grad()
    step.worker.barrier()
    loss = step.forward(model)
    clock.wait()
    with watching or nullcontext():
        step.worker.barrier()
        start = clock.mark()
        with record_function(BACKWARD):
            loss.backward()
        end = clock.mark()
    step.optimize()
    clock.wait()
    return start, end


def marked_pass(marks: BucketMarks, model: nn.Module, step: FixedBatchStep) -> list[dict]:
    """Runs a step and returns the buckets of its backward pass, from the marks of a hook."""
    marks.clear()
    return marks.rows(*watched_step(model, step))


def traced_pass(model: nn.Module, step: FixedBatchStep) -> list[Event]:
    """Runs a step and returns the profiler's events of its backward pass."""
    silence_profiler(step.device)
    profiler = profile(activities=[ProfilerActivity.CPU], record_shapes=True)
    watched_step(model, step, profiler)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return read_trace(path)
