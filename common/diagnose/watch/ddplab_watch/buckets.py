"""DDP's buckets and the gradients in them, watched for a few steps and left as they were.

A gradient's moment is noted by a hook on its parameter. A bucket's comes from the process group
that DDP sends through: for these steps it is one that notes the time and passes everything on to
the real one. So DDP itself divides, adds and copies, as in any other step, and what is computed is
the same to the last bit. (A communication hook would have to repeat DDP's arithmetic, and DDP lets
nobody take one off again.)
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel.distributed import DistributedDataParallel

from ddplab_watch import torch_internals
from ddplab_watch.marks import Clock, Mark


@dataclass
class Bucket:
    """A bucket on its way: bytes, and marks of when it was ready and when it was back."""

    size_bytes: int
    ready: Mark
    done: Mark | None = None


class WatchedGroup(dist.ProcessGroup):
    """A process group whose all-reduces are noted and done by another one."""

    def __init__(self, inner: dist.ProcessGroup, clock: Clock) -> None:
        super().__init__(inner.rank(), inner.size())
        self.inner, self.clock = inner, clock
        self.buckets: list[Bucket] = []
        self._lock = threading.Lock()

    def allreduce(self, tensors: list[torch.Tensor], *options: Any) -> Any:
        """Starts an all-reduce of the real group; notes when it was asked for and is done.

        DDP also sends a map of the parameters that were used, as integers, which is no bucket.
        """
        if not tensors[0].is_floating_point():
            return self.inner.allreduce(tensors, *options)
        # Not ``nbytes``: sparse gradients of embeddings have none, and it raises.
        bucket = Bucket(sum(t.numel() * t.element_size() for t in tensors), self.clock.mark())
        with self._lock:
            self.buckets.append(bucket)
        work = self.inner.allreduce(tensors, *options)

        def back(_: Any) -> None:
            bucket.done = self.clock.mark()

        # Asked for its future, a work of ProcessGroupNCCL2 makes the current stream wait until it
        # is over: that must not be the stream of the backward pass.
        with self.clock.beside():
            future = work.get_future()
        future.add_done_callback(back)
        return work

    def broadcast(self, tensors: list[torch.Tensor], *options: Any) -> Any:
        """Broadcasts by the real group: DDP sends rank 0's order of gradients once, in buckets."""
        return self.inner.broadcast(tensors, *options)

    def taken(self) -> list[Bucket]:
        """Returns the buckets since the last call."""
        with self._lock:
            taken, self.buckets = self.buckets, []
        return taken


class BucketWatch:
    """Hooks on a model's gradients and on its DDP's process group, until ``remove``.

    Args:
        root: the outermost module.
        clock: clock of the model's device.
    """

    def __init__(self, root: nn.Module, clock: Clock) -> None:
        self.root, self.clock = root, clock
        self.ready: Mark | None = None
        """The mark of this rank's last gradient in the newest pass."""
        self.unseen = ""
        """Reason why buckets cannot be seen; empty while they can."""
        self.group: WatchedGroup | None = None
        self._handles: list[Any] = []

    def install(self) -> None:
        """Begins to watch."""
        parameters = [p for p in self.root.parameters() if p.requires_grad]
        self._handles = [p.register_post_accumulate_grad_hook(self._ready) for p in parameters]
        self.ddp = next(
            (m for m in self.root.modules() if isinstance(m, DistributedDataParallel)), None
        )
        if self.ddp is None:
            self.unseen = "the model is not under DDP"
        elif torch_internals.ddp_facts(self.ddp)["comm_hook"]:
            self.unseen = "the script has a communication hook of its own"
        elif not torch_internals.can_swap_group(self.ddp):
            self.unseen = f"torch {torch.__version__} does not let DDP's process group be watched"
        else:
            self.group = WatchedGroup(self.ddp.process_group, self.clock)
            torch_internals.swap_group(self.ddp, self.group)

    def _ready(self, _: nn.Parameter) -> None:
        self.ready = self.clock.mark()

    def begin(self) -> None:
        """Begins a backward pass."""
        self.ready = None

    def taken(self) -> list[Bucket]:
        """Returns the buckets since the last call."""
        return self.group.taken() if self.group else []

    def remove(self) -> None:
        """Takes everything off; DDP sends through its own process group again."""
        for handle in self._handles:
            handle.remove()
        if self.group is not None:
            torch_internals.swap_group(self.ddp, self.ddp.process_group)
        self._handles, self.group = [], None
