"""The trace for Perfetto: what is in the file, held against timelines whose moments are known.

The rules of the format are those of Chrome's trace event format: complete events of one thread
nest or follow each other, and every thread that has events is named.
"""

from __future__ import annotations

import json
import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from perfmodel_support import CAPS_BYTES, greedy_groups, networks, profiles

from common.perfmodel.ddp.timeline import BackwardTimeline, BucketEvent
from common.perfmodel.model import DdpModel
from common.perfmodel.perfetto_trace import (
    Around,
    copy_starts_s,
    in_flight_lanes,
    slices,
    trace_json,
)

# Two buckets one after another, 100 and 50 kB: the second waits for 1 ms, both are copied back.
PREDICTED = BackwardTimeline(
    total_s=0.013,
    compute_end_s=0.008,
    compute_alone_s=0.007,
    events=(
        BucketEvent(0, (0, 1), 100_000, 0.002, 0.002, 0.007, 0.009),
        BucketEvent(1, (2,), 50_000, 0.006, 0.007, 0.011, 0.013),
    ),
)
# The same on a machine that reduces both at once.
MEASURED = BackwardTimeline(
    total_s=0.0145,
    compute_end_s=0.0085,
    compute_alone_s=math.nan,
    events=(
        BucketEvent(0, (), 100_000, 0.0025, 0.0025, 0.009, 0.010),
        BucketEvent(1, (), 50_000, 0.0065, 0.0065, 0.0125, 0.014),
    ),
)
NAMES = ("head.weight", "head.bias", "body.weight")


@pytest.fixture(scope="module")
def document() -> dict:
    both = {"predicted": PREDICTED, "measured": MEASURED}
    return json.loads(trace_json(both, parameters=NAMES, facts={"model": "tiny"}))


def complete(document: dict, process: int) -> list[dict]:
    return [r for r in document["traceEvents"] if r["ph"] == "X" and r["pid"] == process]


def named(document: dict, what: str) -> dict:
    key = "tid" if what == "thread_name" else "pid"
    records = [r for r in document["traceEvents"] if r["name"] == what]
    return {record[key]: record["args"]["name"] for record in records}


def span(document: dict, process: int, name: str) -> tuple[float, float]:
    """Finds start and end of the one event of this name, in µs."""
    (record,) = [r for r in complete(document, process) if r["name"] == name]
    return record["ts"], record["ts"] + record["dur"]


def test_the_file_has_two_processes_and_only_complete_and_metadata_events(document):
    assert named(document, "process_name") == {1: "predicted", 2: "measured"}
    assert {record["ph"] for record in document["traceEvents"]} == {"X", "M"}
    assert document["otherData"] == {"model": "tiny"}


def test_every_thread_with_events_is_named_and_belongs_to_one_process(document):
    threads = named(document, "thread_name")
    used = {(r["pid"], r["tid"]) for r in document["traceEvents"] if r["ph"] == "X"}
    assert {tid for _, tid in used} == set(threads)
    assert len(used) == len(threads)
    assert sorted(threads[tid] for pid, tid in used if pid == 1) == [
        *("all-reduce", "computation", "copies")
    ]


@pytest.mark.parametrize(
    ("name", "predicted_us", "measured_us"),
    [
        ("gradients of bucket 1", (0, 2000), (0, 2500)),
        ("gradients of bucket 2", (2000, 6000), (2500, 6500)),
        ("after the last gradient", (6000, 8000), (6500, 8500)),
        ("all-reduce of bucket 1", (2000, 7000), (2500, 9000)),
        ("all-reduce of bucket 2", (7000, 11000), (6500, 12500)),
        # computation ends at 8 ms, after the first all-reduce
        ("copy bucket 1 back", (8000, 9000), (9000, 10000)),
        ("copy bucket 2 back", (11000, 13000), (12500, 14000)),
    ],
)
def test_both_passes_are_on_one_clock_that_begins_with_the_pass(
    document, name, predicted_us, measured_us
):
    assert span(document, 1, name) == pytest.approx(predicted_us)
    assert span(document, 2, name) == pytest.approx(measured_us)


def test_an_all_reduce_says_its_size_its_wait_and_its_gradients(document):
    (record,) = [r for r in complete(document, 1) if r["name"] == "all-reduce of bucket 2"]
    assert record["args"] == {
        **{"bucket": 2, "size_bytes": 50_000, "ready_ms": 6.0, "waited_ms": 1.0},
        "gb_per_s": 0.0125,
        "gradients": "body.weight",
    }


def test_a_measured_bucket_is_that_of_the_same_index_in_the_prediction(document):
    (record,) = [r for r in complete(document, 2) if r["name"] == "all-reduce of bucket 1"]
    assert record["args"]["gradients"] == "head.weight, head.bias"


def test_all_reduces_in_flight_together_are_on_threads_of_their_own(document):
    lanes = {}
    for record in complete(document, 2):
        if record["name"].startswith("all-reduce"):
            lanes[record["name"]] = named(document, "thread_name")[record["tid"]]
    assert lanes == {
        "all-reduce of bucket 1": "all-reduce",
        "all-reduce of bucket 2": "all-reduce, in flight 2",
    }
    assert in_flight_lanes(PREDICTED.events) == [0, 0]
    assert in_flight_lanes(MEASURED.events) == [0, 1]


def test_empty_boxes_are_left_out():
    free = BackwardTimeline(
        0.004, 0.002, 0.002, (BucketEvent(0, (0,), 8, 0.002, 0.002, 0.004, 0.004),)
    )
    assert [box.name for box in slices(free)] == ["gradients of bucket 1", "all-reduce of bucket 1"]
    assert copy_starts_s(free) == [0.004]


def test_what_lies_around_the_passes_moves_the_clock_and_nothing_else(document):
    both = {"predicted": PREDICTED, "measured": MEASURED}
    around = {"predicted": Around(0.004, 0.001), "measured": Around(0.005, 0.0)}
    whole = json.loads(trace_json(both, parameters=NAMES, around=around))
    for process, timeline in enumerate(both.values(), start=1):
        inside = [
            r for r in complete(whole, process) if r["name"] not in ("forward pass", "update")
        ]
        before = complete(document, process)
        assert [r["name"] for r in inside] == [r["name"] for r in before]
        assert [r["ts"] - 5000 for r in inside] == pytest.approx([r["ts"] for r in before])
        assert [r["dur"] for r in inside] == pytest.approx([r["dur"] for r in before])
        one = around["predicted" if process == 1 else "measured"]
        assert span(whole, process, "forward pass") == (5000 - one.forward_s * 1e6, 5000)
        if one.update_s:
            end = 5000 + timeline.total_s * 1e6
            assert span(whole, process, "update") == pytest.approx((end, end + 1000))


@given(profile=profiles(), network=networks(), cap=CAPS_BYTES, shift=st.sampled_from([1e-9, 1e-6]))
def test_events_of_a_thread_never_overlap_and_cover_the_simulated_times(
    profile, network, cap, shift
):
    """Whatever rounding to the trace's digits does: neighbours meet, and lengths add up."""
    model = DdpModel(profile.scaled(compute=shift), network)
    timeline = model.simulate(greedy_groups(list(profile.sizes_bytes), cap))
    document = json.loads(trace_json({"predicted": timeline}))
    records = complete(document, 1)
    for thread in {record["tid"] for record in records}:
        own = sorted((r["ts"], r["ts"] + r["dur"]) for r in records if r["tid"] == thread)
        assert all(round(b * 1e3) >= round(a * 1e3) for (_, a), (b, _) in pairwise(own))
    total_us = {"computation": 0.0, "all-reduce": 0.0}
    for record in records:
        total_us[record["cat"]] = total_us.get(record["cat"], 0.0) + record["dur"]
    slack = 0.002 * (len(records) + 1)
    assert total_us["computation"] == pytest.approx(timeline.compute_end_s * 1e6, abs=slack)
    assert total_us["all-reduce"] == pytest.approx(timeline.communication_s * 1e6, abs=slack)


def test_neighbours_that_no_float_can_hold_still_meet():
    third = BackwardTimeline(
        *(1.0, 1 / 3, 1 / 3),
        tuple(
            BucketEvent(i, (), 4, 1 / 3, 1 / 3 + i * 0.1, 1 / 3 + (i + 1) * 0.1, 1.0)
            for i in range(5)
        ),
    )
    document = json.loads(trace_json({"predicted": third}))
    own = [r for r in complete(document, 1) if r["cat"] == "all-reduce"]
    assert len({record["tid"] for record in own}) == 1
    ends = [round((record["ts"] + record["dur"]) * 1e3) for record in own]
    assert ends[:-1] == [round(record["ts"] * 1e3) for record in own[1:]]
