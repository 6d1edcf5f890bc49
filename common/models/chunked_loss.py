"""Logits, loss and gradients of a language model's head, a piece of the batch at a time.

The logits of GPT-2 are the largest tensor of a training step: 50,257 float32 for each token, and
three of that size live at once. Here the head's backward pass is done inside the forward pass,
piece by piece, so that only one piece's logits exist (the idea of Liger Kernel's fused linear
cross-entropy, Hsu et al. 2024, arXiv 2410.10989). Each logit is still computed just once.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx


def chunked_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor, chunks: int) -> Tensor:
    """Mean cross-entropy, in nats, of ``hidden @ weight.T`` against ``targets``.

    Args:
        hidden: [batch, length, width].
        weight: [vocabulary, width].
        targets: [batch, length]; −100 is ignored.
        chunks: number of pieces; the last ones may be smaller.

    Matrix products follow autocast where it is on; the loss is float32.
    """
    compute = hidden.dtype
    if torch.is_autocast_enabled(hidden.device.type):
        compute = torch.get_autocast_dtype(hidden.device.type)
    flat = hidden.flatten(0, 1).to(compute)
    return _ChunkedCrossEntropy.apply(flat, weight, targets.flatten(), chunks)


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx, hidden: Tensor, weight: Tensor, targets: Tensor, chunks: int
    ) -> Tensor:
        matrix = weight.to(hidden.dtype)
        count = (targets != -100).sum()
        loss = hidden.new_zeros((), dtype=torch.float32)
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        grad_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        step = -(-len(hidden) // chunks)
        for start in range(0, len(hidden), step):
            piece = slice(start, start + step)
            labels = targets[piece].unsqueeze(1)
            counted = labels != -100
            labels = labels.clamp_min(0)
            logits = (hidden[piece] @ matrix.T).float()
            scale = torch.logsumexp(logits, 1, keepdim=True)
            loss += ((scale - logits.gather(1, labels)) * counted).sum()
            if grad_hidden is None and grad_weight is None:
                continue
            gradient = logits.sub_(scale).exp_()  # of the summed loss: softmax − one-hot
            gradient.scatter_add_(1, labels, gradient.new_full((), -1.0).expand_as(labels))
            gradient = gradient.mul_(counted).to(hidden.dtype)
            if grad_hidden is not None:
                torch.mm(gradient, matrix, out=grad_hidden[piece])
            if grad_weight is not None:
                _add_product(grad_weight, gradient.T, hidden[piece])
        ctx.save_for_backward(grad_hidden, grad_weight, count)
        return loss / count

    @staticmethod
    def backward(ctx: FunctionCtx, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_weight, count = ctx.saved_tensors
        factor = grad_loss / count  # applied here, where a float16 loss is scaled already
        if grad_hidden is not None:
            grad_hidden = (grad_hidden * factor).to(grad_hidden.dtype)
        if grad_weight is not None:
            grad_weight = grad_weight * factor
        return grad_hidden, grad_weight, None, None


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add ``left @ right`` to a float32 ``total`` in place."""
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    else:
        total += left @ right
