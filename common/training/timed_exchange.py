"""DDP's exchange of gradients, with the moment noted at which a rank's own gradients are ready.

A step's time says nothing of who waited for whom: DDP makes all ranks end together. What tells is
how long a rank computed before its last bucket was full, and how long the exchange took after that.
The rank that comes last waits for nobody, so the shortest such time is communication, and what the
others took longer was waiting. That needs no common clock.

A rank that has run out of memory must not leave the others in an all-reduce: it sends NaN in place
of the buckets it owes. All ranks see that in the last bucket, and that they must talk about it.
"""

# No "from __future__ import annotations": DDP looks at the annotations of its hook.
import gc
import inspect
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from common.errors import RunFailed
from common.runtime.process_group import Worker
from common.runtime.timing import clock_for

SETTLING_STEPS = 3
"""Backward passes after which DDP's buckets stay as they are."""


class TimedExchange:
    """A model under DDP whose buckets go through here. All ranks make it together.

    Args:
        model: the module to wrap, on ``worker``'s device.
        worker: this rank.
        bucket_cap_mb: DDP's, in MiB.
        slow_factor: let this rank compute so many times as long, by sleeping before its last
            bucket; to see whether a plan adapts to it. On a CPU only.
    """

    def __init__(
        self,
        model: nn.Module,
        worker: Worker,
        bucket_cap_mb: float | None = None,
        slow_factor: float = 1.0,
    ) -> None:
        self.model, self.worker, self.bucket_cap_mb = model, worker, bucket_cap_mb
        self.slow_factor = slow_factor
        self.clock = clock_for(worker.device)
        self.ready: Any = None
        """The mark of this rank's last gradient in the newest pass."""
        self._pattern: list[tuple[int, torch.dtype]] = []
        self._sent: list[tuple[int, torch.dtype]] = []
        self._last: torch.Tensor | None = None
        self._began = 0.0
        self.wrap()

    def wrap(self) -> None:
        """Wrap the model anew, as after a step that broke off in the middle."""
        gpu = self.worker.device.type == "cuda"
        self.ready = self._last = None
        if hasattr(self, "ddp"):
            self.ddp._remove_autograd_hooks()  # those of the instance before
            del self.ddp
            gc.collect()  # its buckets, before there are new ones
            if gpu:
                torch.cuda.empty_cache()
        self.ddp = DistributedDataParallel(
            self.model,
            device_ids=[self.worker.device] if gpu else None,
            bucket_cap_mb=self.bucket_cap_mb,
            gradient_as_bucket_view=True,
            **no_buffer_sync(),  # a collective that a rank without memory would owe, too
        )
        self.ddp.register_comm_hook(None, self._exchange)

    def begin(self) -> None:
        """A pass with an exchange begins: no bucket has been sent."""
        self._sent, self._last, self.ready = [], None, None
        self._began = time.perf_counter()

    def slow_down(self) -> None:
        """Sleep as long as a rank that is ``slow_factor`` times as slow would still compute."""
        if self.slow_factor > 1:
            time.sleep((self.slow_factor - 1) * (time.perf_counter() - self._began))

    def _exchange(self, _: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """DDP's own exchange: divide by the number of ranks, then add up."""
        buffer = bucket.buffer()
        if bucket.is_last():
            self.slow_down()
            self.ready = self.clock.mark()
        buffer.div_(self.worker.world_size)
        work = dist.all_reduce(buffer, async_op=True)
        self._sent.append((buffer.numel(), buffer.dtype))
        if bucket.is_last():
            self._pattern, self._last = self._sent, buffer
        return work.get_future().then(lambda done: done.value()[0])

    def give_up(self) -> None:
        """Send NaN in place of the buckets that this rank still owes the others.

        Raises RunFailed where it owes none: the others have what they need, and go on.
        """
        if self._last is not None:
            raise RunFailed(
                f"rank {self.worker.rank} ran out of memory after its last bucket was sent"
            )
        for numel, dtype in self._pattern[len(self._sent) :]:
            owed = torch.full((numel,), torch.nan, dtype=dtype, device=self.worker.device)
            dist.all_reduce(owed)

    def is_poisoned(self) -> bool:
        """Whether a NaN came back: a rank gave up, or the gradients themselves are NaN."""
        return self._last is not None and bool(torch.isnan(self._last[-1]).item())


def no_buffer_sync() -> dict[str, bool]:
    """DDP's argument that leaves buffers alone in each forward pass; torch has renamed it."""
    known = inspect.signature(DistributedDataParallel.__init__).parameters
    renamed = "forward_sync_buffers"
    return {renamed if renamed in known else "broadcast_buffers": False}
