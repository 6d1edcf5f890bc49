"""Whole steps: their parts in order, accumulation, and the tables that they are made from."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from perfmodel_support import (
    CAPS_BYTES,
    MIB,
    make_profile,
    multiples,
    networks,
    profiles,
    refused,
    write_csv,
)

from common.perfmodel.buckets import DdpOptions
from common.perfmodel.collectives import AlphaBeta
from common.perfmodel.ddp.comm_hooks import CastHook
from common.perfmodel.ddp.profile import DdpCosts
from common.perfmodel.ddp.step import StepOptions, StepParts
from common.perfmodel.model import DdpModel
from common.perfmodel.tables import read_step_parts

COSTS = DdpCosts(0.01, 0.02, communication_slowdown=1.25, compute_slowdown=1.5, launch_s=0.125)


@given(
    profiles(),
    networks(),
    CAPS_BYTES,
    st.integers(1, 4),
    st.data(),
    st.lists(multiples(0, 3), min_size=4, max_size=4),
)
def test_a_step_is_the_sum_of_its_parts(profile, network, cap, accumulation, data, lengths):
    forward_s, local_s, update_s, before_s = lengths
    exchanges = data.draw(st.integers(1, accumulation))
    parts = StepParts(forward_s, update_s, before_s, local_s)
    options = StepOptions(DdpOptions(cap / MIB), accumulation, exchanges)
    step = DdpModel(profile, network, COSTS).step(parts, options)
    backward = DdpModel(profile, network, costs=COSTS).at_cap(cap / MIB)
    passes = accumulation * forward_s + (accumulation - exchanges) * local_s
    expected = before_s + passes + exchanges * backward.total_s + update_s
    assert step.total_s == pytest.approx(expected)
    assert step.backward == backward
    assert step.spans[0].start_s == 0
    assert all(one.end_s == other.start_s for one, other in pairwise(step.spans))
    assert step.exposed_communication_s == exchanges * backward.exposed_communication_s
    local_step = before_s + passes + exchanges * profile.backward_s + update_s
    assert step.without_ddp_s == pytest.approx(local_step)
    assert step.overhead_s >= step.exposed_communication_s - 1e-9


def test_only_the_last_micro_batch_exchanges_under_no_sync():
    parts = StepParts(1.0, 0.5, 0.25, local_backward_s=2.25)
    model = DdpModel(make_profile([8], [2.0]), AlphaBeta(3.0, 1e9))
    step = model.step(parts, StepOptions(accumulation=3))
    spans = [(s.part, s.micro_batch, s.end_s - s.start_s) for s in step.spans]
    exchange = pytest.approx(5.0)
    assert spans == [
        *(("before", None, 0.25), ("forward", 0, 1.0), ("backward", 0, 2.25)),
        *(("forward", 1, 1.0), ("backward", 1, 2.25), ("forward", 2, 1.0)),
        *(("exchange", 2, exchange), ("update", None, 0.5)),
    ]
    # Accumulating three times the work for one exchange costs less than three exchanges.
    always = model.step(parts, StepOptions(accumulation=3, exchanges=3))
    assert always.total_s == pytest.approx(step.total_s + 2 * (5.0 - 2.25))
    # Without a measurement of its own, such a pass takes as long as the profile's.
    free = replace(model, network=AlphaBeta(0, 1e9))
    step = free.step(StepParts(1.0, 0.5), StepOptions(accumulation=2))
    assert step.spans[2].end_s == pytest.approx(3.0)


def test_options_of_the_step_reach_the_backward_pass():
    profile = make_profile([8, 8], [1.0, 2.0])
    network, costs = AlphaBeta(0.0, 1.0), DdpCosts(copy_out_s_per_byte=0.5)
    model = DdpModel(profile, network, costs, in_flight=2)
    hook = CastHook("bf16", decompress_s_per_byte=0.25)
    options = StepOptions(DdpOptions(8 / MIB), 1, 1, True, hook)
    expected = model.backward(DdpOptions(8 / MIB), gradient_as_bucket_view=True, hook=hook)
    assert model.step(StepParts(0.0, 0.0), options).backward == expected
    assert expected != DdpModel(profile, network, costs=costs).at_cap(8 / MIB)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: StepOptions(accumulation=0), ["at least 1"]),
        (lambda: StepOptions(exchanges=0), ["at least 1"]),
        (lambda: StepOptions(accumulation=2, exchanges=3), ["3 exchanges", "2 micro-batches"]),
        (lambda: StepParts(-1.0, 0.0), ["negative"]),
        (lambda: StepParts(1.0, float("nan")), ["negative"]),
    ],
)
def test_an_impossible_step_is_refused(make, words):
    with refused(*words):
        make()


def test_parts_are_medians_of_the_slowest_rank(tmp_path):
    rows = [  # rank, iteration, forward, backward, optimizer: slowest 12, 11, 30 | 20, 25, 22 | …
        *((0, 0, 10, 20, 4), (1, 0, 12, 18, 5), (0, 1, 11, 25, 3), (1, 1, 10, 22, 4)),
        *((0, 2, 30, 20, 9), (1, 2, 9, 22, 1)),
    ]
    header = "rank,iteration,forward_time_ms,backward_time_ms,optimizer_time_ms"
    parts = read_step_parts(write_csv(tmp_path / "local-step-times.csv", header, rows))
    assert parts.forward_s == pytest.approx(0.012)
    assert parts.local_backward_s == pytest.approx(0.022)
    assert parts.update_s == pytest.approx(0.005)


def test_what_of_a_step_is_neither_pass_counts_as_update(tmp_path):
    header = "round,iteration,rank,forward_time_ms,backward_time_ms,step_time_ms"
    rows = [(0, 0, 0, 10, 20, 37), (0, 0, 1, 12, 18, 37), (1, 0, 0, 10, 20, 33), (1, 0, 1, 9, 9, 9)]
    path = write_csv(tmp_path / "local-times.csv", header, rows)
    # 37 − 12 − 20 = 5 and 33 − 10 − 20 = 3.
    assert read_step_parts(path).update_s == pytest.approx(0.004)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("rank,iteration,forward_time_ms\n0,0,1\n", ["backward_time_ms"]),
        ("rank,iteration,forward_time_ms,backward_time_ms\n0,0,1,1\n", ["optimizer_time_ms"]),
        (
            "rank,iteration,forward_time_ms,backward_time_ms,step_time_ms\n0,0,1,-1,3\n",
            ["line 2", "-1"],
        ),
    ],
)
def test_an_unusable_table_of_steps_is_refused_by_its_name(tmp_path, text, words):
    path = tmp_path / "local-times.csv"
    path.write_text(text)
    with refused("local-times.csv", *words):
        read_step_parts(path)
