"""A1.3: data parallelism whose all-reduces run while the backward pass still computes.

A hook on each parameter launches its all-reduce as soon as its gradient is final.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn

from common.exercises.naive_ddp import NaiveDDP


class OverlappedDDP(NaiveDDP):
    """A model whose gradients are averaged one by one, during the backward pass.

    All ranks launch all-reduces in the same order, whatever they have used: the reverse of the
    order in which parameters are registered, in which most gradients come about. A collective that
    one rank launches third and another fourth adds up different gradients, or hangs. Contracts are
    those of ``NaiveDDP``, but for several backward passes: under ``no_sync`` gradients add up and
    nothing is sent, and the pass behind it exchanges their sum. A second pass without ``no_sync``,
    before ``finish_gradient_synchronization``, raises RuntimeError: it would add to gradients that
    are on their way. An exception ends ``no_sync`` as its end does.

    Args:
        module: the model; its parameters stay the objects that they are.
        group: the ranks that train together; None for all.

    Raises:
        UserError: on all ranks, where models differ, a parameter is not floating, or there is none.
    """

    def __init__(self, module: nn.Module, group: dist.ProcessGroup | None = None) -> None:
        super().__init__(module, group)
        self.exchanging = True
        # BEGIN SOLUTION A1.3
        # Gradients come about in the reverse of the order in which parameters are registered.
        self.order = [p for p in reversed(list(module.parameters())) if p.requires_grad]
        self.ready = [False] * len(self.order)
        self.works: list[dist.Work] = []
        for index, parameter in enumerate(self.order):
            hook = functools.partial(self.note_ready, index)
            parameter.register_post_accumulate_grad_hook(hook)
        # END SOLUTION

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Lets the gradients of backward passes inside the block add up without an exchange."""
        # BEGIN SOLUTION A1.3
        before, self.exchanging = self.exchanging, False
        try:
            yield
        finally:
            self.exchanging = before
        # END SOLUTION

    def finish_gradient_synchronization(self) -> None:
        """Waits for the averages; all ranks call it between backward pass and update."""
        # BEGIN SOLUTION A1.3
        self.launch_until(len(self.order))  # what this rank has not used: zeros
        for work in self.works:
            work.wait()
        self.works.clear()
        self.ready = [False] * len(self.order)
        # END SOLUTION

    # BEGIN SOLUTION A1.3
    def note_ready(self, index: int, _: nn.Parameter) -> None:
        """Notes that a gradient is final, and launches all that need wait no longer."""
        if self.exchanging:
            if self.ready[index]:
                raise RuntimeError("gradients of the pass before have not been exchanged")
            self.ready[index] = True
            launched = len(self.works)
            until = next((i for i in range(launched, len(self.ready)) if not self.ready[i]), None)
            self.launch_until(len(self.ready) if until is None else until)

    @torch.no_grad()
    def launch_until(self, end: int) -> None:
        """Launches the all-reduces that have not been, up to ``end`` in the common order."""
        for parameter in self.order[len(self.works) : end]:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            parameter.grad /= dist.get_world_size(self.group)
            self.works.append(dist.all_reduce(parameter.grad, group=self.group, async_op=True))

    # END SOLUTION
