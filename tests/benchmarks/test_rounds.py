"""The order in which arms take turns: a steady drift favours none."""

from __future__ import annotations

import pytest

from common.benchmarks.rounds import rotated, rotated_rounds


@pytest.mark.parametrize("count", [2, 3, 5, 9, 20])
def test_a_steady_drift_favours_no_item_of_the_rounds(count):
    items = tuple(range(count))
    rounds = [rotated(items, round_) for round_ in range(2 * count)]
    assert all(sorted(visited) == list(items) for visited in rounds)
    # Over each pair of rounds the positions of every item add up to the same.
    for there, back in zip(rounds[::2], rounds[1::2], strict=True):
        assert {there.index(item) + back.index(item) for item in items} == {count - 1}
    assert {visited[0] for visited in rounds} == set(items)


def test_rounds_follow_one_another_each_in_its_own_order():
    arms = ["a", "b", "c"]
    visits = list(rotated_rounds(arms, 3, first=-1))
    assert visits == [(round_, arm) for round_ in (-1, 0, 1, 2) for arm in rotated(arms, round_)]
    assert visits[3:6] == [(0, "a"), (0, "b"), (0, "c")]
