"""How long all-reduces take, and whether they add up: what every measurement of them rests on."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from common.errors import RunFailed
from common.runtime.process_group import Worker
from common.runtime.timing import LAUNCH_S, clock_for


def start_together(
    worker: Worker,
    clock: Any,
    launches: int,
    group: dist.ProcessGroup | None = None,
    *,
    launch_included: bool = False,
) -> None:
    """Return on all ranks at the same time, with the device idle or, on NCCL, held back.

    Held back, the device begins when the host has launched what is to be timed, so that no time of
    launching counts. GPUs are not held equally long, as their clocks differ; an all-reduce of one
    element, in the stream itself, lets them go on together. gloo's collectives make the host wait,
    so there it cannot be ahead.

    Args:
        launches: how many operations are launched next.
        launch_included: leave the device idle: the time of the first launch then counts.
    """
    clock.wait()
    worker.barrier(group)
    if clock.runs_ahead and worker.backend == "nccl" and not launch_included:
        together = torch.zeros(1, device=worker.device)
        clock.hold((launches + 1) * LAUNCH_S)
        dist.all_reduce(together, group=group)


def time_one_by_one(
    calls: Sequence[Callable[[], object]],
    worker: Worker,
    group: dist.ProcessGroup | None = None,
    *,
    launch_included: bool = False,
) -> list[float]:
    """Seconds of each collective of ``group``, the next starting when the last is done.

    Ranks start together and then keep step through the collectives themselves, with no idle
    time between two calls in which a link could save up credit.
    """
    clock = clock_for(worker.device)
    start_together(worker, clock, len(calls), group, launch_included=launch_included)
    marks = [clock.mark()]
    for call in calls:
        call()
        marks.append(clock.mark())
    clock.wait()
    return [clock.elapsed_s(a, b) for a, b in itertools.pairwise(marks)]


def time_sequence(
    buffers: Sequence[Tensor],
    worker: Worker,
    group: dist.ProcessGroup | None = None,
    *,
    launch_included: bool = False,
) -> list[float]:
    """Seconds of each buffer's all-reduce, the next starting when the last is done."""
    calls = [functools.partial(dist.all_reduce, buffer, group=group) for buffer in buffers]
    return time_one_by_one(calls, worker, group, launch_included=launch_included)


def time_in_flight(
    buffers: Sequence[Tensor], worker: Worker, *, launch_included: bool = False
) -> float:
    """Seconds from the launch of the first all-reduce to the end of the last, launched at once."""
    clock = clock_for(worker.device)
    start_together(worker, clock, len(buffers), launch_included=launch_included)
    start = clock.mark()
    for work in [dist.all_reduce(buffer, async_op=True) for buffer in buffers]:
        work.wait()
    end = clock.mark()
    clock.wait()
    return clock.elapsed_s(start, end)


def check_sum(buffer: Tensor, worker: Worker) -> None:
    """Sum ones of the even ranks; raise RunFailed unless every element is their number.

    That is exact in 16-bit formats, too, up to 512 ranks. The buffer is left filled with zeros.
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
