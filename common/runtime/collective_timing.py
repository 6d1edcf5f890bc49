"""How long all-reduces take, and whether they add up: what every measurement of them rests on."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

from common.errors import RunFailed
from common.runtime.process_group import Worker
from common.runtime.timing import clock_for


def time_sequence(
    buffers: Sequence[Tensor], worker: Worker, group: dist.ProcessGroup | None = None
) -> list[float]:
    """Seconds of each buffer's all-reduce, the next starting when the last is done.

    Ranks start together and then keep step through the all-reduces themselves, with no idle
    time between two calls in which a link could save up credit.
    """
    clock = clock_for(worker.device)
    worker.barrier(group)
    clock.wait()
    marks = [clock.mark()]
    for buffer in buffers:
        dist.all_reduce(buffer, group=group)
        marks.append(clock.mark())
    clock.wait()
    return [clock.elapsed_s(a, b) for a, b in itertools.pairwise(marks)]


def time_in_flight(buffers: Sequence[Tensor], worker: Worker) -> float:
    """Seconds from the launch of the first all-reduce to the end of the last, launched at once."""
    clock = clock_for(worker.device)
    worker.barrier()
    clock.wait()
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
