"""Backward passes watched bucket by bucket on two ranks: replays, whose gradients are ready at
known times, and the table that ddp_benchmark.py writes of a GPT-2."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest
import torch
from bucket_timeline_worker import APART_S, LARGE, LATENCY_MS, OPTIONS, SMALL

from common.analysis.buckets.timelines import read_timelines
from common.benchmarks.buckets import bucket_timeline
from common.benchmarks.buckets.bucket_timeline import BucketMarks

pytestmark = pytest.mark.xdist_group("assignment2_runs")

WORKER = Path(__file__).with_name("bucket_timeline_worker.py")
ARMS = ("apart", "together", "latency", "marked", *OPTIONS)
LATE_MS = 15
"""What a busy machine may be late by, far below the 40 ms between two gradients."""


@pytest.fixture(scope="module")
def ranks(rank_server) -> list[dict]:
    done = rank_server.run(WORKER, ranks=2)
    assert done.exit_codes == [0, 0], "\n".join(done.stderr)
    return [*done.lines(0), *done.lines(1)]


@pytest.mark.alone  # the tests below say how late a bucket may be in what is watched here
@pytest.mark.two_ranks
def test_both_ranks_are_watched_in_every_arm(ranks):
    assert [set(ARMS) <= set(rank) for rank in ranks] == [True, True]


@pytest.mark.two_ranks
@pytest.mark.parametrize("arm", ARMS)
def test_every_bucket_is_seen_in_a_possible_order(ranks, arm):
    for rank in ranks:
        rows = rank[arm]["rows"]
        assert [row["bucket"] for row in rows] == list(range(len(rank[arm]["handed_ms"])))
        assert {row["size_bytes"] for row in rows} == {LARGE if arm == "together" else SMALL}
        for row in rows:
            assert 0 < row["ready_ms"] <= row["start_ms"] <= row["end_ms"] <= row["copied_ms"]
            assert row["ready_ms"] <= row["compute_end_ms"] <= row["copied_ms"]
            assert row["copied_ms"] <= row["backward_ms"]
        for before, after in pairwise(rows):
            assert before["ready_ms"] <= after["ready_ms"]
            assert before["copied_ms"] <= after["copied_ms"]


@pytest.mark.two_ranks
@pytest.mark.parametrize("arm", ["apart", "marked"])
def test_a_bucket_is_ready_when_its_gradient_was_handed_over(ranks, arm):
    # Copying in comes in between, so not before (but for the microseconds that the range took).
    for rank in ranks:
        for row, handed_ms in zip(rank[arm]["rows"], rank[arm]["handed_ms"], strict=True):
            assert -0.5 <= row["ready_ms"] - handed_ms < LATE_MS


@pytest.mark.two_ranks
@pytest.mark.parametrize("arm", ["apart", "marked"])
def test_computation_ends_when_the_recorded_one_did_and_small_all_reduces_wait_for_nothing(
    ranks, arm
):
    for rank in ranks:
        rows = rank[arm]["rows"]
        assert 0 <= rows[0]["compute_end_ms"] - APART_S[-1] * 1e3 < LATE_MS
        for row in rows:
            assert row["start_ms"] - row["ready_ms"] < LATE_MS
            assert row["end_ms"] - row["start_ms"] < 2 * LATE_MS  # the other rank may be late


class Streams:
    """Stands in for a GPU's streams and the clock that marks the current one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.current = "computes"
        monkeypatch.setattr(torch.cuda, "Stream", lambda device: f"own stream of {device}")
        monkeypatch.setattr(torch.cuda, "stream", self.entered)
        monkeypatch.setattr(bucket_timeline, "clock_for", lambda device: self)

    @contextmanager
    def entered(self, stream: str) -> Iterator[None]:
        self.current, before = stream, self.current
        yield
        self.current = before

    def mark(self) -> str:
        return self.current


@pytest.mark.parametrize(
    ("backend", "expected"), [("gloo", "own stream of cuda:0"), ("nccl", "computes")]
)
def test_on_a_gpu_the_end_of_a_gloo_exchange_does_not_wait_for_queued_kernels(
    monkeypatch, backend, expected
):
    # Queued kernels are in the stream that computes; over NCCL the callback has a stream that
    # waits for the exchange.
    streams, hooks = Streams(monkeypatch), []
    ddp = SimpleNamespace(register_comm_hook=lambda state, hook: hooks.append(hook))
    worker = SimpleNamespace(device=torch.device("cuda:0"), backend=backend)
    marks = BucketMarks(ddp, worker)
    done: torch.futures.Future = torch.futures.Future()
    marks.register_comm_hook(None, lambda state, bucket: done)
    bucket = SimpleNamespace(buffer=lambda: torch.zeros(4), index=lambda: 0)
    answer = hooks[0](None, bucket)
    assert marks._ready == {0: "computes"}  # on the thread of the backward pass
    done.set_result(torch.ones(4))
    assert answer.wait().tolist() == [1.0] * 4
    assert marks._done == {0: expected}
    assert streams.current == "computes"


@pytest.mark.two_ranks
def test_a_hook_with_marks_averages_as_ddp_does(ranks):
    assert [rank["marked"]["gradients"] for rank in ranks] == [[1.0] * len(APART_S)] * 2


@pytest.mark.two_ranks
def test_gloo_reduces_two_buckets_at_once_in_the_two_threads_of_its_group(ranks):
    """A fact of the installed torch that the model of one after another leaves out."""
    for rank in ranks:
        assert rank["threads"] == 2
        rows = rank["together"]["rows"]
        assert {row["thread"] for row in rows} == {0, 1}
        overlaps = [after["start_ms"] < before["end_ms"] for before, after in pairwise(rows)]
        assert any(overlaps)
        # never three: the third starts when one of the two before is done
        for first, second, third in zip(rows, rows[1:], rows[2:], strict=False):
            assert third["start_ms"] >= min(first["end_ms"], second["end_ms"]) - 0.5


@pytest.mark.two_ranks
def test_added_latency_is_part_of_an_all_reduce_and_keeps_them_one_after_another(ranks):
    for rank in ranks:
        rows = rank["latency"]["rows"]
        assert all(row["end_ms"] - row["start_ms"] >= LATENCY_MS for row in rows)
        for before, after in pairwise(rows):
            assert after["start_ms"] >= before["end_ms"] - 1
        # The replay's gradients are ready within 6 ms: all but the first bucket wait.
        assert rows[-1]["start_ms"] - rows[-1]["ready_ms"] > LATENCY_MS


@pytest.mark.two_ranks
def test_copies_and_launches_are_timed_where_the_profiler_watches(ranks):
    for rank in ranks:
        assert all(row["copy_in_ms"] > 0 for row in rank["together"]["rows"])
        assert all(row["launch_ms"] > 0 for row in rank["apart"]["rows"])
        copied = [row["copied_ms"] - row["end_ms"] for row in rank["together"]["rows"]]
        assert copied[-1] > 0
        # Nothing is copied out of a view: a pass is over when the last all-reduce is, which with
        # two threads may be an earlier bucket's.
        views = rank["views"]["rows"]
        ends = [row["end_ms"] for row in views]
        assert views[-1]["copied_ms"] == max(*ends, views[-1]["compute_end_ms"])


CAPS = ("0.05", "0.5", "None")


def test_the_benchmark_watches_every_cap_after_its_rounds(ddp_run):
    table = pd.read_csv(
        ddp_run / "bucket-timeline.csv", dtype={"bucket_cap_mib": str}, keep_default_na=False
    )
    assert list(table.columns) == [
        *("bucket_cap_mib", "iteration", "rank", "bucket", "size_bytes", "thread", "copy_in_ms"),
        *("launch_ms", "ready_ms", "start_ms", "end_ms", "copied_ms", "compute_end_ms"),
        "backward_ms",
    ]
    buckets = pd.read_csv(
        ddp_run / "ddp-buckets.csv", dtype={"bucket_cap_mib": str}, keep_default_na=False
    )
    keys = ["bucket_cap_mib", "rank", "bucket"]
    expected = buckets.set_index(keys)["size_bytes"].sort_index()
    for iteration in range(1):
        rows = table[table["iteration"] == iteration].set_index(keys)["size_bytes"].sort_index()
        pd.testing.assert_series_equal(rows, expected)
    assert tuple(dict.fromkeys(table["bucket_cap_mib"])) == CAPS


def test_the_table_of_the_benchmark_can_be_read(ddp_run):
    watched = read_timelines(ddp_run / "bucket-timeline.csv")
    assert watched.caps() == [0.05, 0.5, None]
    for cap in watched.caps():
        assert len(watched.passes(cap)) == 1
        last = watched.typical(cap)
        assert last.events[-1].copied_s <= last.total_s
