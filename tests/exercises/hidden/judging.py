"""What several checks need to judge by."""

from __future__ import annotations

import os
from collections.abc import Mapping

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings

IS_GRADED = "DDPLAB_GRADED" in os.environ
DRAWN = settings(
    max_examples=100,  # whatever the profile of the project's own tests
    phases=Phase if IS_GRADED else (Phase.explicit, Phase.generate),
    deadline=None,
    database=None,
    derandomize=False,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
"""Of checks that draw cases: the student's process is the same for all of them, and a case that
fails is made smaller only for a student, who is told."""


def on_so_many_ranks(*numbers: int, graded: tuple[int, ...]) -> pytest.MarkDecorator:
    """Returns the mark of a check on these numbers of ranks, and on others only to grade."""
    more = [pytest.param(number, marks=pytest.mark.grading) for number in graded]
    return pytest.mark.parametrize("ranks", [*numbers, *more])


def assert_states_equal(
    found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]
) -> None:
    """Raises unless every tensor is the expected one, but for rounding."""
    assert list(found) == list(expected)
    for name, value in found.items():
        tolerance = 1e-6 if value.dtype == torch.float32 else 1e-12
        torch.testing.assert_close(value, expected[name], rtol=tolerance, atol=tolerance)
