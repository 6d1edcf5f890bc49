"""Scenes in one process: an accumulated step, and attention with its gradients."""

from __future__ import annotations

from unittest import mock

import torch
from torch import Tensor

from common.exercises import tiled_attention
from common.exercises.accumulated_step import accumulated_step

torch.set_num_threads(1)


def accumulated(weight: Tensor, bias: Tensor, pieces: list[Tensor], max_norm: float | None) -> dict:
    """Makes one step of SGD with a linear model; it has gradients of somebody else before."""
    model = torch.nn.Linear(weight.shape[1], weight.shape[0]).to(weight.dtype)
    model.load_state_dict({"weight": weight, "bias": bias})
    model.weight.grad = torch.ones_like(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss_of(model: torch.nn.Module, piece: Tensor) -> Tensor:
        return model(piece).square().sum(dim=1).mean()

    loss, norm = accumulated_step(model, optimizer, pieces, loss_of, max_norm)
    left = [parameter.grad is not None for parameter in model.parameters()]
    return {"loss": loss, "norm": norm, "state": model.state_dict(), "left": any(left)}


def attention(
    inputs: list[Tensor], weights: Tensor, is_causal: bool, tile: int | None = None
) -> dict:
    """Returns result, gradients of Σ weights · result, and what is saved for them."""
    inputs = [each.clone().requires_grad_() for each in inputs]
    with mock.patch.object(tiled_attention, "TILE", tile or tiled_attention.TILE):
        found = tiled_attention.TiledAttention.apply(*inputs, is_causal)
        saved = [tensor.detach().clone() for tensor in found.grad_fn.saved_tensors]
        gradients = torch.autograd.grad((found * weights).sum(), inputs)
    return {"found": found, "gradients": list(gradients), "saved": saved}
