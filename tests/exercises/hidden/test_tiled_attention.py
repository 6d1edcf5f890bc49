"""Tiled attention against PyTorch's own and against finite differences, in float64."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from common.exercises import tiled_attention
from common.exercises.tiled_attention import TiledAttention


def inputs(queries: int, keys: int, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    torch.manual_seed(0)
    shapes = ((2, 3, queries, 8), (2, 3, keys, 8), (2, 3, keys, 8))
    return [(3 * torch.randn(shape)).to(dtype).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("length", [1, 63, 64, 130])
def test_results_and_gradients_are_pytorchs(length: int, is_causal: bool) -> None:
    query, key, value = inputs(length, length)
    found = TiledAttention.apply(query, key, value, is_causal)
    expected = scaled_dot_product_attention(query, key, value, is_causal=is_causal)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    weights = torch.randn_like(found)
    gradients, wanted = (
        torch.autograd.grad((each * weights).sum(), (query, key, value))
        for each in (found, expected)
    )
    for one, other in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)


def test_queries_and_keys_may_differ_in_number() -> None:
    query, key, value = inputs(70, 150)
    found = TiledAttention.apply(query, key, value)
    expected = scaled_dot_product_attention(query, key, value)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


def test_gradients_are_those_of_finite_differences(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiled_attention, "TILE", 2)
    small = [each.detach()[:1, :1, :5, :3].requires_grad_() for each in inputs(5, 5)]
    for is_causal in (False, True):
        assert torch.autograd.gradcheck(lambda *x, c=is_causal: TiledAttention.apply(*x, c), small)


def test_what_is_saved_is_the_log_sum_exp_and_no_matrix_of_scores() -> None:
    query, key, value = inputs(200, 200)
    saved = TiledAttention.apply(query, key, value).grad_fn.saved_tensors
    [log_sum] = [each for each in saved if each.shape == query.shape[:-1]]
    scores = query @ key.mT / 8**0.5
    torch.testing.assert_close(log_sum, scores.logsumexp(-1), rtol=1e-12, atol=1e-12)
    assert all(each.shape[-2:] != (200, 200) for each in saved)


def test_sums_of_16_bit_inputs_are_kept_in_float32() -> None:
    wide = inputs(128, 128, torch.float32)
    expected = TiledAttention.apply(*wide, True)
    found = TiledAttention.apply(*(each.bfloat16() for each in wide), True)
    assert found.dtype == torch.bfloat16
    assert ((found.float() - expected).norm() / expected.norm()) < 2e-2
