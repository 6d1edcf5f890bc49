"""The recurrences against integration in small steps of time, and its forms against each other."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from perfmodel_support import (
    CAPS_BYTES,
    MIB,
    TINY,
    integrate,
    make_profile,
    multiples,
    networks,
    profiles,
    refused,
)

from common.perfmodel.buckets import DdpOptions
from common.perfmodel.collectives import AlphaBeta
from common.perfmodel.ddp.profile import DdpCosts
from common.perfmodel.ddp.recurrence import Traffic, advance, many_cases, without_contention
from common.perfmodel.model import DdpModel


@st.composite
def traffics(draw):
    """Draws up to six buckets, launched at any time, in any order of size.

    Some lose all computation.
    """
    count = draw(st.integers(1, 6))

    def times(low: int, high: int) -> list[float]:
        return draw(st.lists(multiples(low, high), min_size=count, max_size=count))

    launched = np.cumsum(times(0, 2))
    alone = np.array(times(0, 3)) + 1 / 64
    beside = alone * draw(st.sampled_from([1.0, 1.5, 2.0]))
    share = draw(st.lists(st.sampled_from([0, 0.25, 0.5, 1]), min_size=count, max_size=count))
    total = float(launched[-1]) + draw(multiples(0, 2)) + 1 / 64
    return Traffic(launched, launched, alone, beside, beside * np.array(share), total)


@given(traffics(), st.sampled_from([1, 2, 3]), st.sampled_from([1.0, 1.25]))
def test_all_reduces_in_flight_equal_integration_in_small_steps(traffic, in_flight, gain):
    gains = np.full(len(traffic.alone_s), gain)
    spans = advance(traffic, in_flight, gains)
    starts, ends, compute_end = integrate(traffic, in_flight, gains)
    assert spans.start_s == pytest.approx(starts, abs=1e-6)
    assert spans.end_s == pytest.approx(ends, abs=1e-6)
    assert spans.compute_end_s == pytest.approx(compute_end, abs=1e-6)


AT_REST = Traffic(
    *(np.zeros(3), np.zeros(3), *[np.array([0.015625, 1.609375, 0.015625])] * 2, np.zeros(3)),
    total_work=0.015625,
)
"""All ready at the start, and computation stands still while the first all-reduces go on."""


@given(traffics())
@example(AT_REST)
def test_the_plain_recurrence_is_the_other_where_nothing_slows_anything(traffic):
    free = replace(traffic, beside_s=traffic.alone_s, progress_s=traffic.alone_s)
    assert not free.has_contention
    plain, other = without_contention(free), advance(free)
    for name in ("ready_s", "start_s", "end_s", "compute_end_s"):
        assert getattr(plain, name) == pytest.approx(getattr(other, name), abs=1e-12)


@given(traffics(), st.sampled_from([1.0, 1.5, 4.0]))
def test_many_cases_at_once_are_one_after_the_other(traffic, slow):
    cases = [replace(traffic, total_work=traffic.total_work + more) for more in (0.0, 0.25, 3.0)]
    found = many_cases(
        work_s=np.array([case.total_work for case in cases]),
        ready_s=traffic.launched_work[:, None],
        alone_s=traffic.alone_s[:, None],
        compute_slowdown=slow,
    )
    for number, case in enumerate(cases):
        spans = advance(replace(case, beside_s=case.alone_s, progress_s=case.alone_s / slow))
        total_s = max(spans.compute_end_s, spans.end_s[-1])
        assert found.total_s[number] == pytest.approx(total_s)


@given(profiles(), networks(), CAPS_BYTES)
def test_sharing_a_link_neither_gains_nor_loses_time(profile, network, cap):
    # Work is conserved: the link is busy at the same moments, and the last byte leaves when it did.
    one = DdpModel(profile, network).at_cap(cap / MIB)
    two = DdpModel(profile, network, in_flight=2).at_cap(cap / MIB)
    assert two.total_s == pytest.approx(one.total_s)
    assert two.communication_s == pytest.approx(one.communication_s)
    for first, second in zip(one.events, two.events, strict=True):
        assert second.start_s <= first.start_s + TINY


def test_what_a_crowded_link_gains_is_taken_from_the_curve_in_flight():
    # Three buckets ready at once, 1 s each alone, 0.5 s each in flight: two run side by side and
    # take 1 s together; the third has the link for itself and takes its second.
    profile = make_profile([10, 10, 10], [1.0, 1.0, 1.0])
    crowded = AlphaBeta(0.5, 1e12)
    timeline = DdpModel(profile, AlphaBeta(1.0, 1e12), in_flight=2, crowded_network=crowded).at_cap(
        10 / MIB
    )
    assert timeline.total_s == pytest.approx(1 + 1 + 1)
    # A curve that is slower in flight is noise, and gains nothing.
    slower = DdpModel(
        profile, AlphaBeta(1.0, 1e12), in_flight=2, crowded_network=AlphaBeta(3, 1e12)
    ).at_cap(10 / MIB)
    assert slower.total_s == pytest.approx(1 + 3)


def test_each_launch_delays_all_later_gradients():
    # Gradients at 1, 2 and 3 s, a launch of 0.25 s after each, all-reduces of no length.
    profile = make_profile([10, 10, 10], [1.0, 2.0, 3.0], tail_s=1.0)
    timeline = DdpModel(profile, AlphaBeta(0.0, 1e15), costs=DdpCosts(launch_s=0.25)).at_cap(
        10 / MIB
    )
    assert [event.ready_s for event in timeline.events] == pytest.approx([1.0, 2.25, 3.5])
    assert [event.start_s for event in timeline.events] == pytest.approx([1.25, 2.5, 3.75])
    assert timeline.compute_end_s == timeline.total_s == pytest.approx(4.75)
    assert timeline.compute_alone_s == pytest.approx(4.75)


def test_buckets_that_become_ready_together_are_launched_in_order():
    # The second bucket is ready first (another order than the profile's) and waits for the first.
    profile = make_profile([10, 10], [1.0, 2.0], registration=[0, 1])
    timeline = DdpModel(profile, AlphaBeta(0.0, 1e15), costs=DdpCosts(launch_s=0.5)).backward(
        DdpOptions(10 / MIB, find_unused_parameters=True)
    )
    assert [event.members for event in timeline.events] == [(1,), (0,)]
    assert [event.ready_s for event in timeline.events] == pytest.approx([2.0, 1.0])
    assert [event.start_s for event in timeline.events] == pytest.approx([2.5, 3.0])


@given(profiles(), networks(), CAPS_BYTES, multiples(0, 1), st.integers(1, 2))
def test_launches_are_paid_once_a_bucket_and_never_make_a_pass_shorter(
    profile, network, cap, launch_s, in_flight
):
    bare = DdpModel(profile, network, in_flight=in_flight).at_cap(cap / MIB)
    costs = DdpCosts(launch_s=launch_s)
    slower = DdpModel(profile, network, costs=costs, in_flight=in_flight).at_cap(cap / MIB)
    spent = launch_s * bare.num_buckets
    assert slower.compute_alone_s == pytest.approx(profile.backward_s + spent)
    assert bare.total_s - TINY <= slower.total_s <= bare.total_s + spent + TINY


def test_no_all_reduce_in_flight_is_refused():
    with refused("0 all-reduces", "at least 1"):
        DdpModel(make_profile([4], [1.0]), AlphaBeta(0, 1), in_flight=0).at_cap(1)
