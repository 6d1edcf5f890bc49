"""Passes that were watched bucket by bucket: reading them, and where they part from a prediction.

The oracles are passes made by hand, in which one term was changed by a known amount, and for any
two passes the sum of all effects, which must be the difference of their lengths.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.analysis.buckets.model_figures import predicted_and_measured
from common.analysis.buckets.timelines import (
    ALL_REDUCE,
    COMPUTATION,
    COPY_OUT,
    GAPS,
    REST,
    WAIT,
    gaps,
    largest_gaps,
    read_timelines,
    shown_cap,
)
from common.analysis.show import show
from common.errors import UserError
from common.perfmodel.ddp.timeline import BackwardTimeline, BucketEvent
from common.traces.bucket_trace import (
    BACKWARD,
    BUCKET_FIELDS,
    bucket_rows,
    copy_spans_us,
    in_bucket_order,
)
from common.traces.profiler_trace import Event

MIB = 2**20
MUL_OUT = "torch::distributed::reducer::mul_out"
COPY = "torch.distributed.ddp.reducer::copy_bucket_to_grad"
NODE = "autograd::engine::evaluate_function: AddmmBackward0"


def serial(
    computation_ms: list[float],
    all_reduce_ms: list[float],
    copy_ms: list[float],
    tail_ms: float = 0.0,
    rest_ms: float = 0.0,
    size_bytes: int = MIB,
) -> BackwardTimeline:
    """Reduces buckets one after another: the recurrence of the model, written out again."""
    ready = np.cumsum(computation_ms)
    compute_end = float(ready[-1]) + tail_ms
    events, end, copied = [], 0.0, compute_end
    for index, (at, length, copy) in enumerate(zip(ready, all_reduce_ms, copy_ms, strict=True)):
        start = max(float(at), end)
        end = start + length
        copied = max(copied, end) + copy
        times = (moment / 1e3 for moment in (at, start, end, copied))
        events.append(BucketEvent(index, (), size_bytes, *times))
    return BackwardTimeline((copied + rest_ms) / 1e3, compute_end / 1e3, 0.0, tuple(events))


COMMUNICATION_BOUND = serial([10, 10, 10], [30, 30, 30], [1, 1, 1])
COMPUTE_BOUND = serial([30, 30, 30], [10, 10, 10], [1, 1, 1], tail_ms=15)


def effects(predicted: BackwardTimeline, measured: BackwardTimeline) -> dict:
    """Returns effects that are not nothing, by bucket (None for the rest) and term, in ms."""
    table = gaps(predicted, measured)
    return {
        (None if pd.isna(row.bucket) else int(row.bucket), row.term): round(row.effect_ms, 6)
        for row in table.itertuples()
        if abs(row.effect_ms) > 1e-9
    }


@pytest.mark.parametrize(
    ("predicted", "measured", "expected"),
    [
        # a longer all-reduce moves the end of a pass that waits for communication,
        (COMMUNICATION_BOUND, ([10, 10, 10], [30, 42, 30], [1, 1, 1]), {(2, ALL_REDUCE): 12}),
        # and nothing where it is hidden behind computation
        (COMPUTE_BOUND, ([30, 30, 30], [10, 25, 10], [1, 1, 1], 15), {}),
        # there the computation of a bucket moves it instead, also that after the last gradient,
        (COMPUTE_BOUND, ([30, 37, 30], [10, 10, 10], [1, 1, 1], 15), {(2, COMPUTATION): 7}),
        (COMPUTE_BOUND, ([30, 30, 30], [10, 10, 10], [1, 1, 1], 24), {(3, COMPUTATION): 9}),
        # of the first bucket in either case
        (COMMUNICATION_BOUND, ([16, 10, 10], [30, 30, 30], [1, 1, 1]), {(1, COMPUTATION): 6}),
        # only the last copy is exposed where communication is the longer,
        (COMMUNICATION_BOUND, ([10, 10, 10], [30, 30, 30], [5, 5, 5]), {(3, COPY_OUT): 4}),
        # all of them where computation is
        (
            COMPUTE_BOUND,
            ([30, 30, 30], [10, 10, 10], [3, 3, 3], 15),
            {(1, COPY_OUT): 2, (2, COPY_OUT): 2, (3, COPY_OUT): 2},
        ),
        (COMPUTE_BOUND, ([30, 30, 30], [10, 10, 10], [1, 1, 1], 15, 0.5), {(None, REST): 0.5}),
    ],
)
def test_a_changed_term_has_its_effect_and_no_other_has_any(predicted, measured, expected):
    assert effects(predicted, serial(*measured)) == expected


def test_an_all_reduce_that_starts_late_although_it_could_has_waited():
    first, second, third = COMMUNICATION_BOUND.events
    late = replace(third, start_s=third.start_s + 0.004, end_s=third.end_s + 0.004)
    late = replace(late, copied_s=third.copied_s + 0.004)
    measured = BackwardTimeline(0.105, 0.030, 0.0, (first, second, late))
    measured = replace(measured, total_s=late.copied_s)
    assert effects(COMMUNICATION_BOUND, measured) == {(3, WAIT): 4}


def test_two_in_flight_gain_what_they_start_early_and_lose_what_they_take_longer():
    # Both at once from their ready times, 10 and 20 ms, each twice as long as alone.
    predicted = serial([10, 10], [30, 30], [0, 0])
    events = (
        BucketEvent(0, (), MIB, 0.010, 0.010, 0.060, 0.060),
        BucketEvent(1, (), MIB, 0.020, 0.020, 0.070, 0.070),
    )
    table = gaps(predicted, BackwardTimeline(0.070, 0.020, 0.0, events))
    by_term = table.groupby("term")["effect_ms"].sum()
    # The first all-reduce, 20 longer, moves the end from 70 to 90. The second starting at 20
    # would make that 60, the end of the first; being 20 longer as well it ends at 70.
    assert by_term[WAIT] == pytest.approx(-30)
    assert by_term[ALL_REDUCE] == pytest.approx(20 + 10)
    assert table["effect_ms"].sum() == pytest.approx(0, abs=1e-9)


LENGTHS = st.lists(st.integers(0, 40).map(float), min_size=4, max_size=4)
SERIAL = st.builds(serial, LENGTHS, LENGTHS, LENGTHS, st.integers(0, 30), st.integers(0, 3))


@given(SERIAL, SERIAL)
def test_the_effects_of_all_terms_add_up_to_the_difference(predicted, measured):
    table = gaps(predicted, measured)
    difference_ms = (measured.total_s - predicted.total_s) * 1e3
    assert table["effect_ms"].sum() == pytest.approx(difference_ms, abs=1e-9)
    np.testing.assert_allclose(table["gap_ms"], table["measured_ms"] - table["predicted_ms"])


@given(SERIAL)
def test_a_pass_has_no_gaps_to_itself(timeline):
    assert (gaps(timeline, timeline)[["gap_ms", "effect_ms"]] == 0).all().all()


def test_the_largest_gaps_come_first_with_bucket_size_term_and_both_times():
    table = gaps(COMMUNICATION_BOUND, serial([10, 10, 10], [33, 42, 30], [1, 1, 1]))
    first, second, *_ = largest_gaps(table).itertuples(index=False)
    assert tuple(first) == pytest.approx((2, 1.0, ALL_REDUCE, 30, 42, 12, 12))
    assert tuple(second)[:3] == (1, 1.0, ALL_REDUCE)
    # the wait of the second bucket is longer, too, and that is no effect of its own
    wait = table[(table["term"] == WAIT) & (table["bucket"] == 2)].iloc[0]
    assert (wait["gap_ms"], wait["effect_ms"]) == pytest.approx((3, 0))


def test_passes_of_different_buckets_are_not_compared():
    with pytest.raises(UserError, match=r"3 buckets.*2, the first"):
        gaps(COMMUNICATION_BOUND, serial([10, 10], [30, 30], [1, 1]))


def row(rank: int, bucket: int, moments: tuple[float, ...], iteration: int = 0, cap: object = 5):
    """Makes a row of the table; ready, start, end, copied, end of computation and of pass in ms."""
    fields = (bucket, (bucket + 1) * MIB, 0, 0.1, 0.1, *moments)
    keys = {"bucket_cap_mib": cap, "iteration": iteration, "rank": rank}
    return keys | dict(zip(BUCKET_FIELDS, fields, strict=True))


ROWS = [
    row(0, 0, (10, 10, 30, 41, 40, 62)),
    row(0, 1, (20, 30, 50, 60, 40, 62)),
    row(1, 0, (12, 13, 31, 43, 42, 61)),
    row(1, 1, (19, 25, 49, 59, 42, 61)),
]


@pytest.fixture
def table(tmp_path):
    """Writes rows as a table and returns its path."""

    def write(rows: list[dict]):
        path = tmp_path / "bucket-timeline.csv"
        pd.DataFrame(rows).to_csv(path, index=False)
        return path

    return write


def test_the_last_rank_counts_at_every_moment(table):
    (only,) = read_timelines(table(ROWS)).passes(5)
    assert (only.total_s, only.compute_end_s) == pytest.approx((0.062, 0.042))
    assert [event.size_bytes for event in only.events] == [MIB, 2 * MIB]
    moments = [(e.ready_s, e.start_s, e.end_s, e.copied_s) for e in only.events]
    assert moments[0] == pytest.approx((0.012, 0.013, 0.031, 0.043))
    assert moments[1] == pytest.approx((0.020, 0.030, 0.050, 0.060))


def test_the_typical_pass_is_the_median_one_and_the_default_cap_is_none(table):
    rows = [
        row(0, 0, (1, 1, 2, 3, 3, length), iteration, cap)
        for cap in (5, "None")
        for iteration, length in enumerate((9, 5, 7))
    ]
    watched = read_timelines(table(rows))
    assert watched.caps() == [5.0, None]
    assert watched.typical(5).total_s == pytest.approx(0.007)
    assert watched.typical(None).total_s == pytest.approx(0.007)
    assert watched.median_s(None) == pytest.approx(0.007)
    with pytest.raises(UserError, match="no pass was watched at 1 MiB, only at 5, None"):
        watched.typical(1)


def test_what_was_in_flight_together_is_counted_on_each_rank(table):
    # Rank 0 reduces one after another, 40 ms in all; rank 1 has both from 25 to 31 of 36 ms.
    most, share = read_timelines(table(ROWS)).in_flight(5)
    assert most == 2
    assert share == pytest.approx(6 / (40 + 36))
    assert read_timelines(table(ROWS[:2])).in_flight(5) == (1, 0.0)


def test_the_shown_cap_is_the_wanted_one_or_the_nearest_watched(table):
    watched = read_timelines(
        table([row(0, 0, (1, 1, 2, 3, 3, 3), cap=cap) for cap in (1, 8, "None")])
    )
    assert shown_cap(watched, 8) == 8
    assert shown_cap(watched, 2) == 1  # nearest on a logarithmic scale
    assert shown_cap(None, 2) == 2


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"end_ms": 3.0}, "line 2: end_ms 3 is before start_ms 10"),
        ({"copied_ms": "soon"}, "line 2, column 'copied_ms': 'soon' is not a number"),
        ({"start_ms": -1.0}, "column 'start_ms': '-1.0' is not a number of at least 0"),
        ({"size_bytes": 0}, "column 'size_bytes'"),
        ({"bucket": 7}, "not every rank has every bucket at cap 5 MiB, iteration 0"),
    ],
)
def test_a_table_that_cannot_be_one_is_refused_in_one_line(table, change, said):
    with pytest.raises(UserError) as caught:
        read_timelines(table([ROWS[0] | change, *ROWS[1:]]))
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_table_without_its_columns_or_a_rank_is_refused(table):
    with pytest.raises(UserError, match="not every rank"):
        read_timelines(table(ROWS[:3]))
    with pytest.raises(UserError, match="no column 'end_ms'"):
        read_timelines(table([{k: v for k, v in one.items() if k != "end_ms"} for one in ROWS]))


def test_without_a_measured_pass_the_figure_has_the_predicted_one():
    assert len(predicted_and_measured(COMPUTE_BOUND, None, "made up").axes) == 1


def test_the_figure_has_both_passes_on_one_clock():
    slower = serial([33, 33, 33], [10, 10, 10], [1, 1, 1], tail_ms=15)
    fig = predicted_and_measured(COMPUTE_BOUND, slower, "made up", "cap 5 MiB")
    upper, lower = fig.axes
    assert upper.get_xlim() == lower.get_xlim()
    assert "108.0" in upper.get_title("left")
    assert "117.0" in lower.get_title("left")
    shown = show(largest_gaps(gaps(COMPUTE_BOUND, slower)), GAPS)
    assert shown.cells[:1] == [["1", "1.00", "computation", "30.0", "33.0", "+3.0", "+3.0"]]


def traced_pass(offset_us: float = 0.0) -> list[Event]:
    """Makes a pass of two buckets, [3, 4] + [4] and [5] elements of 4 bytes.

    Gloo's threads are 7 and 8. Bucket 1 is ready at 300 and 2 at 600; computation ends at 700,
    the pass at 1,000 µs.
    """
    made = [
        Event(BACKWARD, 0, 1000, 1, kind="range"),
        Event(MUL_OUT, 100, 110, 1, ((3, 4),)),
        Event(NODE, 200, 400, 1),
        Event(MUL_OUT, 250, 270, 1, ((4,),)),
        Event("c10d::allreduce_", 300, 320, 1, ((16,),)),
        Event("gloo:all_reduce", 330, 650, 7, ((16,),), "range"),
        Event(NODE, 500, 700, 1),
        Event(MUL_OUT, 550, 555, 1, ((5,),)),
        Event("c10d::allreduce_", 600, 601, 1, ((5,),)),
        Event("gloo:all_reduce", 602, 900, 8, ((5,),), "range"),
        Event(COPY, 750, 760, 1, ((3, 4),)),
        Event(COPY, 760, 780, 1, ((4,),)),
        Event(COPY, 905, 950, 1, ((5,),)),
    ]
    return [
        replace(event, start_us=event.start_us + offset_us, end_us=event.end_us + offset_us)
        for event in made
    ]


def test_a_trace_says_of_each_bucket_when_it_was_ready_reduced_and_copied():
    outside = Event("gloo:all_reduce", 2000, 2100, 7, ((16,),), "range")
    first, second = bucket_rows([outside, *traced_pass()], [64, 20])
    assert first == pytest.approx(
        {
            **{"bucket": 0, "size_bytes": 64, "thread": 0, "copy_in_ms": 0.03, "launch_ms": 0.02},
            **{"ready_ms": 0.3, "start_ms": 0.33, "end_ms": 0.65, "copied_ms": 0.78},
            **{"compute_end_ms": 0.7, "backward_ms": 1.0},
        }
    )
    assert (second["thread"], second["start_ms"], second["copied_ms"]) == (1, 0.602, 0.95)


def test_an_all_reduce_is_over_when_its_bucket_is_copied_even_if_its_thread_notes_that_late():
    late = [
        replace(event, end_us=5000) if event.name == "gloo:all_reduce" else event
        for event in traced_pass()
    ]
    rows = bucket_rows(late, [64, 20])
    assert [row["end_ms"] for row in rows] == [0.75, 0.905]
    views = [event for event in late if event.name != COPY]
    assert [row["end_ms"] for row in bucket_rows(views, [64, 20])] == [1.0, 1.0]


def test_a_trace_may_begin_long_before_the_pass():
    for one, other in zip(
        bucket_rows(traced_pass(), [64, 20]), bucket_rows(traced_pass(5000), [64, 20]), strict=True
    ):
        assert one == pytest.approx(other)


def test_buckets_that_are_views_of_gradients_are_not_copied_back():
    views = [event for event in traced_pass() if event.name != COPY]
    first, second = bucket_rows(views, [64, 20])
    assert (first["copied_ms"], second["copied_ms"]) == (0.7, 0.9)  # computation, then reduced


def test_all_reduces_noted_in_the_wrong_order_are_told_apart_by_their_sizes():
    late, early = (Event("gloo:all_reduce", t, 90, shapes=((n,),)) for t, n in ((11, 8), (10, 3)))
    assert in_bucket_order([early, late], [8.0, 3.0]) == [late, early]
    assert in_bucket_order([early, late], [3.0, 8.0]) == [early, late]
    assert in_bucket_order([late, early], [5.0, 5.0]) == [early, late]  # sizes say nothing


def test_scalars_fill_one_element_of_a_bucket():
    copies = [Event(COPY, t, t + 1, shapes=shapes) for t, shapes in ((0, ((2,),)), (5, ()))]
    assert copy_spans_us(copies, [3.0]) == [(0, 6)]


def test_a_trace_that_lacks_buckets_or_passes_is_refused():
    with pytest.raises(UserError, match="2 buckets handed over and 2 reduced, DDP has 3"):
        bucket_rows(traced_pass(), [64, 16, 4])
    with pytest.raises(UserError, match="0 backward passes"):
        bucket_rows(traced_pass()[1:], [64, 20])
    with pytest.raises(UserError, match="2 backward passes"):
        bucket_rows([*traced_pass(), *traced_pass(5000)], [64, 20])
