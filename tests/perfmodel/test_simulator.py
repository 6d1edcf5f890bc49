"""The event-by-event simulator without costs: the textbook recurrence, bounds, DDP's buckets.

With bookkeeping and contention it is tested in test_simulator_costs.py.
"""

from __future__ import annotations

from itertools import chain

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from perfmodel_support import (
    CAPS_BYTES,
    MIB,
    gpt2_profile,
    greedy_groups,
    make_profile,
    networks,
    profiles,
    refused,
)

from common.perfmodel.buckets import DdpOptions, ddp_buckets
from common.perfmodel.collectives import AlphaBeta
from common.perfmodel.ddp.profile import BackwardProfile
from common.perfmodel.model import DdpModel


def recurrence(
    profile: BackwardProfile, network, groups: list[list[int]]
) -> list[tuple[float, float, float]]:
    """Computes ready, start and end by bucket.

    start_i = max(end_{i−1}, ready_i), end_i = start_i + a(S_i).
    """
    spans = []
    end = 0.0
    for group in groups:
        ready = max(float(profile.ready_s[i]) for i in group)
        start = max(end, ready)
        end = start + network.time_s(sum(int(profile.sizes_bytes[i]) for i in group))
        spans.append((ready, start, end))
    return spans


@given(profiles(), networks(), CAPS_BYTES)
def test_without_costs_the_simulation_is_the_textbook_recurrence(profile, network, cap):
    timeline = DdpModel(profile, network).at_cap(cap / MIB)
    groups = greedy_groups(profile.sizes_bytes.tolist(), cap)
    expected = recurrence(profile, network, groups)
    for event, group, span in zip(timeline.events, groups, expected, strict=True):
        assert list(event.members) == group
        assert (event.ready_s, event.start_s, event.end_s) == pytest.approx(span)
    assert timeline.total_s == pytest.approx(max(profile.backward_s, expected[-1][2]))
    assert timeline.compute_end_s == pytest.approx(profile.backward_s)
    assert timeline.communication_s == pytest.approx(sum(end - start for _, start, end in expected))
    assert timeline.exposed_communication_s == pytest.approx(timeline.total_s - profile.backward_s)
    assert timeline.num_buckets == len(groups)


@given(
    profiles(kinds=("float32", "float64")),
    networks(),
    st.none() | CAPS_BYTES,
    st.booleans(),
    st.booleans(),
)
def test_every_gradient_is_in_one_of_ddps_buckets(profile, network, cap, static, unused):
    cap_mib = None if cap is None else cap / MIB
    timeline = DdpModel(profile, network).backward(DdpOptions(cap_mib, static, unused))
    members = [list(event.members) for event in timeline.events]
    assert sorted(chain.from_iterable(members)) == list(range(len(profile.names)))
    for event in timeline.events:
        assert event.size_bytes == sum(int(profile.sizes_bytes[i]) for i in event.members)
    # ddp_buckets speaks of places in module.parameters(), the timeline of places in the profile.
    place = list(profile.registration)
    sizes = [int(profile.sizes_bytes[place.index(i)]) for i in range(len(place))]
    kinds = [profile.kinds[place.index(i)] for i in range(len(place))]
    expected = ddp_buckets(sizes, place, DdpOptions(cap_mib, static, unused), kinds=kinds)
    assert [[place[i] for i in bucket] for bucket in members] == expected
    # Whatever the order of the buckets, the recurrence holds.
    spans = recurrence(profile, network, members)
    assert timeline.total_s == pytest.approx(max(profile.backward_s, spans[-1][2]))


def test_unused_parameters_reduce_the_small_first_bucket_last():
    # Registered in reverse of their readiness, as in a chain of layers; MiB as in DDP's default.
    sizes = [2 * MIB] * 20
    profile = make_profile(sizes, np.arange(1, 21) / 20)
    network = AlphaBeta(1e-3, 1e9)
    rebuilt = DdpModel(profile, network).at_cap(None)
    fixed = DdpModel(profile, network).backward(DdpOptions(find_unused_parameters=True))
    assert [len(event.members) for event in rebuilt.events] == [1, 13, 6]
    assert [len(event.members) for event in fixed.events] == [6, 13, 1]


def test_the_tied_embedding_of_gpt2_is_exposed_at_any_cap():
    # Its gradient is final when computation ends, so its all-reduce cannot be hidden (≥ 147 MiB).
    profile = gpt2_profile("gpt2")
    network = AlphaBeta(1e-4, 10e9)
    for cap_mib in (1, 5, 25, 100, 400, None):
        timeline = DdpModel(profile, network).at_cap(cap_mib)
        assert timeline.exposed_communication_s >= network.time_s(147 * MIB)


def test_a_scaled_profile_has_other_times_and_sizes_and_the_same_gradients():
    profile = make_profile([4, 8, 1], [1.0, 2.0, 3.0], tail_s=1.0)
    scaled = profile.scaled(compute=0.5, size=0.5)
    assert scaled.ready_s.tolist() == [0.5, 1.0, 1.5]
    assert scaled.backward_s == 2.0
    assert scaled.sizes_bytes.tolist() == [2, 4, 1]  # never below one byte
    assert scaled.names == profile.names
    assert profile.total_bytes == 13


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"names": ()}, ["at least one gradient"]),
        ({"sizes_bytes": np.array([4])}, ["size"]),
        ({"ready_s": np.array([1.0])}, ["ready time"]),
        ({"ready_s": np.array([2.0, 1.0])}, ["not decrease"]),
        ({"ready_s": np.array([-1.0, 1.0])}, ["negative"]),
        ({"backward_s": 1.5}, ["1.5 s", "2.0 s"]),
        ({"sizes_bytes": np.array([4, 0])}, ["1 byte"]),
        ({"ready_s": np.array([1.0, np.nan])}, ["ready"]),
    ],
)
def test_an_impossible_profile_is_refused(changes, words):
    good = {
        "names": ("a", "b"),
        "sizes_bytes": np.array([4, 4]),
        "ready_s": np.array([1.0, 2.0]),
        "backward_s": 2.0,
    }
    BackwardProfile(**good)
    with refused(*words):
        BackwardProfile(**good | changes)


def test_unused_parameters_need_a_profile_that_knows_the_registration_order():
    profile = BackwardProfile(("a", "b"), np.array([4, 4]), np.array([1.0, 2.0]), 2.0)
    with refused("registration"):
        DdpModel(profile, AlphaBeta(0, 1)).backward(DdpOptions(1, find_unused_parameters=True))
