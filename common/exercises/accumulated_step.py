"""A0.3: one update from several pieces of a batch, with clipped gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

LossOf = Callable[[nn.Module, Tensor], Tensor]


def accumulated_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    pieces: Sequence[Tensor],
    loss_of: LossOf,
    max_norm: float | None = None,
) -> tuple[float, float]:
    """Makes the update that one pass over the whole batch would make, piece by piece.

    Pieces may have different numbers of samples. Only one piece's activations are kept at a time:
    in the order of the pieces, ``loss_of`` is called once for each, and its backward pass is over
    before the next begins. Gradients that were there before do not count, and afterwards every
    gradient is None. A parameter that no loss depends on, or that is frozen, stays as it is.

    Args:
        model: what is trained.
        optimizer: of its parameters.
        pieces: samples [n_i, …]; at least one piece, none empty.
        loss_of: the mean loss of a piece's samples, a scalar.
        max_norm: upper bound of the joint L2 norm of the batch's gradients; None for none.

    Returns:
        the mean loss over all samples, and the norm before it was bounded.
    """
    # BEGIN SOLUTION A0.3
    optimizer.zero_grad(set_to_none=True)
    total, mean = sum(len(piece) for piece in pieces), 0.0
    for piece in pieces:
        share = loss_of(model, piece) * (len(piece) / total)
        share.backward()
        mean += share.item()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    norm = torch.linalg.vector_norm(torch.stack([gradient.norm() for gradient in gradients]))
    if max_norm is not None and norm > max_norm:
        for gradient in gradients:
            gradient *= max_norm / norm
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return mean, norm.item()
    # END SOLUTION
