"""Times all-reduces and checks their sums, for every measurement of all-reduces."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from ddplab_watch.marks import LAUNCH_S, Clock
from torch import Tensor

from common.errors import RunFailed
from common.runtime.group.process_group import Worker
from common.runtime.timing import clock_for

ALL_REDUCE_COLUMNS = (
    "mode",
    "total_elements",
    "total_bytes",
    "in_flight",
    "round",
    "iteration",
    "rank",
    "time_ms",
)
"""Columns of ``allreduce-samples.csv``: one row per rank and sample. In the mode ``sequential`` a
sample is the time of one all-reduce. In the mode ``in_flight`` it is the time of several that are
launched at once, divided by their number."""


def start_together(worker: Worker, clock: Clock, launches: int, *, launch_included: bool) -> None:
    """Returns on all ranks at the same time, with the device idle or, but for gloo, held back.

    A device that is held back begins only when the host has launched all that is timed, so that
    launching costs no measured time. GPUs are not held equally long, as their clocks differ; an
    all-reduce of one element, in the stream itself, lets them continue together. gloo's
    collectives make the host wait, so over gloo it cannot run ahead.

    Args:
        launches: number of operations that are launched next.
        launch_included: leave the device idle: the time of the first launch then counts.
    """
    clock.wait()
    worker.barrier()
    if clock.runs_ahead and worker.backend != "gloo" and not launch_included:
        together = torch.zeros(1, device=worker.device)
        clock.hold((launches + 1) * LAUNCH_S)
        dist.all_reduce(together)


def time_one_by_one(
    calls: Sequence[Callable[[], object]], worker: Worker, *, launch_included: bool = False
) -> list[float]:
    """Returns the seconds of each collective, the next starting when the last is done.

    Ranks start together and then keep step through the collectives themselves, with no idle
    time between two calls in which a link could save up credit.
    """
    clock = clock_for(worker.device)
    start_together(worker, clock, len(calls), launch_included=launch_included)
    marks = [clock.mark()]
    for call in calls:
        call()
        marks.append(clock.mark())
    clock.wait()
    return [clock.elapsed_s(a, b) for a, b in itertools.pairwise(marks)]


def time_sequence(
    buffers: Sequence[Tensor], worker: Worker, *, launch_included: bool = False
) -> list[float]:
    """Returns the seconds of each buffer's all-reduce, the next starting when the last is done."""
    calls = [functools.partial(dist.all_reduce, buffer) for buffer in buffers]
    return time_one_by_one(calls, worker, launch_included=launch_included)


def collective_call(
    operation: str,
    size_bytes: int,
    ranks: int,
    worker: Worker,
    *,
    dtype: torch.dtype = torch.float32,
    group: dist.ProcessGroup | None = None,
) -> Callable[[], object]:
    """Returns the call of a collective on buffers of its own.

    Args:
        operation: all_gather, reduce_scatter or all_reduce.
        size_bytes: bytes of the whole message, of which a rank's part is one of ``ranks``.
        ranks: ranks of the group.
        group: the ranks that exchange; by default all.
    """
    part_numel = max(1, size_bytes // dtype.itemsize // ranks)
    part = torch.zeros(part_numel, dtype=dtype, device=worker.device)
    message = torch.zeros(part_numel * ranks, dtype=dtype, device=worker.device)
    calls = {
        "all_gather": functools.partial(dist.all_gather_into_tensor, message, part, group=group),
        "reduce_scatter": functools.partial(dist.reduce_scatter_tensor, part, message, group=group),
        "all_reduce": functools.partial(dist.all_reduce, message, group=group),
    }
    return calls[operation]


def time_repeated(call: Callable[[], object], times: int, worker: Worker) -> list[dict]:
    """Returns ``iteration`` and ``time_ms`` of each call; one more, before them, is not timed."""
    times_s = time_one_by_one([call] * (1 + times), worker)[1:]
    return [{"iteration": i, "time_ms": time_s * 1e3} for i, time_s in enumerate(times_s)]


def time_in_flight(
    buffers: Sequence[Tensor], worker: Worker, *, launch_included: bool = False
) -> float:
    """Returns the seconds from the launch of the first all-reduce to the end of the last.

    All are launched at once.
    """
    clock = clock_for(worker.device)
    start_together(worker, clock, len(buffers), launch_included=launch_included)
    start = clock.mark()
    for work in [dist.all_reduce(buffer, async_op=True) for buffer in buffers]:
        work.wait()
    end = clock.mark()
    clock.wait()
    return clock.elapsed_s(start, end)


def check_sum(buffer: Tensor, worker: Worker) -> None:
    """Checks an all-reduce: even ranks give ones, odd ranks zeros, so the sum is known.

    It is exact in 16-bit formats, too, up to 512 ranks. The buffer is left filled with zeros.

    Raises:
        RunFailed: an element is not the number of even ranks.
    """
    buffer.fill_((worker.rank + 1) % 2)
    dist.all_reduce(buffer)
    expected = (worker.world_size + 1) // 2
    if not bool((buffer == expected).all()):
        raise RunFailed(
            f"all-reduce of {buffer.numel():,} elements is wrong on rank {worker.rank}: "
            f"elements are not all {expected}"
        )
    buffer.zero_()


@dataclass(frozen=True)
class TimedCalls:
    """The all-reduces of one size that are timed in a round.

    Attributes:
        alone: calls one after another, after ``warmup`` that are not timed.
        in_flight: number of all-reduces that are launched at once, a batch.
        batches: timed batches, after one for warm-up; 0 for none at all.
    """

    alone: int
    warmup: int = 1
    in_flight: int = 1
    batches: int = 0


def time_all_reduces(
    numel: int,
    dtype: torch.dtype,
    worker: Worker,
    round_: int,
    timed: TimedCalls,
    *,
    checked: bool = False,
    launch_included: bool = False,
) -> list[dict]:
    """Times all-reduces of one size in one round: one after another, then several in flight.

    Args:
        numel: elements (of ``dtype``) of each message.
        checked: check first that a sum is right.
        launch_included: see ``start_together``.

    Returns:
        this rank's rows of ALL_REDUCE_COLUMNS, but for the rank.

    Raises:
        RunFailed: ``checked``, and the sum is wrong.
    """
    buffers = [
        torch.zeros(numel, dtype=dtype, device=worker.device) for _ in range(timed.in_flight)
    ]
    if checked:
        check_sum(buffers[0], worker)
    sequence = buffers[:1] * (timed.warmup + timed.alone)
    alone_s = time_sequence(sequence, worker, launch_included=launch_included)
    together_s = [
        time_in_flight(buffers, worker, launch_included=launch_included)
        for _ in range(1 + timed.batches if timed.batches else 0)
    ]
    samples_s = {
        ("sequential", 1): alone_s[timed.warmup :],
        ("in_flight", timed.in_flight): [time_s / timed.in_flight for time_s in together_s[1:]],
    }
    return [
        {
            "mode": mode,
            "total_elements": numel,
            "total_bytes": numel * dtype.itemsize,
            "in_flight": count,
            "round": round_,
            "iteration": iteration,
            "time_ms": time_s * 1e3,
        }
        for (mode, count), times_s in samples_s.items()
        for iteration, time_s in enumerate(times_s)
    ]
