"""Tiled attention against PyTorch's own, in float64, and what it keeps and makes on the way."""

from __future__ import annotations

import pytest
import torch
from judging import assert_nothing_put_by
from torch.nn.functional import scaled_dot_product_attention

from common.course.sandbox.student import Student

TILE = 64
LONG = 2048
"""Queries and keys whose matrix of scores is seen in memory."""
HEADS = (2, 3)
LIMIT_16_BITS = 3e-3
"""Of the relative error: rounding the results alone makes two thirds of it."""


def inputs(
    variant: int,
    queries: int,
    keys: int,
    *,
    channels: int = 8,
    heads: tuple[int, ...] = HEADS,
    scale: float = 3.0,
) -> list[torch.Tensor]:
    """Draws queries, keys and values in float64."""
    draw = torch.Generator().manual_seed(variant)
    shapes = ((*heads, count, channels) for count in (queries, keys, keys))
    return [scale * torch.randn(shape, generator=draw, dtype=torch.float64) for shape in shapes]


def check_attention(
    student: Student, tensors: list[torch.Tensor], is_causal: bool, tile: int | None = None
) -> None:
    """Checks result and gradients against PyTorch's."""
    weights = torch.randn(tensors[0].shape, dtype=torch.float64)
    result = student.probe("one_process").attention(tensors, weights, is_causal, tile)
    check_result(result, tensors, weights, is_causal)


def check_result(
    result: dict, tensors: list[torch.Tensor], weights: torch.Tensor, is_causal: bool
) -> None:
    """Checks result and gradients of a probe against PyTorch's."""
    theirs = [tensor.clone().requires_grad_() for tensor in tensors]
    expected = scaled_dot_product_attention(*theirs, is_causal=is_causal)
    wanted = torch.autograd.grad((expected * weights).sum(), theirs)
    queries, keys = (tensor.shape[-2] for tensor in tensors[:2])
    case = f"{queries} queries, {keys} keys{', causal' if is_causal else ''}"
    torch.testing.assert_close(
        result["result"], expected.detach(), rtol=1e-10, atol=1e-12, msg=f"result: {case}"
    )
    names = ("query", "key", "value")
    for name, gradient, want in zip(names, result["gradients"], wanted, strict=True):
        torch.testing.assert_close(
            gradient, want, rtol=1e-9, atol=1e-11, msg=f"gradient of {name}: {case}"
        )


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("length", [1, 63, 64, 130])
def test_results_and_gradients_are_pytorchs(
    student: Student, variant: int, length: int, is_causal: bool
) -> None:
    check_attention(student, inputs(variant, length, length, channels=5 + length % 4), is_causal)


def test_inputs_of_any_number_of_dimensions_and_size_are_taken(
    student: Student, variant: int
) -> None:
    check_attention(student, inputs(variant, 70, 70, heads=(), channels=6), True)
    check_attention(student, inputs(variant, 9, 9, heads=(2, 1, 3)), False)
    # The exponential of such scores is more than a float64 holds.
    check_attention(student, inputs(variant, 70, 70, scale=30.0, channels=16), False)


@pytest.mark.parametrize("is_causal", [False, True])
def test_queries_and_keys_may_differ_in_number(
    student: Student, variant: int, is_causal: bool
) -> None:
    check_attention(student, inputs(variant, 70, 150), is_causal)
    check_attention(student, inputs(variant, 150, 70), is_causal)


@pytest.mark.parametrize("is_causal", [False, True])
def test_tiles_of_any_size_give_the_same(student: Student, variant: int, is_causal: bool) -> None:
    check_attention(student, inputs(variant, 5, 5), is_causal, tile=2)


@pytest.mark.parametrize("is_causal", [False, True])
def test_what_is_saved_is_the_log_sum_exp_and_no_matrix_of_scores(
    student: Student, variant: int, is_causal: bool
) -> None:
    tensors = inputs(variant, 200, 200)
    ones = torch.ones_like(tensors[0])
    result = student.probe("one_process").attention(tensors, ones, is_causal)
    query, key, _ = tensors
    scores = query @ key.mT / query.shape[-1] ** 0.5
    if is_causal:
        scores = scores.masked_fill(torch.ones(200, 200).triu(1).bool(), -torch.inf)
    sums = [kept for kept in result["kept"] if kept.shape == query.shape[:-1]]
    assert sums, "nothing is saved that has a number for each query"
    assert any(torch.allclose(kept, scores.logsumexp(-1), rtol=1e-12) for kept in sums), (
        "what is saved of each query is not the log-sum-exp of its scores"
    )
    numbers = sum(kept.numel() for kept in result["kept"])
    # Inputs, result, log-sum-exp, and room for another number of each query.
    most = sum(tensor.numel() for tensor in (*tensors, query)) + 2 * query[..., 0].numel()
    assert numbers <= most, f"{numbers} numbers are saved for the backward pass"
    if not is_causal:  # neither anywhere else
        check_memory(student, variant)


def test_no_tensor_is_larger_than_a_tile_or_an_input(student: Student, variant: int) -> None:
    for tile in (None, 16):
        tensors = inputs(variant, 200, 200)
        result = student.probe("one_process").attention(
            tensors, torch.ones_like(tensors[0]), False, tile
        )
        heads = tensors[0].shape[:-2].numel()
        most = max(tensors[0].numel(), heads * (tile or TILE) ** 2)
        words = f"a tensor of {result['largest']} numbers is made, with tiles of {tile or TILE}"
        assert result["largest"] <= most, words
    check_memory(student, variant)


def check_memory(student: Student, variant: int) -> None:
    """Checks that no matrix of scores is there, whatever computes it and wherever it is kept."""
    tensors = inputs(variant, LONG, LONG, heads=())
    assert_nothing_put_by(student.put_by_bytes())
    with student.measured() as memory:
        result = student.probe("one_process").attention(tensors, tensors[2], False, LONG // 8)
    taken = (max(memory) - memory[0]) / (8 * LONG**2)
    assert taken < 0.5, f"it takes memory of {taken:.1f} whole matrices of scores"
    check_result(result, tensors, tensors[2], False)


def test_sums_of_16_bit_inputs_are_kept_in_float32(student: Student, variant: int) -> None:
    wide = [tensor.float() for tensor in inputs(variant, 256, 256, channels=16, scale=1.0)]
    narrow = [tensor.bfloat16() for tensor in wide]
    wide = [tensor.float().requires_grad_() for tensor in narrow]
    expected = scaled_dot_product_attention(*wide, is_causal=True)
    wanted = torch.autograd.grad(expected.sum(), wide)
    ones = torch.ones_like(narrow[0])
    result = student.probe("one_process").attention(narrow, ones, True, 8)
    results = [result["result"], *result["gradients"]]
    names = ("result", *(f"gradient of {name}" for name in ("query", "key", "value")))
    for name, result, want in zip(names, results, (expected, *wanted), strict=True):
        assert result.dtype == torch.bfloat16, f"{name}: its dtype is {result.dtype}"
        error = (result.float() - want).norm() / want.norm()
        assert error < LIMIT_16_BITS, f"{name} of 16-bit inputs: off by {error:.1%}"
