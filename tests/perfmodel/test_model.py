"""The model: its ladder against what each rung says it is, and its answers against the engine's."""

from __future__ import annotations

from dataclasses import replace

import pytest
from perfmodel_support import MIB, make_profile

from common.perfmodel.collectives import AlphaBeta, MeasuredAllReduce
from common.perfmodel.ddp.profile import DdpCosts
from common.perfmodel.model import (
    BY_HAND,
    COMPUTE,
    COPIES,
    CURVE,
    FULL,
    LINE,
    RUNGS,
    SEVERAL,
    SLOWEST,
    DdpModel,
)

COSTS = DdpCosts(
    copy_in_s_per_byte=0.01,
    copy_out_s_per_byte=0.02,
    communication_slowdown=1.25,
    compute_slowdown=1.5,
)


def test_every_rung_adds_the_term_that_it_is_named_after():
    profile = make_profile([40, 40, 40, 40], [1.0, 1.25, 1.5, 4.0])
    curve = MeasuredAllReduce([10, 40, 160], [1.0, 3.0, 9.0])
    crowded = MeasuredAllReduce([10, 40, 160], [0.5, 2.5, 9.0])
    model = DdpModel(profile, curve, COSTS, in_flight=2, crowded_network=crowded)
    cap = 40 / MIB
    copies = DdpCosts(0.01, 0.02)
    two = {"in_flight": 2, "crowded_network": crowded}
    expected = {
        LINE: DdpModel(profile, AlphaBeta.fit([10, 40, 160], [1.0, 3.0, 9.0])).at_cap(cap),
        CURVE: DdpModel(profile, curve).at_cap(cap),
        COPIES: DdpModel(profile, curve, costs=copies).at_cap(cap),
        SEVERAL: DdpModel(profile, curve, costs=copies, **two).at_cap(cap),
        COMPUTE: DdpModel(
            profile, curve, costs=replace(copies, compute_slowdown=1.5), **two
        ).at_cap(cap),
        FULL: DdpModel(profile, curve, costs=COSTS, **two).at_cap(cap),
    }
    ladder = model.ladder()
    assert tuple(ladder) == RUNGS
    assert {name: ladder[name](cap) for name in expected} == {
        name: timeline.total_s for name, timeline in expected.items()
    }
    # None of them is another: over two caps each has answers of its own.
    answers = {tuple(round(ladder[name](n * cap), 9) for n in (1, 2)) for name in RUNGS}
    assert len(answers) == len(RUNGS)
    # T(b) = g·b + a(b) + (K − 1)·max(g·b, a(b)), with g·b = 1 s for each of K = 4 buckets.
    line = AlphaBeta.fit([10, 40, 160], [1.0, 3.0, 9.0])
    assert ladder[BY_HAND](cap) == pytest.approx(1 + 4 * line.time_s(40))


def test_one_rank_is_taken_up_to_the_slowest():
    one = make_profile([8, 8], [1.0, 2.0])
    slowest = make_profile([8, 8], [1.5, 3.0])
    model = DdpModel(slowest, AlphaBeta(0.5, 1e9))
    ladder = model.ladder(one_rank=one)
    assert tuple(ladder) == (BY_HAND, LINE, CURVE, SLOWEST, COPIES, COMPUTE, FULL)
    assert ladder[CURVE](None) == pytest.approx(2.5)
    assert ladder[SLOWEST](None) == ladder[FULL](None) == pytest.approx(3.5)


def test_added_latency_is_waited_for_and_slows_nothing():
    # One bucket, ready after 1 of 10 s. Beside computation its all-reduce takes 2 s, not 1, and
    # costs 1 s of computation; the 3 s of latency cost none, and are not doubled.
    profile = make_profile([8], [1.0], tail_s=9.0)
    costs = DdpCosts(communication_slowdown=2.0, compute_slowdown=2.0)
    model = DdpModel(profile, AlphaBeta(1.0, 1e12), costs, added_latency_s=3.0)
    timeline = model.at_cap(None)
    assert timeline.events[0].end_s == pytest.approx(1 + 2 + 3)
    assert timeline.compute_end_s == pytest.approx(10 + 1)
    # Where nothing is slowed it is no other than a longer latency of the network.
    longer = DdpModel(profile, AlphaBeta(4.0, 1e12))
    for name, predictor in replace(model, costs=DdpCosts()).ladder().items():
        assert predictor(None) == pytest.approx(longer.ladder()[name](None))
    assert model.best_cap().total_s == pytest.approx(timeline.total_s)
