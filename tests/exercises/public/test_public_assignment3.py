"""Assignment 3: small batches, and a cost without noise."""

from __future__ import annotations

import numpy as np
import pytest

from common.exercises.cost_fit import fit_cost
from common.exercises.loss_scale import loss_scale
from common.exercises.min_max_partition import SortedBatch, min_max_partition


def test_a3_1_one_long_text_stands_alone() -> None:
    batch = SortedBatch.of(np.array([2, 9, 2, 2, 1]))
    bottleneck, bounds = min_max_partition(batch, 2, lambda b, m: b * m, 5)
    assert bottleneck == 9
    assert bounds == [0, 1, 5]
    assert batch.groups(bounds) == [[1], [0, 2, 3, 4]]


def test_a3_2_ranks_with_as_many_samples_need_no_factor() -> None:
    assert loss_scale("samples", 4, 8, 32) == 1
    assert sum(loss_scale("tokens", 2, own, 10) for own in (3, 7)) == pytest.approx(2)


def test_a3_3_a_planted_cost_is_found() -> None:
    batch, longest = np.array([1.0, 2, 4, 8, 16]), np.array([9.0, 3, 7, 5, 11])
    times = 0.5 + 0.01 * batch * longest + 0.001 * batch * longest**2
    assert fit_cost(batch, longest, times) == pytest.approx((0.5, 0.01, 0.001), rel=1e-6)
