"""The calls of the model that is trained: its passes, evaluations, and what is kept of the last.

What is kept is to be run again for all that a step takes. So where batches differ in size, the last
pass is given the arguments of another one, whose batch was closer to the usual size.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel.distributed import DistributedDataParallel

from ddplab_watch import rows, torch_internals
from ddplab_watch.batches import counts, elements, tensors_in
from ddplab_watch.feed import Feed
from ddplab_watch.kept import Kept, keep_gradients
from ddplab_watch.steps import Loop


@dataclass
class Called:
    """A call of the outermost module, with which autocast, and the counts of its batch."""

    module: nn.Module
    args: tuple
    kwargs: dict
    autocast: tuple[bool, torch.dtype]
    counts: dict[str, int]


class Calls:
    """Tells a loop of the calls of its model.

    Args:
        feed: knows the batches as they were loaded.
        is_near_end: says whether the pass that begins is among the last, whose arguments may be
            kept.
        is_last: says whether it is the one to keep.
    """

    def __init__(
        self,
        loop: Loop,
        device: torch.device,
        feed: Feed,
        is_near_end: Callable[[], bool],
        is_last: Callable[[], bool],
    ) -> None:
        self.loop, self.device, self.feed = loop, device, feed
        self.is_near_end, self.is_last = is_near_end, is_last
        self.compute_dtype = ""
        """Type that the model computes in; empty while no output has told."""
        self.brief = False
        """True while of a batch only its size is noted."""
        self._trains = False
        """True once the model was called in its training mode: in the other one it is evaluated."""
        self._depth = 0
        """Number of calls under way: DDP's, and that of the model inside of it."""
        self._sending: nn.Module | None = None
        """The model inside of a DDP that was called and sends its buffers first."""
        self._evaluating_since: float | None = None
        self._calling: Called | None = None
        """The call that is under way, if it is kept."""
        self._newest: Called | None = None
        """Call of the last pass."""
        self._usual: Called | None = None
        """Call near the end whose batch is closest to the mean of all."""
        self._gradients: dict[int, Tensor] = {}
        self._passes = self._elements = 0
        """Passes so far, and the elements of all their batches."""

    def began(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        """Notes that the model is called."""
        self._depth += 1
        if self.loop.phase == "backward":  # checkpointing computes a pass anew
            return
        if self._depth > 1:
            if module is self._sending:
                self._sending = None
                self.loop.buffers_sent()
            self._keep_moved(module, args, kwargs)
            return
        self._sending = None
        if not torch.is_grad_enabled() or (self._trains and not module.training):
            self._evaluating_since = time.perf_counter()
            self.loop.phase = "evaluation"
            return
        self._trains |= module.training
        if torch_internals.sends_buffers(module):
            self._sending = module.module
        if self.brief:
            self.loop.forward_began(elements=elements((args, kwargs)))
            return
        counted = counts((args, kwargs), self.feed.lengths)
        if self.feed.counts_tokens:
            counted["tokens"] = self.feed.tokens_of(counted)
        self.loop.forward_began(**counted)
        self._passes += 1
        self._elements += counted["elements"]
        self._keep(Called(module, args, kwargs, rows.autocast(self.device), counted))

    def _keep(self, called: Called) -> None:
        """Keeps a call if it is the last, or near the end and of a more usual size.

        Of those near the end none is kept that has arguments with gradients: all that another
        module's backward pass needs would stay in memory with them.
        """
        if self.is_near_end():
            inputs = tensors_in((called.args, called.kwargs))
            closer = self._usual is None or self._unusual(called) <= self._unusual(self._usual)
            if closer and not any(tensor.requires_grad for _, tensor in inputs):
                self._usual = self._calling = called
        if self.is_last():
            self._newest = self._calling = called

    def _unusual(self, called: Called) -> float:
        return abs(called.counts["elements"] * self._passes - self._elements)

    def _keep_moved(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        """Keeps the arguments as DDP hands them on: it may have moved them to the model's device.

        DDP takes them as well, as what is there already is not moved.
        """
        if self._calling is None or self._evaluating_since is not None:
            return
        outermost = self._calling.module
        if isinstance(outermost, DistributedDataParallel) and outermost.module is module:
            self._calling.args, self._calling.kwargs = args, kwargs

    def ended(self, module: nn.Module, output: Any) -> None:
        """Notes that the model has returned."""
        self._depth -= 1
        if self._depth > 0 or self.loop.phase == "backward":
            return
        if self._evaluating_since is not None:
            self.loop.evaluated(time.perf_counter() - self._evaluating_since)
            self._evaluating_since = None
            return
        if not self.compute_dtype:
            floats = [tensor for _, tensor in tensors_in(output) if tensor.is_floating_point()]
            if floats:
                enabled, dtype = rows.autocast(self.device)
                output_dtype = torch_internals.dtype_before_casts(floats[-1])
                self.compute_dtype = str(dtype if enabled else output_dtype)
        self._calling = None
        if self._newest is not None and self._newest.module is module:
            self._gradients = {}
            keep_gradients(output, self._gradients)

    @property
    def is_under_way(self) -> bool:
        """Returns True while the model runs."""
        return self._depth > 0

    @property
    def kept_kind(self) -> str:
        """Returns the class of the model whose pass was kept; empty where none was."""
        return "" if self._newest is None else type(self._newest.module).__name__

    def take(self, updated: Collection[int] = ()) -> Kept:
        """Returns the pass that was kept, with a batch of usual size, and keeps it no longer.

        Args:
            updated: identities of the parameters that optimizers were seen to update.
        """
        last, usual, gradients = self._newest, self._usual, self._gradients
        self.forget()
        if usual is None or usual.module is not last.module:
            usual = last
        module = last.module
        is_ddp = isinstance(module, DistributedDataParallel)
        return Kept(
            module=module,
            inner=module.module if is_ddp else module,
            args=usual.args,
            kwargs=usual.kwargs,
            samples=usual.counts["samples"],
            elements=usual.counts["elements"],
            gradients=gradients,
            autocast=last.autocast,
            updated=updated,
        )

    def forget(self) -> None:
        """Lets go of the pass that was kept."""
        self._calling = self._newest = self._usual = None
        self._gradients = {}
