"""Distinct bucketings: against every cap tried one byte after another."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import UserError
from common.perfmodel.buckets import MIB, assign_buckets
from common.perfmodel.ddp.bucketings import choose_caps, distinct_caps

SIZES = st.lists(st.integers(1, 30), min_size=1, max_size=12)


@given(SIZES)
def test_every_bucketing_that_any_cap_gives_is_there_once(sizes):
    by_force = []
    for cap in range(1, sum(sizes) + 1):
        buckets = assign_buckets(sizes, cap)
        if buckets not in by_force:
            by_force.append(buckets)
    found = list(distinct_caps(sizes))
    assert [assign_buckets(sizes, int(cap.cap_mib * MIB)) for cap in found] == by_force
    assert [cap.num_buckets for cap in found] == [len(buckets) for buckets in by_force]


def test_few_are_spread_from_the_most_buckets_allowed_to_one():
    chosen = choose_caps([1000] * 64, 5, 40)
    assert [cap.num_buckets for cap in chosen] == sorted(
        (cap.num_buckets for cap in chosen), reverse=True
    )
    assert len(chosen) == 5
    assert chosen[0].num_buckets == 32  # 64 would be more than 40
    assert chosen[-1].num_buckets == 1
    assert len(choose_caps([1, 1], 5, 40)) == 2  # there are no more


@pytest.mark.parametrize(("sizes", "count"), [([8], 3), ([8, 8], 1)])
def test_fewer_than_two_are_refused(sizes, count):
    with pytest.raises(UserError, match="at least 2 are needed"):
        choose_caps(sizes, count, 10)
