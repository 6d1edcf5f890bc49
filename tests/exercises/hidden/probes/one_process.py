"""Scenes in one process: an accumulated step, attention with its gradients, and any call."""

from __future__ import annotations

import importlib
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

torch.set_num_threads(1)
LEARNING_RATE, DECAY = 0.1, 0.5
LAYERS = ("used", "frozen", "idle")


def arguments_after(exercise: str, function: str, arguments: list[Any]) -> list[Any]:
    """Calls a function of an exercise; returns its arguments as it has left them."""
    getattr(importlib.import_module(f"common.exercises.{exercise}"), function)(*arguments)
    return arguments


def partly_trained(states: dict[str, Tensor]) -> nn.ModuleDict:
    """Returns three linear layers: a trained one, a frozen one, and one that no loss depends on."""
    outputs, inputs = states["used.weight"].shape
    layers = {name: nn.Linear(inputs, outputs) for name in LAYERS}
    model = nn.ModuleDict(layers).to(states["used.weight"].dtype)
    model.load_state_dict(states)
    model["frozen"].requires_grad_(False)
    return model


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Returns an optimizer that changes whatever has a gradient, be it zeros."""
    return torch.optim.SGD(model.parameters(), LEARNING_RATE, weight_decay=DECAY)


def mean_square(model: nn.ModuleDict, piece: Tensor) -> Tensor:
    """Returns the mean loss of a piece's samples."""
    return (model["used"](piece) + model["frozen"](piece)).square().sum(dim=1).mean()


def accumulated(states: dict[str, Tensor], pieces: list[Tensor], max_norm: float | None) -> dict:
    """Makes one step; the model has gradients of somebody else before.

    Returns the loss, the norm, the states, whether gradients are left, and in their order the
    passes: forward and backward, each with its number of samples.
    """
    from common.exercises.accumulated_step import accumulated_step

    model, passes = partly_trained(states), []
    others = (*model["idle"].parameters(), model["frozen"].weight)
    for parameter in (model["used"].weight, *others):  # not of its bias
        parameter.grad = torch.ones_like(parameter)

    def loss_of(model: nn.ModuleDict, piece: Tensor) -> Tensor:
        passes.append(["forward", len(piece)])
        loss = mean_square(model, piece)
        if loss.requires_grad:
            loss.register_hook(lambda _: passes.append(["backward", len(piece)]))
        return loss

    loss, norm = accumulated_step(model, sgd(model), pieces, loss_of, max_norm)
    remaining = any(parameter.grad is not None for parameter in model.parameters())
    facts = {"loss": loss, "norm": norm, "state": model.state_dict(), "passes": passes}
    return facts | {"remaining": remaining}


def accumulated_in_memory(pieces: int, samples: int, width: int) -> None:
    """Makes one step with pieces whose activations are large."""
    from common.exercises.accumulated_step import accumulated_step

    model = nn.Sequential(nn.Linear(1, width), nn.Tanh())

    def loss_of(model: nn.Module, piece: Tensor) -> Tensor:
        return model(piece).square().mean()

    accumulated_step(model, sgd(model), [torch.ones(samples, 1)] * pieces, loss_of, None)


class Largest(TorchDispatchMode):
    """Notes the number of elements of the largest tensor that any operation returns."""

    elements = 0

    def __torch_dispatch__(self, operation, types, arguments=(), keywords=None):
        """Does an operation."""
        result = operation(*arguments, **(keywords or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        self.elements = max(self.elements, *sizes, 0)
        return result


def attention(
    inputs: list[Tensor], weights: Tensor, is_causal: bool, tile: int | None = None
) -> dict:
    """Computes attention of inputs that are not contiguous, as those of several heads are.

    Returns the result, the gradients of Σ weights · result, what is kept for them in whatever way,
    and the elements of the largest tensor that was made.
    """
    from common.exercises import tiled_attention

    inputs = [tensor.mT.contiguous().mT.requires_grad_() for tensor in inputs]
    with mock.patch.object(tiled_attention, "TILE", tile or tiled_attention.TILE):
        with Largest() as largest:
            result = tiled_attention.TiledAttention.apply(*inputs, is_causal)
        context = result.grad_fn
        kept = [*context.saved_tensors, *tree_leaves(dict(vars(context)))]
        kept = [leaf.detach().clone() for leaf in kept if isinstance(leaf, Tensor)]
        mixed = (result * weights).sum()
        with largest:
            gradients = torch.autograd.grad(mixed, inputs)
    return {
        "result": result,
        "gradients": list(gradients),
        "kept": kept,
        "largest": largest.elements,
    }
