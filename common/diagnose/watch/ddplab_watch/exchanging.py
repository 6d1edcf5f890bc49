"""An exchange of gradients as DDP makes it, in a pass that leaves the script's DDP alone.

Where one rank is late, the others wait in the exchange, and their cores are free to send. Among
ranks that are equally fast nobody waits, and passes and exchange hinder each other. What that costs
is measured by passes that send gradients in the script's own buckets while others are computed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class Exchange:
    """Sends gradients to all ranks in buckets, in the order in which they are computed.

    Args:
        sizes_bytes: bytes of the buckets, as they were seen; the same on all ranks.
        parameters: parameters that are trained.
        group: the ranks.
        send: sends a bucket by all-reduce, without waiting; by default through ``group``.

    Raises RuntimeError: the buckets are not those of these parameters, or of several types.
    """

    def __init__(
        self,
        sizes_bytes: Sequence[int],
        parameters: Sequence[Tensor],
        group: dist.ProcessGroup,
        send: Callable[[Tensor], Any] | None = None,
    ) -> None:
        if len({parameter.dtype for parameter in parameters}) != 1:
            raise RuntimeError("gradients are of several types")
        width = parameters[0].element_size()
        numel = sum(parameter.numel() for parameter in parameters)
        ends = [size // width for size in itertools.accumulate(sizes_bytes)]
        if numel not in ends:
            raise RuntimeError("the buckets of an exchange were not seen")
        # A step may hold several exchanges: the first is enough.
        self.ends = ends[: ends.index(numel) + 1]
        self.send = send or partial(dist.all_reduce, group=group, async_op=True)
        self.ranks = dist.get_world_size(group)
        self.sizes_bytes = [*sizes_bytes[: len(self.ends)]]
        self.sent = torch.zeros(numel, dtype=parameters[0].dtype, device=parameters[0].device)

    def begin(self) -> None:
        """Begins a pass."""
        self.filled = 0
        self.copies: list[tuple[Tensor, Tensor]] = []
        self.works: list[Any] = []

    def ready(self, gradient: Tensor) -> None:
        """Takes a gradient, and sends the buckets that are full with it."""
        slot = self.sent[self.filled : self.filled + gradient.numel()].view_as(gradient)
        torch.mul(gradient, 1 / self.ranks, out=slot)
        self.copies.append((gradient, slot))
        self.filled += gradient.numel()
        self._send(self.filled)

    def finish(self) -> None:
        """Sends what is left, so that no rank waits in vain; returns when all has come back."""
        self._send(self.ends[-1])
        for work in self.works:
            work.wait()
        for gradient, slot in self.copies:
            gradient.copy_(slot)
        self.copies, self.works = [], []

    def _send(self, filled: int) -> None:
        for bucket in range(len(self.works), len(self.ends)):
            if self.ends[bucket] > filled:
                return
            start = self.ends[bucket - 1] if bucket else 0
            self.works.append(self.send(self.sent[start : self.ends[bucket]]))
