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

IGNORED = -100
"""A target that does not count, as in ``F.cross_entropy``."""
ROW_MULTIPLE = 64
"""Elements of which the stride of the logits' rows is a multiple. With rows of 50,257 float32,
which begin anywhere in a cache line, MKL computes logits at two thirds of its usual speed."""


def chunked_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor, chunks: int) -> Tensor:
    """Computes the mean cross-entropy, in nats, of ``hidden @ weight.T`` against ``targets``.

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
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        grad_weight = torch.empty_like(weight) if needs_weight else None
        rows = -(-len(hidden) // chunks)
        buffer = _aligned_rows(rows, len(weight), hidden)
        count = (targets != IGNORED).sum()
        loss = hidden.new_zeros((), dtype=torch.promote_types(hidden.dtype, torch.float32))
        for start in range(0, len(hidden), rows):
            piece = slice(start, start + rows)
            labels = targets[piece].unsqueeze(1)
            counted = (labels != IGNORED).to(loss.dtype)
            labels = labels.clamp_min(0)
            logits = _product(hidden[piece], matrix.T, buffer[: len(labels)]).to(loss.dtype)
            highest = logits.amax(1, keepdim=True)
            wanted = logits.gather(1, labels)
            exponentials = logits.sub_(highest).exp_()
            total = exponentials.sum(1, keepdim=True)
            loss += ((total.log() + highest - wanted) * counted).sum()
            if not (needs_hidden or needs_weight):
                continue
            # The gradient of the summed loss is softmax − one-hot, and 0 in rows that do not count.
            # It is computed in the memory of the exponentials, the largest tensor here.
            gradient = exponentials.mul_(counted / total).scatter_add_(1, labels, -counted)
            gradient = _rounded(gradient, buffer[: len(labels)])
            del logits, exponentials  # so that no two pieces in float32 live at once
            if needs_hidden:
                torch.mm(gradient, matrix, out=grad_hidden[piece])
            if needs_weight:
                _add_product(grad_weight, gradient.T, hidden[piece], is_first=start == 0)
        ctx.save_for_backward(grad_hidden, grad_weight, count)
        return loss / count

    @staticmethod
    def backward(ctx: FunctionCtx, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_weight, count = ctx.saved_tensors
        factor = grad_loss / count  # applied here: grad_loss holds the loss scale of float16
        if grad_hidden is not None:
            grad_hidden = (grad_hidden * factor).to(grad_hidden.dtype)
        if grad_weight is not None:
            grad_weight = grad_weight * factor
        return grad_hidden, grad_weight, None, None


def _aligned_rows(rows: int, columns: int, like: Tensor) -> Tensor:
    """Allocates a tensor [rows, columns] whose rows are all aligned alike to cache lines."""
    return like.new_empty(rows, -(-columns // ROW_MULTIPLE) * ROW_MULTIPLE)[:, :columns]


def _product(left: Tensor, right: Tensor, out: Tensor) -> Tensor:
    """Computes ``left @ right``, in ``out`` unless torch.compile decides where."""
    return left @ right if torch.compiler.is_compiling() else torch.mm(left, right, out=out)


def _rounded(exact: Tensor, out: Tensor) -> Tensor:
    """Returns ``exact`` in the type of ``out``, whose memory is reused for it."""
    if exact.dtype == out.dtype:
        return exact
    return exact.to(out.dtype) if torch.compiler.is_compiling() else out.copy_(exact)


def _add_product(total: Tensor, left: Tensor, right: Tensor, is_first: bool) -> None:
    """Adds ``left @ right`` to ``total`` in place; the first time, overwrites it."""
    if left.dtype == total.dtype:
        total.addmm_(left, right, beta=0 if is_first else 1)
    elif is_first:
        total.copy_(left @ right)
    else:
        total += left @ right
