"""Passes of a model under FSDP2 as they are in a step, its exchange included.

Parameters are gathered within a pass, and gradients scattered: no pass is without exchange. So all
ranks run each pass together, and lean passes are compared with such. ``.grad`` is set aside
meanwhile, as FSDP puts gradients there.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from ddplab_watch.kept import Kept
from ddplab_watch.marks import Clock


class ShardedPasses:
    """Forward and backward passes of a sharded model; all ranks run them together.

    Args:
        kept: pass of the window, whose module is FSDP2's outermost one.
        clock: clock of its device.
    """

    def __init__(self, kept: Kept, clock: Clock) -> None:
        self.kept, self.clock = kept, clock
        self.parameters = {n: p for n, p in kept.inner.named_parameters() if p.requires_grad}

    def try_out(self) -> None:
        """Raises RuntimeError where the pass cannot be run again."""
        if not self.kept.gradients:
            raise RuntimeError("no output of the model has a gradient")
        if why := self.kept.why_once():
            raise RuntimeError(why)

    def one_pass(
        self, watched: bool = False, exchange: None = None, only: Collection[str] | None = None
    ) -> tuple[dict[str, float], list[dict[str, Any]]]:
        """Runs a forward and a backward pass with FSDP's exchange.

        Args:
            watched: note which parameters have a gradient.
            exchange: None: there is no exchange but FSDP's.
            only: names of the parameters whose gradients are computed; None for all.

        Returns:
            forward_time_ms and backward_time_ms; rows with the parameters' names if ``watched``.
        """
        kept, clock = self.kept, self.clock
        with ExitStack() as stack:
            stack.enter_context(self._gradients_aside())
            stack.enter_context(self._frozen(() if only is None else {*self.parameters} - {*only}))
            clock.wait()
            marks = [clock.mark()]
            with torch.enable_grad():
                outputs, starts = kept.forward(kept.inner)
                marks.append(clock.mark())
                torch.autograd.backward(outputs, starts)
            marks.append(clock.mark())
            clock.wait()
            names = [name for name, p in self.parameters.items() if p.grad is not None]
        forward_s, backward_s = (clock.elapsed_s(*marks[i : i + 2]) for i in (0, 1))
        times = {"forward_time_ms": forward_s * 1e3, "backward_time_ms": backward_s * 1e3}
        return times, [{"parameter": name} for name in names] if watched else []

    @contextmanager
    def unscattered(self) -> Iterator[None]:
        """Leaves gradients whole in a pass inside the block, which another one then scatters."""
        self.kept.inner.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            self.kept.inner.set_requires_gradient_sync(True)
            self.one_pass()

    @contextmanager
    def _gradients_aside(self) -> Iterator[None]:
        """Lets parameters have no gradient inside the block, and theirs again at its end."""
        gradients = [(parameter, parameter.grad) for parameter in self.parameters.values()]
        try:
            for parameter, _ in gradients:
                parameter.grad = None
            yield
        finally:
            for parameter, gradient in gradients:
                parameter.grad = gradient

    @contextmanager
    def _frozen(self, names: Collection[str]) -> Iterator[None]:
        """Computes no gradient of some parameters inside the block."""
        try:
            for name in names:
                self.parameters[name].requires_grad_(False)
            yield
        finally:
            for name in names:
                self.parameters[name].requires_grad_(True)
