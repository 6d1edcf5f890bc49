"""DDP's exchange of gradients, with the moments noted at which gradients are ready and back.

A step's time says nothing of who waited for whom: DDP makes all ranks end together. What tells is
how long a rank computed before its last bucket was full, and how long the exchange took after that.
The rank that comes last waits for nobody, so the shortest such time is communication, and what the
others took longer was waiting. That needs no common clock.

A rank that has run out of memory must not leave the others in an all-reduce: it sends NaN in place
of the buckets it owes. All ranks see that in the last bucket, and that they must talk about it.
"""

# No "from __future__ import annotations": DDP looks at the annotations of its hook.
import gc
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from common.errors import RunFailed
from common.runtime import torch_internals
from common.runtime.group.process_group import Worker
from common.runtime.timing import clock_for
from common.training.ddp import COMPRESSIONS, make_ddp


@dataclass(frozen=True)
class BucketTimes:
    """A bucket's way, in seconds from the start of the backward pass."""

    size_bytes: int
    """Bytes of each bucket on the wire."""
    ready_s: float
    done_s: float


class _Sent(NamedTuple):
    """A bucket on its way; not the bucket itself, whose memory may be needed."""

    numel: int
    dtype: torch.dtype
    mark: object

    @property
    def nbytes(self) -> int:
        """Returns the bytes on the wire."""
        return self.numel * self.dtype.itemsize


class TimedExchange:
    """A model under DDP whose buckets go through here. All ranks make it together.

    Args:
        model: the module to wrap, on ``worker``'s device.
        group: the ranks that take part; all by default.
        compression: one of ``COMPRESSIONS``: what gradients are rounded to on their way.
        slow_factor: multiplies this rank's compute time, by sleeping before its last bucket; to see
            whether a plan adapts to it. On a CPU only.
        arguments: DDP's own, and those of ``make_ddp``.
    """

    def __init__(
        self,
        model: nn.Module,
        worker: Worker,
        *,
        group: dist.ProcessGroup | None = None,
        compression: str = "none",
        slow_factor: float = 1.0,
        **arguments: object,
    ) -> None:
        self.model, self.worker, self.group = model, worker, group
        self.compression, self.slow_factor = compression, slow_factor
        self.arguments = arguments
        self.ranks = dist.get_world_size(group)
        self.clock = clock_for(worker.device)
        self.ready: Any = None
        """The mark of this rank's last gradient in the newest pass."""
        self._pattern: list[_Sent] = []
        """The buckets of a whole pass: what a rank owes in the next."""
        self._sent: list[_Sent] = []
        self._done: dict[int, object] = {}
        self._last: Tensor | None = None
        self._began = 0.0
        self.wrap()

    def wrap(self) -> None:
        """Wraps the model anew, as after a step that broke off in the middle."""
        self.ready = self._last = None
        if hasattr(self, "ddp"):
            self.close()
        self.ddp = make_ddp(self.model, self.worker.device, group=self.group, **self.arguments)
        self.ddp.register_comm_hook(None, self._exchange)

    def close(self) -> None:
        """Takes DDP off the model, and frees its buckets before there are new ones."""
        torch_internals.remove_hooks(self.ddp)
        del self.ddp
        self._last = None
        gc.collect()
        if self.worker.device.type == "cuda":
            torch.cuda.empty_cache()

    def begin(self) -> None:
        """Begins a pass: no bucket has been sent."""
        self._sent, self._done, self._last, self.ready = [], {}, None, None
        self._began = time.perf_counter()

    def slow_down(self) -> None:
        """Sleeps as long as a rank that is ``slow_factor`` times as slow would still compute."""
        if self.slow_factor > 1:
            time.sleep((self.slow_factor - 1) * (time.perf_counter() - self._began))

    @property
    def sent_bytes(self) -> int:
        """Returns the bytes that this pass has sent."""
        return sum(sent.nbytes for sent in self._sent)

    def bucket_times(self, backward_start: object) -> tuple[BucketTimes, ...]:
        """Returns each bucket's way in this pass, from a mark at the start of the backward pass."""
        elapsed = self.clock.elapsed_s
        return tuple(
            BucketTimes(
                size_bytes=sent.nbytes,
                ready_s=elapsed(backward_start, sent.mark),
                done_s=elapsed(backward_start, self._done[index]),
            )
            for index, sent in enumerate(self._sent)
            if index in self._done
        )

    def _exchange(self, _: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Exchanges a bucket as DDP or its compression hooks do, with the moments noted."""
        buffer, index = bucket.buffer(), bucket.index()
        narrow = COMPRESSIONS[self.compression]
        if bucket.is_last():
            self.slow_down()
        sent = buffer if narrow is None else buffer.to(narrow)
        sent.div_(self.ranks)
        mark = self.clock.mark()
        work = dist.all_reduce(sent, group=self.group, async_op=True)
        self._sent.append(_Sent(sent.numel(), sent.dtype, mark))
        if bucket.is_last():
            self.ready, self._last = mark, buffer
            self._pattern = self._sent

        def back(future: torch.futures.Future) -> Tensor:
            reduced = future.value()[0]
            result = reduced if narrow is None else buffer.copy_(reduced)
            self._done[index] = self.clock.mark()
            return result

        return work.get_future().then(back)

    def give_up(self) -> None:
        """Sends NaN in place of the buckets that this rank still owes the others.

        Raises RunFailed where it owes none: the others have what they need, and go on.
        """
        if self._last is not None:
            raise RunFailed(
                f"rank {self.worker.rank} ran out of memory after its last bucket was sent"
            )
        device = self.worker.device
        for numel, dtype, _ in self._pattern[len(self._sent) :]:
            owed = torch.full((numel,), torch.nan, dtype=dtype, device=device)
            dist.all_reduce(owed, group=self.group)

    def is_poisoned(self) -> bool:
        """Returns True if a NaN came back: a rank gave up, or the gradients themselves are NaN."""
        return self._last is not None and bool(torch.isnan(self._last[-1]).item())


def divided_exchange(row: Mapping, exchanges_ms: Sequence[float] | None) -> dict:
    """Returns a rank's row of a step with its exchange divided into communication and waiting.

    The straggler, which comes last to the exchange, waits for nobody: the shortest of
    ``exchanges_ms``, those of all ranks in this step, is communication, and the rest of this rank's
    exchange was waiting. Without them neither is known, and both are None.
    """
    times = {name: value for name, value in row.items() if name != "exchange_time_ms"}
    communication_ms = waiting_ms = None
    if exchanges_ms:
        communication_ms = min(exchanges_ms)
        waiting_ms = row["exchange_time_ms"] - communication_ms
    return times | {"communication_time_ms": communication_ms, "waiting_time_ms": waiting_ms}
