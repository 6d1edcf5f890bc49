"""Assignment 2: buckets, their time and the best cap, in cases that can be done by hand.

``test_public_ranks.py`` has A2.4.
"""

from __future__ import annotations

import pytest

from common.exercises.bucket_assignment import assign_buckets
from common.exercises.bucket_time import backward_time_s, one_after_another
from common.exercises.cap_search import cap_interval, fastest_cap, walk_bucketings


def test_a2_1_a_bucket_closes_when_it_holds_the_cap() -> None:
    assert assign_buckets([4, 4, 4, 4, 4], 8) == [[0, 1], [2, 3], [4]]
    assert assign_buckets([1, 9, 1], 8) == [[0, 1], [2]]
    assert assign_buckets([4, 4, 4, 4], (4, 8)) == [[0], [1, 2], [3]]


def test_a2_1_kinds_do_not_share_a_bucket() -> None:
    assert assign_buckets([4, 4, 4, 4], 8, kinds=["a", "b", "a", "b"]) == [[0, 2], [1, 3]]


def test_a2_2_the_second_all_reduce_waits_for_the_first() -> None:
    assert one_after_another([1.0, 2.0], [5.0, 1.0]) == [6.0, 7.0]
    found = backward_time_s([8, 8], [1.0, 2.0], [[0], [1]], lambda size: size / 2)
    assert found == 9.0
    assert backward_time_s([8, 8], [1.0, 2.0], [[0, 1]], lambda size: size / 2) == 10.0


def test_a2_3_latency_and_overlap_have_a_best_cap() -> None:
    sizes, ready = [10, 10, 10, 10], [1.0, 2.0, 3.0, 4.0]
    _, with_latency = fastest_cap(sizes, ready, lambda size: 10.0 + size / 1000)
    assert with_latency == pytest.approx(14.04)  # one bucket
    _, without = fastest_cap(sizes, ready, lambda size: size / 20)
    assert without == pytest.approx(4.5)  # the last one begins when it is ready


def test_a2_3_two_gradients_have_two_bucketings() -> None:
    assert list(walk_bucketings([2, 3])) == [(1, 2, [[0], [1]]), (3, 5, [[0, 1]])]
    assert cap_interval([2, 3, 4], [[0, 1], [2]]) == (3, 5)
