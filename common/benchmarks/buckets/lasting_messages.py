"""All-reduces that last: how many of which size, launched at once, take a given time."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from common.runtime.group.collective_timing import time_in_flight
from common.runtime.group.process_group import Worker

MOST = 1000
"""Upper bound on the all-reduces launched at once."""
BUFFERS = 8


def gradient_dtype(parameters: Iterable[nn.Parameter]) -> torch.dtype:
    """Returns the dtype that most bytes of the parameters' gradients have, in which DDP sends them.

    A sum in 16 bits takes another time than one of as many bytes in float32.
    """
    sizes: Counter[torch.dtype] = Counter()
    for parameter in parameters:
        sizes[parameter.dtype] += parameter.nbytes
    return max(sizes, key=sizes.__getitem__)


class LastingMessages:
    """Messages in a few buffers that are taken in turn, and how long they last.

    Args:
        worker: this rank; all ranks ask for the same sizes.
        memory_bytes: memory of all buffers together.
        dtype: type of all messages.
    """

    def __init__(
        self, worker: Worker, memory_bytes: int, dtype: torch.dtype = torch.float32
    ) -> None:
        self.worker, self.memory_bytes, self.dtype = worker, memory_bytes, dtype

    def make(self, size_bytes: int, count: int) -> list[Tensor]:
        """Makes ``count`` messages of zeros in at least 2 buffers: gloo reduces two at a time."""
        item_bytes, device = self.dtype.itemsize, self.worker.device
        numel = max(1, size_bytes // item_bytes)
        buffers = max(2, min(BUFFERS, self.memory_bytes // (item_bytes * numel)))
        made = [
            torch.zeros(numel, dtype=self.dtype, device=device) for _ in range(min(count, buffers))
        ]
        return [made[i % len(made)] for i in range(count)]

    def lasting(self, size_bytes: int, duration_s: float) -> int:
        """Returns how many of a size take ``duration_s`` together, at most MOST.

        A few in a row say little of the small ones, so more are tried until they do take it.
        """
        count = 4
        while True:
            messages = self.make(size_bytes, count)
            took_s = min(time_in_flight(messages, self.worker) for _ in range(2))
            took_s = max(self.worker.gather(took_s))
            if took_s >= duration_s or count == MOST:
                return count
            # As many as would do at this rate, with 10 % in reserve, but at most 8 times as many as
            # were tried: a few small ones say too little for more.
            more = math.ceil(1.1 * count * duration_s / took_s)
            count = min(MOST, max(count + 1, min(more, 8 * count)))
