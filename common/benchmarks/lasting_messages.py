"""All-reduces that last: how many of which size, launched at once, take a given time."""

from __future__ import annotations

import logging
import math

import torch
from torch import Tensor

from common.runtime.collective_timing import time_in_flight
from common.runtime.process_group import Worker

MOST = 1000
"""All-reduces launched at once, at most."""
FEW = 200
"""At most on GPUs, where a larger size may be chosen: Python launches so many within 10 ms."""
BUFFERS = 8

logger = logging.getLogger(__name__)


class LastingMessages:
    """Float32 messages in a few buffers that are taken in turn, and how long they last.

    Args:
        worker: this rank; all ranks ask for the same sizes.
        memory_bytes: for all buffers together.
    """

    def __init__(self, worker: Worker, memory_bytes: int) -> None:
        self.worker, self.memory_bytes = worker, memory_bytes

    def make(self, size_bytes: int, count: int) -> list[Tensor]:
        """``count`` messages of zeros, in at least 2 buffers: gloo reduces two at a time."""
        numel = max(1, size_bytes // 4)
        buffers = max(2, min(BUFFERS, self.memory_bytes // (4 * numel)))
        made = [torch.zeros(numel, device=self.worker.device) for _ in range(min(count, buffers))]
        return [made[i % len(made)] for i in range(count)]

    def lasting(self, size_bytes: int, duration_s: float, most: int = MOST) -> tuple[int, float]:
        """How many of a size take ``duration_s`` together, at most ``most``; the seconds they take.

        A few in a row say little of the small ones, so more are tried until they do take it.
        """
        count = 4
        while True:
            messages = self.make(size_bytes, count)
            took_s = min(time_in_flight(messages, self.worker) for _ in range(2))
            took_s = max(self.worker.gather(took_s))
            if took_s >= duration_s or count == most:
                return count, took_s
            more = math.ceil(1.1 * count * duration_s / took_s)
            count = min(most, max(count + 1, min(more, 8 * count)))

    def few_lasting(self, size_bytes: int, duration_s: float) -> tuple[int, int]:
        """A size, this or a larger one, of which few take ``duration_s``; and how many do.

        Few are FEW on GPUs, and MOST on the CPU, where launching costs a message no time. Where so
        many of the largest size that memory permits are done too soon, they are what there is, with
        a warning.
        """
        largest = max(size_bytes, self.memory_bytes // 2 // 4 * 4)
        most = FEW if self.worker.device.type == "cuda" else MOST
        while True:
            count, took_s = self.lasting(size_bytes, duration_s, most)
            if took_s >= duration_s:
                return size_bytes, count
            if size_bytes == largest:
                break
            size_bytes = min(largest, size_bytes * max(2, math.ceil(duration_s / took_s)))
        if self.worker.is_main:
            logger.warning(
                "%d all-reduces of %.0f MiB, the largest that memory permits, take %.3f s and not "
                "the %.3f s wanted: they may be done before the backward pass is, and then do not "
                "tell how much slower it makes them",
                count,
                size_bytes / 2**20,
                took_s,
                duration_s,
            )
        return size_bytes, count
