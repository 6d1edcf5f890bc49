"""Largest-first and Karmarkar–Karp: textbook examples, bounds, and two independent programmes."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from common.data.text_lengths import read_text_lengths, recorded_lengths
from common.errors import UserError
from common.scheduling.packing import karmarkar_karp, largest_first

METHODS = {
    "largest first": largest_first,
    "differencing": karmarkar_karp,
    "equal sizes": lambda weights, ranks: karmarkar_karp(weights, ranks, equal_size=True),
}


def sums(weights, groups) -> list:
    assert sorted(itertools.chain.from_iterable(groups)) == list(range(len(weights)))
    assert all(groups)
    return sorted((sum(weights[index] for index in group) for group in groups), reverse=True)


def test_textbook_examples() -> None:
    # Karmarkar and Karp's own example: differencing ends at a difference of 2 (the best is 0).
    assert sums([8, 7, 6, 5, 4], karmarkar_karp([8, 7, 6, 5, 4], 2)) == [16, 14]
    assert sums([8, 7, 6, 5, 4], largest_first([8, 7, 6, 5, 4], 2)) == [17, 13]
    # Wikipedia, Largest differencing method: three and more subsets.
    assert sums([8, 7, 6, 5, 4], karmarkar_karp([8, 7, 6, 5, 4], 3)) == [11, 11, 8]
    # Graham's worst case for two machines: 7 where 6 is possible, 4/3 − 1/6 = 7/6.
    assert sums([3, 3, 2, 2, 2], largest_first([3, 3, 2, 2, 2], 2)) == [7, 5]


def best_largest_sum(weights: list[int], world_size: int) -> int:
    ways = np.indices((world_size,) * len(weights)).reshape(len(weights), -1).T
    loads = [np.where(ways == rank, weights, 0).sum(axis=1) for rank in range(world_size)]
    return int(np.max(loads, axis=0).min())


def test_largest_first_keeps_grahams_bound_and_nothing_beats_the_optimum() -> None:
    rng = np.random.default_rng(1)
    for _ in range(150):
        ranks = int(rng.integers(1, 4))
        weights = rng.integers(1, 40, int(rng.integers(ranks, 8))).tolist()
        best = best_largest_sum(weights, ranks)
        found = {name: sums(weights, method(weights, ranks))[0] for name, method in METHODS.items()}
        assert min(found.values()) >= best
        assert found["largest first"] <= (4 / 3 - 1 / (3 * ranks)) * best + 1e-9


def largest_differencing(weights: list[float], world_size: int) -> list[float]:
    """Differences plainly: partial plans hold all their sums, and the list is sorted each time."""
    plans = [[weight] + [0.0] * (world_size - 1) for weight in weights]
    while len(plans) > 1:
        plans.sort(key=lambda plan: plan[-1] - plan[0])
        first, second, *rest = plans
        joined = [a + b for a, b in zip(first, second[::-1], strict=True)]
        plans = [sorted(joined, reverse=True), *rest]
    return plans[0]


def test_differencing_equals_a_plain_programme_of_it() -> None:
    rng = np.random.default_rng(2)
    for ranks, count in ((1, 4), (2, 9), (3, 3), (4, 30), (7, 40), (16, 60)):
        weights = rng.uniform(1, 100, count).tolist()  # without ties
        expected = largest_differencing(weights, ranks)
        assert sums(weights, karmarkar_karp(weights, ranks)) == pytest.approx(expected)


@pytest.mark.parametrize(("count", "ranks"), [(12, 4), (13, 4), (15, 4), (4, 4), (50, 7), (5, 1)])
def test_equal_sizes_differ_by_one_at_most(count: int, ranks: int) -> None:
    weights = np.random.default_rng(3).integers(1, 200, count)
    groups = karmarkar_karp(weights, ranks, equal_size=True)
    sizes = sorted(map(len, groups))
    assert sizes == sorted(len(part) for part in np.array_split(weights, ranks))
    sums(weights, groups)


def test_equal_sizes_begin_with_neighbours_in_weight() -> None:
    # Each of verl's first plans deals three neighbours out to the three ranks.
    weights = [1, 2, 3, 10, 20, 30, 100, 200, 300]
    groups = karmarkar_karp(weights, 3, equal_size=True)
    for start in (0, 3, 6):
        neighbours = set(range(start, start + 3))
        assert all(len(neighbours & set(group)) == 1 for group in groups)
    assert sums(weights, groups) == [311, 222, 133]


@pytest.mark.parametrize("name", METHODS)
def test_the_same_weights_give_the_same_groups(name: str) -> None:
    weights = np.random.default_rng(4).integers(1, 9, 60)
    again = METHODS[name](weights.tolist(), 7)
    assert METHODS[name](weights, 7) == again


@pytest.mark.skipif("sst2" not in recorded_lengths(), reason="no recorded lengths of SST-2")
def test_real_lengths_are_packed_within_one_and_half_a_percent_of_the_bound() -> None:
    distribution, rng = read_text_lengths("sst2"), np.random.default_rng(5)
    above = []
    for _ in range(40):
        lengths = distribution.draw(256, rng, max_length=256)
        bound = max(-(-lengths.sum() // 8), lengths.max())
        found = [method(lengths, 8) for method in (largest_first, karmarkar_karp)]
        above.append([sums(lengths, groups)[0] / bound - 1 for groups in found])
    assert np.mean(above, axis=0)[0] < 0.01
    assert np.mean(above, axis=0)[1] < 0.005


@pytest.mark.parametrize("name", METHODS)
def test_bad_input_is_refused(name: str) -> None:
    for weights, ranks, message in (
        ([1, 2], 3, "2 samples for 3 ranks"),
        ([1, 0], 2, "sample 1 weighs 0"),
        ([1], 0, "0 ranks"),
    ):
        with pytest.raises(UserError, match=message):
            METHODS[name](weights, ranks)
