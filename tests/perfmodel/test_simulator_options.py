"""Options of DDP and of the profile that the simulator knows: caps one by one, views, ranks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from perfmodel_support import CAPS_BYTES, MIB, make_profile, networks, profiles, refused

from common.perfmodel.buckets import DdpOptions, assign_buckets, ddp_buckets
from common.perfmodel.collectives import AlphaBeta
from common.perfmodel.ddp.bucketings import distinct_bucketings
from common.perfmodel.ddp.profile import TERMS, DdpCosts
from common.perfmodel.model import DdpModel


def test_caps_given_one_by_one_close_one_bucket_each_and_the_last_all_others():
    sizes = [MIB] * 10
    options = DdpOptions(25, bucket_cap_mib_list=(1, 3, 2))
    order = list(range(10))
    assert ddp_buckets(sizes, order, options) == [[0], [1, 2, 3], [4, 5], [6, 7], [8, 9]]
    # Also before the rebuild, where a single cap means one bucket of everything; the limits then
    # count from the first registered parameter, whose bucket is reduced last.
    before = [[8, 9], [6, 7], [4, 5], [1, 2, 3], [0]]
    assert ddp_buckets(sizes, order, options, iteration=0) == before
    profile = make_profile(sizes, np.arange(1.0, 11.0))
    timeline = DdpModel(profile, AlphaBeta(0, 1e9)).backward(options)
    assert [len(event.members) for event in timeline.events] == [1, 3, 2, 2, 2]


@pytest.mark.parametrize("caps", [(1, 0), (-1,), (float("nan"),), (1, None)])
def test_an_impossible_list_of_caps_is_refused(caps):
    with refused("cap"):
        DdpOptions(bucket_cap_mib_list=caps)


def test_no_cap_at_all_is_refused():
    with refused("no bucket cap"):
        assign_buckets([4, 4], [])


@given(profiles(), networks(), CAPS_BYTES)
def test_a_bucket_view_saves_exactly_the_copies_back(profile, network, cap):
    costs = DdpCosts(copy_in_s_per_byte=0.25, copy_out_s_per_byte=0.5)
    viewed = DdpModel(profile, network, costs=costs).backward(
        DdpOptions(cap / MIB), gradient_as_bucket_view=True
    )
    without = replace(costs, copy_out_s_per_byte=0.0)
    assert viewed == DdpModel(profile, network, costs=without).at_cap(cap / MIB)


# --- ranks -------------------------------------------------------------------------------------


def test_a_bucket_waits_for_the_rank_that_is_last_at_it():
    # Rank 0 is last at the first two gradients, rank 1 at the third; an all-reduce takes 0.5 s.
    ranks = np.array([[2.0, 4.0, 5.0], [1.0, 2.0, 7.0]])
    profile = replace(make_profile([10, 10, 10], [2.0, 4.0, 5.0], tail_s=3.0), rank_ready_s=ranks)
    timeline = DdpModel(profile, AlphaBeta(0.5, 1e12)).at_cap(10 / MIB)
    assert [event.start_s for event in timeline.events] == pytest.approx([2.0, 4.0, 7.0])
    assert timeline.total_s == 8.0  # the computation's end, on the last rank
    one = DdpModel(profile, AlphaBeta(0.5, 1e12)).at_cap(20 / MIB)
    assert [event.ready_s for event in one.events] == [4.0, 7.0]


@given(profiles(), networks(), CAPS_BYTES, st.lists(st.floats(0, 1), min_size=1, max_size=3))
def test_ranks_that_are_never_later_than_the_slowest_change_nothing(profile, network, cap, factors):
    ranks = np.stack([profile.ready_s, *(profile.ready_s * factor for factor in factors)])
    several = replace(profile, rank_ready_s=ranks)
    expected = DdpModel(profile, network).at_cap(cap / MIB)
    assert DdpModel(several, network).at_cap(cap / MIB) == expected


@given(profiles(), networks(), CAPS_BYTES, st.data())
def test_ranks_are_never_faster_together_than_any_of_them_alone(profile, network, cap, data):
    count = len(profile.names)
    shares = st.lists(st.integers(0, 8), min_size=count, max_size=count)
    ranks = np.array([data.draw(shares) for _ in range(2)]) / 8 * profile.backward_s
    together = DdpModel(replace(profile, rank_ready_s=ranks), network).at_cap(cap / MIB)
    for rank in ranks:
        one = replace(profile, rank_ready_s=rank[None])
        alone = DdpModel(one, network).at_cap(cap / MIB)
        assert together.total_s >= alone.total_s - 1e-9


def test_scaling_a_profile_scales_its_ranks():
    profile = replace(make_profile([4], [1.0], tail_s=1.0), rank_ready_s=np.array([[1.0], [2.0]]))
    assert profile.scaled(compute=3).rank_ready_s.tolist() == [[3.0], [6.0]]


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        (np.ones((2, 3)), ["shape (2, 3)", "(ranks, 2)"]),
        (np.ones(2), ["shape"]),
        (np.empty((0, 2)), ["shape"]),
        (np.array([[1.0, np.nan]]), ["finite"]),
        (np.array([[-1.0, 1.0]]), ["negative"]),
        (np.array([[1.0, 2.5]]), ["2.0 s", "2.5 s"]),
    ],
)
def test_impossible_ranks_are_refused(ranks, words):
    with refused(*words):
        replace(make_profile([4, 4], [1.0, 2.0]), rank_ready_s=ranks)


# --- switching terms off -------------------------------------------------------------------------

ALL = DdpCosts(1e-3, 2e-3, 1.5, 1.25, ((1.0, 100.0), (0.5, 1.0)), launch_s=0.25)


def test_every_term_can_be_switched_off():
    assert ALL.without(*TERMS) == DdpCosts()
    for term in TERMS:
        assert ALL.without(term) != ALL
    assert ALL.without() == ALL
    with refused("contention", "compute_slowdown", "launch"):
        ALL.without("contention")


# --- searching once for many networks ------------------------------------------------------------


@given(profiles(), networks(), st.none() | st.just((1e-6, 5e-6, 2e-5, 1.0)))
def test_bucketings_found_once_give_the_same_best_cap(profile, network, caps):
    found = distinct_bucketings(profile, caps)
    model = DdpModel(profile, network)
    assert model.best_cap(caps, bucketings=found) == model.best_cap(caps)
