"""What several checks need to judge by."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from hypothesis import HealthCheck, settings

DRAWN = settings(
    deadline=None,
    database=None,
    derandomize=False,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
"""Of checks that draw cases: the student's process is the same for all of them."""


def assert_states_equal(
    found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]
) -> None:
    """Raises unless every tensor is the expected one, but for rounding."""
    assert list(found) == list(expected)
    for name, value in found.items():
        tolerance = 1e-6 if value.dtype == torch.float32 else 1e-12
        torch.testing.assert_close(value, expected[name], rtol=tolerance, atol=tolerance)
