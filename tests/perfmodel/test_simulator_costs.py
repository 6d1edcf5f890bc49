"""The simulator with DDP's bookkeeping and contention, against integration in small time steps."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from perfmodel_support import (
    CAPS_BYTES,
    MIB,
    greedy_groups,
    integrate,
    make_profile,
    multiples,
    networks,
    profiles,
    refused,
)

from common.perfmodel.collectives import AlphaBeta
from common.perfmodel.ddp.profile import BackwardProfile, DdpCosts
from common.perfmodel.ddp.recurrence import Traffic
from common.perfmodel.model import DdpModel


@st.composite
def lost_compute(draw):
    """Draws computation lost to an all-reduce by its size: from nothing to more than it lasts."""
    sizes = sorted(draw(st.sets(st.integers(1, 200), min_size=1, max_size=4)))
    lost = draw(st.lists(multiples(0, 2), min_size=len(sizes), max_size=len(sizes)))
    return tuple(map(float, sizes)), tuple(lost)


PER_BYTE = multiples(0, 2).map(lambda seconds: seconds / 64)
COSTS = st.builds(
    DdpCosts,
    copy_in_s_per_byte=PER_BYTE,
    copy_out_s_per_byte=PER_BYTE,
    communication_slowdown=st.just(1.0) | multiples(1, 3),
    compute_slowdown=st.just(1.0) | multiples(1, 3),
    lost_compute=st.none() | lost_compute(),
)


def lost_to(size: int, costs: DdpCosts) -> float:
    """Interpolates computation lost to one all-reduce; beyond known sizes it is in proportion."""
    known, lost = costs.lost_compute
    if size <= known[0]:
        return lost[0]
    for (x0, x1), (y0, y1) in zip(pairwise(known), pairwise(lost), strict=True):
        if size <= x1:
            return y0 + (y1 - y0) * (size - x0) / (x1 - x0)
    return lost[-1] * size / known[-1]


def traffic_of(profile: BackwardProfile, network, groups: list[list[int]], costs: DdpCosts):
    """Computes what buckets need: a gradient is computed, and then copied into its bucket."""
    copied_in = profile.ready_s + costs.copy_in_s_per_byte * np.cumsum(profile.sizes_bytes)
    sizes = [int(profile.sizes_bytes[group].sum()) for group in groups]
    ready = np.array([copied_in[group].max() for group in groups])
    alone = np.array([network.time_s(size) for size in sizes])
    beside = alone * costs.communication_slowdown
    progress = beside / costs.compute_slowdown
    if costs.lost_compute:
        lost = np.array([lost_to(size, costs) for size in sizes])
        beside = np.maximum(beside, lost)
        progress = beside - lost
    total_work = profile.backward_s + copied_in[-1] - profile.ready_s[-1]
    return Traffic(ready, ready, alone, beside, progress, total_work)


@given(profiles(), networks(), CAPS_BYTES, COSTS)
def test_with_costs_the_simulation_equals_integration_in_small_steps(profile, network, cap, costs):
    timeline = DdpModel(profile, network, costs=costs).at_cap(cap / MIB)
    groups = greedy_groups(profile.sizes_bytes.tolist(), cap)
    traffic = traffic_of(profile, network, groups, costs)
    starts, ends, compute_end = integrate(traffic, in_flight=1, gain=np.ones(len(groups)))
    assert timeline.compute_end_s == pytest.approx(compute_end)
    assert timeline.compute_alone_s == pytest.approx(traffic.total_work)
    assert [event.start_s for event in timeline.events] == pytest.approx(starts)
    assert [event.end_s for event in timeline.events] == pytest.approx(ends)
    copied, free = compute_end, 0.0
    for event, group, end in zip(timeline.events, groups, ends, strict=True):
        # The network takes a bucket the moment that it is ready and the one before is done.
        assert event.start_s == pytest.approx(max(free, event.ready_s))
        copied = max(copied, end) + profile.sizes_bytes[group].sum() * costs.copy_out_s_per_byte
        assert event.copied_s == pytest.approx(copied)
        free = end
    assert timeline.total_s == pytest.approx(copied)


def test_computation_is_slowed_only_while_a_bucket_is_reduced():
    # Ready after 1 s of 4; the all-reduce of 1 s runs beside computation, which does half as much
    # in it: the remaining 3 s of computation take 1 s for 0.5 and 2.5 s for the rest.
    profile = make_profile([10, 1], [1.0, 4.0])
    network = AlphaBeta(1.0, 1e9)
    timeline = DdpModel(profile, network, costs=DdpCosts(compute_slowdown=2.0)).at_cap(10 / MIB)
    assert timeline.events[0].end_s == pytest.approx(2.0)
    assert timeline.compute_end_s == pytest.approx(4.5)
    # The last bucket is ready when computation ends and is reduced with nothing beside it.
    assert timeline.total_s == pytest.approx(5.5)


def test_delays_by_size_are_added_whatever_a_message_takes_alone():
    # A message of 10 bytes takes 3 s longer beside computation, one of 1000 takes 1 s longer.
    costs = DdpCosts(communication_slowdown=9.0, delays=((10.0, 1000.0), (3.0, 1.0)))
    sizes, alone_s = np.array([1.0, 10, 505, 1e4]), np.array([1.0, 5, 1, 1])
    duration, progress = costs.beside_computation(sizes, alone_s)
    assert duration == pytest.approx([1 + 3, 5 + 3, 1 + 2, 1 + 10])  # ten times the last known
    assert progress == pytest.approx(duration)  # computation is not slowed
    off = costs.without("communication_slowdown")
    assert off.beside_computation(np.array([10.0]), np.ones(1))[0] == pytest.approx([1])


def test_only_the_last_copy_back_is_exposed_where_the_network_is_slow():
    # Buckets of 10 bytes, 1 s each to reduce, 0.5 s each to copy back: all but the last copy are
    # done while the next bucket is reduced.
    profile = make_profile([10, 10, 10], [0.1, 0.2, 0.3])
    timeline = DdpModel(
        profile, AlphaBeta(1.0, 1e12), costs=DdpCosts(copy_out_s_per_byte=0.05)
    ).at_cap(10 / MIB)
    assert timeline.total_s == pytest.approx(0.1 + 3 * 1.0 + 0.5)


@pytest.mark.parametrize(
    ("costs", "words"),
    [
        ({"copy_in_s_per_byte": -1e-9}, ["copy", "negative"]),
        ({"copy_out_s_per_byte": -1e-9}, ["copy", "negative"]),
        ({"compute_slowdown": 0.9}, ["at least 1"]),
        ({"communication_slowdown": 0.0}, ["at least 1"]),
        ({"delays": ((1.0, 2.0), (1.5, -0.5))}, ["delay", "negative"]),
        ({"lost_compute": ((1.0,), (-0.1,))}, ["lost", "negative"]),
        ({"launch_s": -1e-6}, ["launching", "negative"]),
    ],
)
def test_impossible_costs_are_refused(costs, words):
    with refused(*words):
        DdpCosts(**costs)
