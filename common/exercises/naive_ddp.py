"""A1.2: data parallelism with one all-reduce a gradient, and with one for all gradients.

Every rank has the whole model and its own samples. After the backward pass the ranks average their
gradients, so that all make the same update.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from common.exercises.same_model import check_same_model


class NaiveDDP(nn.Module):
    """A model whose gradients are averaged one by one, after the backward pass.

    On all ranks it begins with the parameters of the group's first rank, those that are frozen too,
    and with its buffers, those too that are in no state dict. ``module.state_dict()`` stays as it
    was. A parameter that this rank has not used contributes zeros, and one that no rank has used
    gets a gradient of zeros; a weight that is used twice under two names is averaged once.
    Gradients of several backward passes add up, and the exchange averages their sum.

    Args:
        module: the model; its parameters stay the objects that they are.
        group: the ranks that train together; None for all.

    Raises:
        UserError: on all ranks, where models differ, a parameter is not floating, or there is none.
    """

    def __init__(self, module: nn.Module, group: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        check_same_model(module, group)
        self.module = module
        self.group = group
        broadcast_state(module, group)

    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        """Calls the model."""
        return self.module(*inputs, **keywords)

    def finish_gradient_synchronization(self) -> None:
        """Averages the gradients; all ranks call it between backward pass and update."""
        # BEGIN SOLUTION A1.2
        for gradient in gradients_of(self.module):
            dist.all_reduce(gradient, group=self.group)
            gradient /= dist.get_world_size(self.group)
        # END SOLUTION


class FlatDDP(NaiveDDP):
    """A model whose gradients are averaged by one all-reduce for each dtype."""

    def finish_gradient_synchronization(self) -> None:
        """Averages the gradients; all ranks call it between backward pass and update."""
        # BEGIN SOLUTION A1.2
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for gradient in gradients_of(self.module):
            by_dtype.setdefault(gradient.dtype, []).append(gradient)
        for gradients in by_dtype.values():
            flat = torch.cat([gradient.flatten() for gradient in gradients])
            dist.all_reduce(flat, group=self.group)
            flat /= dist.get_world_size(self.group)
            sizes = [gradient.numel() for gradient in gradients]
            for gradient, part in zip(gradients, flat.split(sizes), strict=True):
                gradient.copy_(part.view_as(gradient))
        # END SOLUTION


@torch.no_grad()
def broadcast_state(module: nn.Module, group: dist.ProcessGroup | None) -> None:
    """Gives all ranks the parameters and buffers of the group's first rank."""
    # BEGIN SOLUTION A1.2
    first = 0 if group is None else dist.get_global_rank(group, 0)
    for tensor in (*module.parameters(), *module.buffers()):
        copy = tensor.detach().contiguous()
        dist.broadcast(copy, first, group=group)
        tensor.copy_(copy)
    # END SOLUTION


# BEGIN SOLUTION A1.2
def gradients_of(module: nn.Module) -> Iterable[Tensor]:
    """Yields the gradient of every parameter that is trained, in order; zeros where none came."""
    for parameter in module.parameters():  # each once, whatever the number of its names
        if parameter.requires_grad:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            yield parameter.grad


# END SOLUTION
