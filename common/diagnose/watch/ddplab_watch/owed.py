"""Passes under DDP that send all that other ranks wait for, whatever fails in them on this one.

A rank that left a pass in its middle would next ask the others whether it had worked, while they
wait for its buckets: sizes that do not match, on the script's own process group. So DDP sends zeros
for the gradients that have not come, in this pass and in what is left of the step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parallel.distributed import DistributedDataParallel

from ddplab_watch import torch_internals
from ddplab_watch.kept import Kept


class _Zeros(nn.Module):
    """Takes a model's place, so that DDP makes a whole pass with gradients of zero."""

    def __init__(self, model: nn.Module, used: Sequence[nn.Parameter]) -> None:
        super().__init__()
        self.named_buffers = model.named_buffers  # those that DDP sends
        self.used = used

    def forward(self, *_: Any) -> torch.Tensor:
        return sum(parameter.sum() * 0 for parameter in self.used)


class OwedPasses:
    """Passes of a fresh DDP instance, until ``remove``.

    Args:
        ddp: instance of DDP, around a module whose gradients are None before each step.
        used: the parameters that a pass gives a gradient.
    """

    def __init__(self, ddp: DistributedDataParallel, used: Sequence[nn.Parameter]) -> None:
        self.ddp: DistributedDataParallel | None = ddp
        self.used = used
        self.error: Exception | None = None
        """What the first pass that failed has raised, without what that holds."""
        self._ready: list[nn.Parameter] = []
        self._has_begun = self._has_computed = False
        self._is_first = True
        self._handles = [p.register_post_accumulate_grad_hook(self._ready.append) for p in used]
        self._handles.append(ddp.module.register_forward_pre_hook(self._begin))

    def _begin(self, *_: Any) -> None:
        self._has_begun = True

    def run(self, kept: Kept, silent: bool, load: Callable[[], object]) -> None:
        """Fetches a batch by ``load`` and runs a pass, in zeros after one that failed.

        A ``silent`` one exchanges no gradients.
        """
        with self.ddp.no_sync() if silent else contextlib.nullcontext(), torch.enable_grad():
            if self.error:
                self._zeros(silent)
                return
            self._ready.clear()
            self._has_begun = self._has_computed = False
            try:
                load()
                outputs = kept.forward(self.ddp)
                self._has_computed = True
                torch.autograd.backward(*outputs)
            except Exception as error:  # whatever a script's model raises
                error.__context__ = error.__cause__ = None
                self.error = error.with_traceback(None)
            outputs = None
            if self.error:  # the memory of what it computed is free now
                self._finish(silent)
            self._is_first = False

    def _finish(self, silent: bool) -> None:
        """Sends what the pass that has just failed still owes."""
        if not self._has_computed:
            # DDP has sent its buffers by the time that it calls its module.
            self.ddp.require_forward_param_sync &= not self._has_begun
            self._zeros(silent)
            return
        come = set(map(id, self._ready))
        missing = [parameter for parameter in self.used if id(parameter) not in come]
        if silent or not missing:
            return
        zeros = sum(parameter.sum() * 0 for parameter in missing)
        if self._is_first and self.ddp.static_graph:  # DDP sends nothing before that pass is over
            zeros.register_hook(lambda _: torch_internals.send_after_pass(self.ddp))
        zeros.backward()

    def _zeros(self, silent: bool) -> None:
        """Runs a whole pass in zeros."""
        module, self.ddp.module = self.ddp.module, _Zeros(self.ddp.module, self.used)
        try:
            output = self.ddp(torch.zeros(1, device=self.used[0].device))
            if not silent:
                output.backward()
        finally:
            self.ddp.module = module

    def check(self) -> None:
        """Raises what a pass has raised, if one has failed."""
        if self.error:
            raise self.error

    def remove(self) -> None:
        """Takes all hooks off, and lets go of DDP."""
        for handle in self._handles:
            handle.remove()
        self.ddp = None
