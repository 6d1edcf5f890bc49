"""A latency added to every bucket, where the kernel cannot delay the packets of a link (netem).

Buckets are served one after another in order, as NCCL does on its stream: a thread of its own
sleeps for the latency, all-reduces the bucket and completes its future, while the backward pass
goes on. K buckets so take at least K times the latency. gloo without the hook may reduce two
buckets at once; with it, it does not.
"""

# No "from __future__ import annotations": DDP looks at the annotations of its hook.
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from queue import SimpleQueue

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from common.errors import UserError

CLOSE_TIMEOUT_S = 2.0


def latency_note(latency_ms: float) -> str:
    """Returns a note for captions, empty for 0 ms: ``5 ms added to each bucket by a comm hook``."""
    return f"{latency_ms:g} ms added to each bucket by a comm hook" if latency_ms else ""


class LatencyHook:
    """Averages buckets over the ranks, each ``latency_ms`` after the one before it is done.

    It has a process group of its own: the thread's collectives would else be in no fixed order
    with those of the backward pass (such as DDP's of unused parameters). All ranks must make it.
    """

    def __init__(self, latency_ms: float, device: torch.device) -> None:
        """Raises UserError on a GPU: nothing waits for its streams."""
        if device.type != "cpu":
            raise UserError(
                f"added_latency_ms on {device.type}: it is for gloo on the CPU; use --device cpu"
            )
        self.latency_s = latency_ms / 1e3
        self.group = dist.new_group(backend="gloo")
        self._buckets: SimpleQueue = SimpleQueue()
        # A daemon: a rank that breaks off must not wait for a bucket that its peer never sends.
        self._thread = threading.Thread(target=self._serve, name="latency-hook", daemon=True)
        self._thread.start()

    def register(self, ddp: DistributedDataParallel) -> None:
        """Makes ``ddp`` average its buckets through this hook."""
        ddp.register_comm_hook(None, self._hook)

    def close(self) -> None:
        """Ends the thread once the buckets before are done.

        A thread that still waits for a rank after ``CLOSE_TIMEOUT_S`` is left to itself.
        """
        self._buckets.put(None)
        self._thread.join(CLOSE_TIMEOUT_S)

    def _hook(self, _: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Hands a full bucket to the thread's queue; DDP calls it."""
        served: torch.futures.Future = torch.futures.Future()
        self._buckets.put((bucket.buffer(), served))
        # DDP looks at the future in C++, where an exception is only seen if a callback raised it.
        return served.then(lambda future: future.value())

    def _serve(self) -> None:
        broken: Exception | None = None
        while (item := self._buckets.get()) is not None:
            buffer, served = item
            try:
                if broken is None:  # after a failure the ranks are no longer in step
                    self._average(buffer)
            except Exception as error:
                broken = error
            if broken is None:
                served.set_result(buffer)
            else:
                served.set_exception(broken)

    def _average(self, buffer: torch.Tensor) -> None:
        buffer.div_(self.group.size())  # first, as DDP does: the sum cannot overflow
        time.sleep(self.latency_s)
        dist.all_reduce(buffer, group=self.group)


@contextmanager
def added_latency(latency_ms: float, device: torch.device) -> Iterator[LatencyHook | None]:
    """Yields the hook for a block of code; None for 0 ms, so that DDP is left as it is."""
    hook = LatencyHook(latency_ms, device) if latency_ms else None
    try:
        yield hook
    finally:
        if hook:
            hook.close()
