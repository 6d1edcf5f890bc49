"""A0.4, a bonus: attention in tiles, which never holds the whole matrix of scores.

Softmax is taken tile by tile with a running maximum and sum, and the backward pass computes each
tile again from the saved log-sum-exp (Dao et al. 2022, "FlashAttention"; Dao 2023, algorithm 1 and
2 of "FlashAttention-2").
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

TILE = 64
"""Queries, and keys, of a tile."""


class TiledAttention(torch.autograd.Function):
    """softmax(QKᵀ/√d)V, called as ``TiledAttention.apply(query, key, value, is_causal)``.

    For the backward pass it saves the inputs, the result, and the log-sum-exp of each query's
    scores [..., queries], and at most one number a query more. Neither pass makes a tensor larger
    than an input or than one tile's scores [..., TILE, TILE]; both read TILE when they are called.
    With inputs of 16 bits, sums are kept in float32, those of the gradients too.
    """

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, is_causal: bool = False
    ) -> Tensor:
        """Computes attention.

        Args:
            query: [..., queries, d].
            key, value: [..., keys, d].
            is_causal: let query i see the keys up to i only, however many keys there are.

        Returns:
            [..., queries, d], in the dtype of ``query``.
        """
        # BEGIN SOLUTION A0.4
        result = torch.empty_like(query)
        log_sum = query.new_empty(query.shape[:-1], dtype=wide(query))
        for rows in tiles(query.shape[-2]):
            largest = torch.full_like(log_sum[..., rows], -torch.inf)
            total = torch.zeros_like(largest)
            mixed = torch.zeros_like(query[..., rows, :], dtype=wide(query))
            for columns in tiles(key.shape[-2]):
                scores = tile_scores(query, key, rows, columns, is_causal)
                if scores is None:
                    break
                # What was added up so far was relative to a maximum that may have grown.
                before, largest = largest, torch.maximum(largest, scores.amax(-1))
                weights = (scores - largest[..., None]).exp()
                shrink = (before - largest).exp()
                total = total * shrink + weights.sum(-1)
                mixed = mixed * shrink[..., None] + weights @ value[..., columns, :].to(wide(query))
            result[..., rows, :] = (mixed / total[..., None]).to(query.dtype)
            log_sum[..., rows] = largest + total.log()
        ctx.save_for_backward(query, key, value, result, log_sum)
        ctx.is_causal = is_causal
        return result
        # END SOLUTION

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        """Computes the gradients of query, key and value, in their dtypes, from the result's."""
        # BEGIN SOLUTION A0.4
        query, key, value, result, log_sum = ctx.saved_tensors
        wider = wide(query)
        of_query, of_key, of_value = (
            torch.zeros_like(each, dtype=wider) for each in (query, key, value)
        )
        # Σ_j P_ij dP_ij, by which the softmax couples the scores of a query.
        coupled = (gradient.to(wider) * result.to(wider)).sum(-1, keepdim=True)
        for rows in tiles(query.shape[-2]):
            own = gradient[..., rows, :].to(wider)
            for columns in tiles(key.shape[-2]):
                scores = tile_scores(query, key, rows, columns, ctx.is_causal)
                if scores is None:
                    break
                weights = (scores - log_sum[..., rows, None]).exp()
                of_value[..., columns, :] += weights.mT @ own
                of_weights = own @ value[..., columns, :].to(wider).mT
                of_scores = weights * (of_weights - coupled[..., rows, :])
                of_scores /= math.sqrt(query.shape[-1])
                of_query[..., rows, :] += of_scores @ key[..., columns, :].to(wider)
                of_key[..., columns, :] += of_scores.mT @ query[..., rows, :].to(wider)
        return of_query.to(query.dtype), of_key.to(key.dtype), of_value.to(value.dtype), None
        # END SOLUTION


# BEGIN SOLUTION A0.4
def wide(tensor: Tensor) -> torch.dtype:
    """Returns the dtype that sums are kept in: at least float32."""
    return torch.promote_types(tensor.dtype, torch.float32)


def tiles(count: int) -> list[slice]:
    """Returns consecutive parts of at most TILE positions."""
    return [slice(start, min(start + TILE, count)) for start in range(0, count, TILE)]


def tile_scores(
    query: Tensor, key: Tensor, rows: slice, columns: slice, is_causal: bool
) -> Tensor | None:
    """Computes a tile of QKᵀ/√d; None where no query of the tile may see any of its keys."""
    if is_causal and columns.start >= rows.stop:
        return None
    dtype = wide(query)
    scores = query[..., rows, :].to(dtype) @ key[..., columns, :].to(dtype).mT
    scores /= math.sqrt(query.shape[-1])
    if is_causal and columns.stop > rows.start + 1:
        row, column = (torch.arange(each.start, each.stop) for each in (rows, columns))
        hidden = (column > row[:, None]).to(scores.device)
        scores = scores.masked_fill(hidden, -torch.inf)
    return scores


# END SOLUTION
