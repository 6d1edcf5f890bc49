"""Assignment 3: small batches, and a cost without noise."""

from __future__ import annotations

import numpy as np
import pytest

from common.exercises.cost_fit import fit_cost
from common.exercises.loss_scale import loss_scale
from common.exercises.min_max_partition import (
    SortedBatch,
    lower_bound,
    min_max_partition,
    most_samples,
    one_each,
    smallest_bottleneck,
)


def test_a3_1_one_long_text_stands_alone() -> None:
    batch = SortedBatch.of(np.array([2, 9, 2, 2, 1]))
    bottleneck, bounds = min_max_partition(batch, 2, lambda b, m: b * m, 5)
    assert bottleneck == 9
    assert bounds == [0, 1, 5]
    assert batch.groups(bounds) == [[1], [0, 2, 3, 4]]


def test_a3_1_pieces_of_the_search() -> None:
    longest = np.array([4, 2, 1])
    assert most_samples(lambda b, m: b * m, longest, 8, 5).tolist() == [2, 4, 5]
    batch = SortedBatch.of(np.array([5, 4, 3, 3, 2, 1, 1]))
    assert lower_bound(batch, 2, lambda b, m: b * m) == 12  # of all seven, one rank has four
    assert one_each([0, 3, 5], 4) == [0, 2, 3, 4, 5]

    def attempt(time: float) -> tuple[bool, float]:
        return (True, 20) if time >= 20 else (False, 20 if time >= 10 else 10)

    assert smallest_bottleneck(5, 40, attempt) == 20


def test_a3_2_ranks_with_as_many_samples_need_no_factor() -> None:
    assert loss_scale("samples", 4, 8, 32) == 1
    assert sum(loss_scale("tokens", 2, own, 10) for own in (3, 7)) == pytest.approx(2)


def test_a3_3_a_planted_cost_is_found() -> None:
    batch, longest = np.array([1.0, 2, 4, 8, 16]), np.array([9.0, 3, 7, 5, 11])
    times = 0.5 + 0.01 * batch * longest + 0.001 * batch * longest**2
    assert fit_cost(batch, longest, times) == pytest.approx((0.5, 0.01, 0.001), rel=1e-6)
