"""The calls of the model that is trained: its passes, evaluations, and the last pass, kept."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddplab_watch import private, rows
from ddplab_watch.batches import counts, tensors_in
from ddplab_watch.kept import Kept, keep_gradients
from ddplab_watch.steps import Loop


class Calls:
    """Tells a loop of the calls of its model.

    Args:
        loop: what is told.
        device: of the model.
        is_last: says whether the pass that begins is the one to keep.
    """

    def __init__(self, loop: Loop, device: torch.device, is_last: Callable[[], bool]) -> None:
        self.loop, self.device, self.is_last = loop, device, is_last
        self.compute_dtype = ""
        """Type that the model computes in; empty while no output has told."""
        self._depth = 0
        """Of calls under way: DDP's, and that of the model inside of it."""
        self._sending: nn.Module | None = None
        """The model inside of a DDP that was called and sends its buffers first."""
        self._evaluating_since: float | None = None
        self._newest: tuple[nn.Module, tuple, dict, tuple[bool, torch.dtype]] | None = None
        """Module, arguments and autocast of the pass that is kept."""
        self._gradients: dict[int, Tensor] = {}

    def began(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        """Notes that the model is called."""
        self._depth += 1
        if self._depth > 1:
            if module is self._sending:
                self._sending = None
                self.loop.buffers_sent()
            self._keep_moved(module, args, kwargs)
            return
        self._sending = None
        if not torch.is_grad_enabled():
            self._evaluating_since = time.perf_counter()
            self.loop.phase = "evaluation"
            return
        self.loop.forward_began(**counts((args, kwargs)))
        if private.sends_buffers(module):
            self._sending = module.module
        if self.is_last():
            self._newest = (module, args, kwargs, rows.autocast(self.device))

    def _keep_moved(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        """Keeps the arguments as DDP hands them on: it may have moved them to the model's device.

        DDP takes them as well, as what is there already is not moved.
        """
        if self._newest is None or self._evaluating_since is not None or not self.is_last():
            return
        outermost, _, _, autocast = self._newest
        if isinstance(outermost, DistributedDataParallel) and outermost.module is module:
            self._newest = (outermost, args, kwargs, autocast)

    def ended(self, module: nn.Module, output: Any) -> None:
        """Notes that the model has returned."""
        self._depth -= 1
        if self._depth > 0:
            return
        if self._evaluating_since is not None:
            self.loop.evaluated(time.perf_counter() - self._evaluating_since)
            self._evaluating_since = None
            return
        if not self.compute_dtype:
            floats = [tensor for _, tensor in tensors_in(output) if tensor.is_floating_point()]
            if floats:
                enabled, dtype = rows.autocast(self.device)
                own = private.dtype_before_casts(floats[-1])
                self.compute_dtype = str(dtype if enabled else own)
        if self._newest is not None and self._newest[0] is module:
            self._gradients = {}
            keep_gradients(output, self._gradients)

    @property
    def has_kept(self) -> bool:
        """Returns True if a pass was kept."""
        return self._newest is not None

    def take(self, samples: int) -> Kept:
        """Returns the pass that was kept, and keeps it no longer.

        Args:
            samples: of its batch.
        """
        module, args, kwargs, autocast = self._newest
        gradients, self._newest, self._gradients = self._gradients, None, {}
        is_ddp = isinstance(module, DistributedDataParallel)
        return Kept(
            module=module,
            inner=module.module if is_ddp else module,
            args=args,
            kwargs=kwargs,
            samples=samples,
            gradients=gradients,
            autocast=autocast,
        )

    def forget(self) -> None:
        """Lets go of the pass that was kept."""
        self._newest, self._gradients = None, {}
