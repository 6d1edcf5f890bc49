"""Traces that are cut, merged, without kernels, of other launches, of steps that differ."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from command_line import answered
from trace_support import FLOATS, SHARED, STEPS, device_trace, trace, write

from common.analysis.replay.job import read_job
from common.analysis.replay.system import at_caps, best_cap, checked_system, own_error, system_of
from common.cli.prediction.network import measured_cluster
from common.errors import UserError
from common.perfmodel.cluster.clusters import load_cluster
from common.perfmodel.replay.engine import run
from common.perfmodel.replay.gate import gate_of
from common.perfmodel.replay.waits import waits
from common.traces.rank_trace import read_rank_trace
from common.traces.step_overlap import read_step_overlap

NODE = "autograd::engine::evaluate_function: "
ON_HOST = ("cpu_op", "user_annotation")


def added(content: dict, kind: str, name: str, at: float, length: float, **more) -> None:
    row = {"ph": "X", "cat": kind, "name": name, "pid": 9, "tid": 1, "ts": at, "dur": length}
    content["traceEvents"].append(row | {"args": {}} | more)


def begins(content: dict) -> list[float]:
    events = content["traceEvents"]
    return [e["ts"] for e in events if e["name"].startswith("ProfilerStep")]


def without(content: dict, *words: str, step: int) -> dict:
    """Leaves out what has one of some words in its name and begins in a step."""
    starts = [*begins(content), np.inf]
    content["traceEvents"] = [
        event
        for event in content["traceEvents"]
        if not starts[step] <= event["ts"] < starts[step + 1]
        or not any(word in event["name"] for word in words)
    ]
    return content


def saved(path: Path, content: dict) -> Path:
    path.write_text(json.dumps(content))
    return path


# Files


@pytest.mark.parametrize(
    ("is_host_first", "words"), [(False, "no order of time"), (True, "breaks")]
)
def test_a_gpus_trace_that_breaks_off_is_refused(tmp_path: Path, is_host_first, words) -> None:
    content = device_trace(0)
    if is_host_first:
        content["traceEvents"].sort(key=lambda event: event["cat"] not in ON_HOST)
    text = json.dumps(content)
    (tmp_path / "0.json").write_text(text[: len(text) // 3])
    with pytest.raises(UserError, match=words):
        read_rank_trace(tmp_path / "0.json")


def test_a_gpus_trace_that_breaks_off_before_the_first_launch_is_none_of_a_cpu(tmp_path) -> None:
    content = device_trace(0)
    events = [e for e in content["traceEvents"] if not e["name"].startswith("nccl:")]
    events = [e for e in events if e["cat"] in ON_HOST]
    about = {"deviceProperties": [{"id": 0, "name": "A100"}], **content, "traceEvents": events}
    text = json.dumps(about)
    (tmp_path / "0.json").write_text(text[: len(text) * 3 // 4])
    with pytest.raises(UserError, match="no order of time"):
        read_rank_trace(tmp_path / "0.json")


@pytest.mark.parametrize("read", [read_rank_trace, read_step_overlap])
def test_collectives_of_nccl_without_kernels_are_refused(tmp_path: Path, read) -> None:
    content = device_trace(0)
    content["traceEvents"] = [e for e in content["traceEvents"] if e["cat"] in ON_HOST]
    with pytest.raises(UserError, match=r"0\.json: collectives of NCCL and no kernels: profile"):
        read(saved(tmp_path / "0.json", content))


@pytest.mark.parametrize("make", [trace, device_trace])
def test_a_step_that_the_loop_never_entered_is_none(tmp_path: Path, make) -> None:
    content = make(0)
    last = max(event["ts"] + event["dur"] for event in content["traceEvents"])
    added(content, "user_annotation", f"ProfilerStep#{STEPS}", last + 1, 20)
    added(content, "user_annotation", "enumerate(DataLoader)#_Iter.__next__", last + 2, 5)
    path = saved(tmp_path / "0.json", content)
    assert len(read_rank_trace(path).steps) == len(read_step_overlap(path)) == STEPS


@pytest.mark.parametrize("read", [read_rank_trace, read_step_overlap])
def test_steps_of_two_processes_in_one_file_are_refused(tmp_path: Path, read) -> None:
    content = trace(0)
    content["traceEvents"] += trace(1)["traceEvents"]
    with pytest.raises(UserError, match=r"0\.json: two steps of one number"):
        read(saved(tmp_path / "0.json", content))


@pytest.mark.parametrize("kind", ["cut", "packed by another name", "not UTF-8"])
def test_a_trace_tells_its_rank_whatever_its_file_is_like(tmp_path: Path, kind) -> None:
    content = trace(1)
    for number in range(2000):  # what is cut off in them
        added(content, "cpu_op", f"aten::{number**9}", 1e6 + number, 1)
    text = json.dumps(content).encode()
    packed = gzip.compress(text)
    name, octets = {
        "cut": ("of-9.json.gz", packed[: len(packed) * 3 // 4]),
        "packed by another name": ("of-9.json", packed),
        "not UTF-8": ("of-9.json", text.replace(b"aten::add_", b"aten::\xff")),
    }[kind]
    (tmp_path / name).write_bytes(octets)
    read = read_rank_trace(tmp_path / name)
    assert (read.rank, read.world_size, len(read.steps)) == (1, 2, STEPS)


# Launches


@pytest.mark.parametrize(
    "name",
    ["cuLaunchKernelEx", "hipExtModuleLaunchKernel", "hipModuleLaunchKernel", "hipExtLaunchKernel"],
)
def test_kernels_belong_to_the_launches_of_any_runtime(tmp_path: Path, name) -> None:
    content = device_trace(0, launch=name)
    job = read_job(saved(tmp_path / "0.json", content))
    assert job.notes == []
    assert gate_of(run(job.program)).within == STEPS
    first = next(event for event in content["traceEvents"] if event["name"] == name)
    first["name"] = "somebodysLaunch"
    kernels = sum(event["cat"] == "kernel" for event in content["traceEvents"])
    [note] = read_job(saved(tmp_path / "0.json", content)).notes
    assert f"0.json: 1 of {kernels} kernels have no launch that is known" in note


# Steps and passes


def test_passes_belong_to_steps_by_number(tmp_path: Path) -> None:
    words = ("reducer", "allreduce", "all_reduce")
    ranks = (trace(0), trace(1, forward_us=9000))
    write(tmp_path, *(without(content, *words, step=1) for content in ranks))
    system = system_of(read_job(tmp_path))
    assert system.numbers == (0, 2, 3, 4)
    steps_s = pd.Series([0.010, 9.0, 0.030, 0.040, 0.060])
    row = at_caps(system, steps_s, [1.0]).iloc[0]
    assert row["step"].estimate == pytest.approx(0.035, rel=0.01)
    assert row["backward_s"] == pytest.approx(0.018, rel=0.05)


@pytest.mark.parametrize("metric", [False, True])
def test_a_bucket_has_the_size_of_the_all_reduce_that_it_was_handed_to(tmp_path, metric) -> None:
    write(tmp_path, *(device_trace(rank, metric=metric) for rank in (0, 1)))
    system = system_of(read_job(tmp_path))
    assert system.calibration.ready.sizes_bytes.tolist() == [4 * FLOATS] * 2


def test_buckets_that_change_are_refused(tmp_path: Path) -> None:
    path = saved(tmp_path / "0.json", without(device_trace(0), "reducer::mul_out", step=0))
    content = json.loads(path.read_text())
    start = begins(content)[0]
    copy = "torch::distributed::reducer::mul_out"
    added(content, "cpu_op", copy, start + 140, 5)  # before the first bucket, none before the other
    with pytest.raises(UserError, match="buckets change between steps"):
        system_of(read_job(saved(path, content)))


def test_a_pass_is_that_of_the_last_micro_batch(tmp_path: Path) -> None:
    ranks = (trace(0), trace(1, forward_us=9000))
    plain_s = system_of(read_job(write(tmp_path, *ranks))).measured_s
    for content, pass_us in zip(ranks, (5000, 9000), strict=True):
        for begin in begins(content):
            for at in (begin + 100, begin + pass_us + 3000):  # two micro-batches, two gradients
                for offset in (0, 700):
                    name = f"{NODE}torch::autograd::AccumulateGrad"
                    added(content, "cpu_op", name, at + offset, 100)
            added(content, "cpu_op", f"{NODE}MmBackward0", begin + 50, 700)
    system = system_of(read_job(write(tmp_path, *ranks)))
    assert system.measured_s == pytest.approx(plain_s)
    assert plain_s == pytest.approx(0.018, rel=0.05)


@pytest.mark.parametrize("world", [2, 3])
def test_what_a_rank_sends_another_receives(tmp_path: Path, world) -> None:
    def sent(rank: int, what: str, at: float) -> None:
        for begin in begins(ranks[rank]):
            added(ranks[rank], "cpu_op", f"c10d::{what}", begin + at, 5)
            added(ranks[rank], "user_annotation", f"gloo:{what}", begin + at + 10, 500, tid=8)

    ranks = [trace(rank, forward_us=9000, world=world) for rank in range(world)]
    for rank in range(world - 1):  # a rank receives, and then sends on
        sent(rank, "send", 1000 + 1000 * rank)
        sent(rank + 1, "recv", 1000 + 1000 * rank)
    job = read_job(write(tmp_path, *ranks))
    calls = [call for call in job.program.calls if call.operation in ("send", "recv")]
    assert {len(call.members) for call in calls} == ({2} if world == 2 else {1})
    assert len(calls) == STEPS * (1 if world == 2 else 4)
    assert sum("could not be joined" in note for note in job.notes) == (world > 2)
    assert abs(gate_of(run(job.program)).error) < 0.02


# Answers


def test_a_gpu_job_is_replayed_and_its_b_star_is_the_fastest_of_the_table_above_it() -> None:
    if not SHARED.exists():
        pytest.skip(f"no {SHARED}")
    job = read_job(SHARED)
    replayed = run(job.program)
    gate = gate_of(replayed)
    assert gate.within == 3
    assert waits(replayed).set_index("cause")["seconds"].idxmax() == "its host"
    system = checked_system(job)
    assert abs(own_error(system)) < 0.05
    best, _ = best_cap(system)
    caps = [None, best.cap_mib, *np.geomspace(0.5, 100, 20)]
    table = at_caps(system, gate.steps["measured_s"], caps)
    assert table["backward_s"][1] == pytest.approx(best.total_s)
    assert best.total_s <= table["backward_s"].min() * 1.001


def test_intervals_need_four_steps_and_caps_are_told_apart_by_theirs(tmp_path: Path) -> None:
    write(tmp_path, *(device_trace(rank, steps=3) for rank in (0, 1)))
    printed = answered("predict", "--from-traces", tmp_path)
    assert "95 %: not told (3 steps; 4 are needed)" in printed
    assert " to " not in printed.partition("What a step would take")[2].partition("b* =")[0]
    assert "cannot be told from DDP's default; within 1 %: " in printed


def test_traces_are_a_network_only_of_all_ranks(tmp_path: Path) -> None:
    cluster = load_cluster("a100-ib")
    write(tmp_path, device_trace(0))
    with pytest.raises(UserError, match="1 of 2 ranks: their waits"):
        measured_cluster(cluster, None, str(tmp_path))
    write(tmp_path, device_trace(1))
    assumed = measured_cluster(cluster, None, str(tmp_path)).assumptions
    assert set(system_of(read_job(tmp_path)).assumed) <= set(assumed)
