"""A model that hooks cannot see into is profiled for a few steps, and computes the same."""

from __future__ import annotations

import gzip
import json
import re
import socket
import tarfile
from pathlib import Path

import pytest
from ddplab_watch.profile import kept
from watch_support import SHORT, assert_same, rows_of

from common.diagnose.compared_runs import Comparison
from common.diagnose.evidence.bundle import read_bundle
from common.diagnose.opened import open_diagnosis

STEPS = sum(SHORT.values())
FIELDS = {"ph", "cat", "name", "pid", "tid", "ts", "dur", "args"}


@pytest.fixture
def sharded(loop_run) -> tuple[Path, list[dict], list[dict]]:
    """Runs FSDP2 on two ranks, unwatched and watched; returns what they computed."""
    words = ("--sharded", 1, "--left_on", 1)
    _, expected = loop_run(*words, watched=False)
    folder, found = loop_run(*words, anonymise=1)
    return folder, expected, found


def trace_of(folder: Path, rank: int) -> dict:
    path = folder / "bundle" / f"rank{rank}-trace.json.gz"
    return json.loads(gzip.decompress(path.read_bytes()))


def test_under_fsdp_losses_weights_and_random_numbers_are_the_same_to_the_last_bit(sharded) -> None:
    _, expected, found = sharded
    assert_same(expected, found)


def test_lean_passes_under_fsdp_are_beside_passes_as_they_are(sharded) -> None:
    folder, _, _ = sharded
    for rank in (0, 1):
        rows = rows_of(folder, rank, "lean-passes")
        assert {row["without"] for row in rows} == {"hooks", "unused gradients"}
        assert {row["lean"] for row in rows} == {True, False}
        assert all(row["backward_time_ms"] > 0 for row in rows)
        [facts] = rows_of(folder, rank, "facts")
        unused = {row["unused_bytes"] for row in rows if row["without"] == "unused gradients"}
        assert 0 < max(unused) < facts["gradient_bytes"]
        assert rows_of(folder, rank, "probes") == []  # no pass is without exchange


def test_three_steps_after_the_window_are_in_the_trace_and_in_no_table(sharded) -> None:
    folder, _, _ = sharded
    for rank in (0, 1):
        names = [record["name"] for record in trace_of(folder, rank)["traceEvents"]]
        steps = sorted(name for name in names if name.startswith("ProfilerStep#"))
        # One step after the window warms the profiler up.
        assert steps == [f"ProfilerStep#{STEPS + n}" for n in (1, 2, 3)]
        assert {"gloo:all_gather", "aten::addmm"} <= set(names)
        assert [row["step"] for row in rows_of(folder, rank, "steps")] == list(range(STEPS))
        assert rows_of(folder, rank, "end")[0]["status"] == "complete"


def test_no_name_of_host_or_path_no_shape_and_no_stack_is_in_the_trace(sharded) -> None:
    folder, _, _ = sharded
    for rank in (0, 1):
        trace = trace_of(folder, rank)
        assert set(trace) == {"schemaVersion", "distributedInfo", "traceEvents"}
        assert trace["distributedInfo"] == {"rank": rank}
        assert all(set(record) == FIELDS for record in trace["traceEvents"])
        arguments = {name for record in trace["traceEvents"] for name in record["args"]}
        assert not arguments & {"Input Dims", "Call stack", "Python id"}
        text = json.dumps(trace)
        assert str(folder) not in text
        assert "loop.py" not in text
        assert not re.search(rf'"{re.escape(socket.gethostname())}"', text)


def test_the_scripts_own_ranges_stay_out_and_what_came_before_the_first_step() -> None:
    def record(name: str, kind: str, start: float, **more: object) -> dict:
        place = {"ph": "X", "cat": kind, "name": name, "pid": 1, "tid": 1, "ts": start, "dur": 1.0}
        return place | {"args": more}

    records = [
        record("aten::mm", "cpu_op", 1.0),
        record("ProfilerStep#7", "user_annotation", 2.0),
        record("load /home/ann/texts", "user_annotation", 3.0),
        record("aten::mm", "cpu_op", 4.0, **{"Input Dims": [[2, 3]], "Call stack": "train.py(3)"}),
        record("nccl:all_reduce", "user_annotation", 5.0),
        record("ncclDevKernel", "kernel", 6.0, stream=7, correlation=3, device=0),
        record("train.py(3): main", "python_function", 7.0),
        {"ph": "M", "name": "process_name", "ts": 8.0, "pid": 1, "tid": 0, "args": {"name": "ann"}},
    ]
    found = [(each["name"], each["args"]) for each in kept(records)]
    assert found == [
        ("ProfilerStep#7", {}),
        ("aten::mm", {}),
        ("nccl:all_reduce", {}),
        ("ncclDevKernel", {"correlation": 3, "stream": 7}),
    ]


def test_the_profiler_tells_the_scripts_user_nothing(sharded) -> None:
    folder, _, _ = sharded
    for rank in (0, 1):
        told = (folder / f"rank{rank}.err").read_text()
        assert "Profiler" not in told
        assert "ddplab-watch" not in told


def test_a_bundle_with_traces_is_diagnosed_packed_and_compared(sharded, tmp_path: Path) -> None:
    folder, _, _ = sharded
    bundle = read_bundle(folder / "bundle")
    steps = bundle.of("trace-steps")
    assert steps.groupby("rank")["step"].agg(list).tolist() == [[STEPS + n for n in (1, 2, 3)]] * 2
    parts = steps["computation_ms"] + steps["exposed_communication_ms"] + steps["idle_ms"]
    assert parts.to_numpy() == pytest.approx(steps["step_ms"].to_numpy())
    plain = open_diagnosis(folder / "bundle")
    assert "under the profiler" in plain.diagnosis.summary
    judged = {cause for cause, _ in plain.diagnosis.not_judged}
    assert "slow-rank" not in judged
    assert not any(cause.startswith("model-too-small") for cause in judged)
    with tarfile.open(tmp_path / "job.tar.gz", "w:gz") as archive:
        archive.add(folder / "bundle", "bundle")
    packed = read_bundle(tmp_path / "job.tar.gz")
    for table in ("steps", "trace-steps"):
        assert packed.of(table).equals(bundle.of(table))
    both = Comparison([plain], [plain])
    assert {row["change"] for row in both.rows()} == {0.0}
    assert both.causes() == ["The same causes were found in both."]


def test_a_model_compiled_in_place_is_profiled_too(compared_run) -> None:
    folder = compared_run("--compiled", 1, count=1, profile_steps=2)
    names = [record["name"] for record in trace_of(folder, 0)["traceEvents"]]
    assert sum(name.startswith("ProfilerStep#") for name in names) == 2


@pytest.mark.slow
def test_nothing_is_profiled_that_was_not_asked_for(loop_run) -> None:
    folder, _ = loop_run("--compiled", 1, count=1, profile_steps=0)
    assert not list((folder / "bundle").glob("*trace*"))


@pytest.mark.parametrize(
    ("begins", "why"),
    [pytest.param(8, "profiles itself", marks=pytest.mark.slow), (12, "began to profile")],
)
def test_a_script_that_profiles_itself_goes_first(loop_run, begins: int, why: str) -> None:
    # The first update is not counted: the profile begins after the tenth, the script's own before
    # that or in the middle of it.
    words = ("--compiled", 1, "--profiles_itself", begins)
    folder, _ = loop_run(*words, count=1, warmup=1, bucket_steps=4)
    assert why in str(rows_of(folder, 0, "unseen"))
    assert not list((folder / "bundle").glob("*trace*"))
    assert rows_of(folder, 0, "end")[0]["status"] == "complete"
