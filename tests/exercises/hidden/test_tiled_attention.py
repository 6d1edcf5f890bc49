"""Tiled attention against PyTorch's own and against finite differences, in float64."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from common.course.sandbox.student import Student


def inputs(queries: int, keys: int, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    torch.manual_seed(0)
    shapes = ((2, 3, queries, 8), (2, 3, keys, 8), (2, 3, keys, 8))
    return [(3 * torch.randn(shape)).to(dtype) for shape in shapes]


def check_attention(
    student: Student, given: list[torch.Tensor], is_causal: bool, tile: int | None = None
) -> None:
    """Checks result and gradients against PyTorch's."""
    weights = torch.randn(given[0].shape, dtype=given[0].dtype)
    found = student.probe("one_process").attention(given, weights, is_causal, tile)
    theirs = [each.clone().requires_grad_() for each in given]
    expected = scaled_dot_product_attention(*theirs, is_causal=is_causal)
    torch.testing.assert_close(found["found"], expected.detach(), rtol=1e-10, atol=1e-12)
    wanted = torch.autograd.grad((expected * weights).sum(), theirs)
    for one, other in zip(found["gradients"], wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("length", [1, 63, 64, 130])
def test_results_and_gradients_are_pytorchs(student: Student, length: int, is_causal: bool) -> None:
    check_attention(student, inputs(length, length), is_causal)


def test_queries_and_keys_may_differ_in_number(student: Student) -> None:
    check_attention(student, inputs(70, 150), False)


@pytest.mark.parametrize("is_causal", [False, True])
def test_tiles_of_any_size_give_the_same(student: Student, is_causal: bool) -> None:
    check_attention(student, inputs(5, 5), is_causal, tile=2)


def test_what_is_saved_is_the_log_sum_exp_and_no_matrix_of_scores(student: Student) -> None:
    given = inputs(200, 200)
    found = student.probe("one_process").attention(given, torch.ones_like(given[0]), False)
    query, key, _ = given
    [log_sum] = [each for each in found["saved"] if each.shape == query.shape[:-1]]
    scores = query @ key.mT / 8**0.5
    torch.testing.assert_close(log_sum, scores.logsumexp(-1), rtol=1e-12, atol=1e-12)
    assert all(each.shape[-2:] != (200, 200) for each in found["saved"])


def test_sums_of_16_bit_inputs_are_kept_in_float32(student: Student) -> None:
    wide = inputs(128, 128, torch.float32)
    narrow = [each.bfloat16() for each in wide]
    expected = scaled_dot_product_attention(*wide, is_causal=True)
    ones = torch.ones_like(narrow[0])
    found = student.probe("one_process").attention(narrow, ones, True)["found"]
    assert found.dtype == torch.bfloat16
    assert ((found.float() - expected).norm() / expected.norm()) < 2e-2
