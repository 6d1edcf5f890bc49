"""Traces written by hand, in Kineto's format, and what is read and predicted from them."""

from __future__ import annotations

import gzip
import json
import tracemalloc
from pathlib import Path

import pytest
from command_line import answered, ddplab, error_line
from trace_support import FLOATS, STEPS, trace, write

from common.analysis.replay.job import read_job
from common.analysis.replay.system import at_caps, own_error, system_of
from common.errors import UserError
from common.explore.buckets import first_settings, predict_line
from common.explore.known_systems import known_systems
from common.perfmodel.replay.engine import run
from common.perfmodel.replay.gate import gate_of
from common.perfmodel.replay.waits import LAST_RANK, waits
from common.traces import trace_stream
from common.traces.operation_names import collective
from common.traces.rank_trace import read_rank_trace


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write(tmp_path, trace(0), trace(1, forward_us=9000))


def test_steps_come_out_and_the_fast_rank_waits_for_the_slow_one(folder: Path) -> None:
    job = read_job(folder)
    replayed = run(job.program)
    gate = gate_of(replayed)
    assert abs(gate.error) < 0.02
    assert gate.within == STEPS
    assert [call.own_s for call in job.program.calls] == pytest.approx([0.006] * 2 * STEPS, rel=0.1)
    for_last = waits(replayed).set_index(["cause", "rank"])["seconds"][LAST_RANK]
    assert for_last[0] == pytest.approx(0.004, rel=0.05)
    assert for_last.get(1, 0.0) < 1e-4


def test_clocks_that_differ_by_minutes_are_set_by_collectives(tmp_path: Path) -> None:
    late = trace(1, forward_us=9000, clock_us=3e8)
    job = read_job(write(tmp_path, trace(0), late))
    assert job.clocks_us[1] == pytest.approx(3e8, abs=100)
    assert abs(gate_of(run(job.program)).error) < 0.02


def test_other_caps_are_predicted_by_the_labs_model(folder: Path) -> None:
    job = read_job(folder)
    system = system_of(job)
    assert abs(own_error(system)) < 0.05
    table = at_caps(system, gate_of(run(job.program)).steps["measured_s"], [1.0, 100.0])
    assert table["buckets"].tolist() == [2, 1]
    # One bucket of 2 MiB leaves when all is copied, at 10 ms, takes 12 ms, and is copied for 2.
    assert table["backward_s"].iloc[1] == pytest.approx(0.024, rel=0.03)


def test_a_cut_trace_is_read_up_to_the_cut_and_strangers_are_named(folder: Path) -> None:
    text = (folder / "rank1.json").read_text()
    (folder / "rank1.json").write_text(text[: len(text) * 3 // 4])
    (folder / "rank2.json").write_text("[1, 2")
    with gzip.open(folder / "rank3.json.gz", "wt") as file:
        file.write("no trace")
    (folder / "rank4.json.gz").write_bytes(b"no gzip")
    deep = '{"traceEvents": [{"args": ' + "[" * 10**5
    (folder / "rank5.json").write_text(deep, encoding="utf-16")
    (folder / "rank6.json").write_text(deep)
    job = read_job(folder)
    strangers = [f"rank{number}.json" for number in range(1, 7)]
    assert 1 <= len(job.program.steps) // 2 < STEPS
    assert [sum(name in note for note in job.notes) for name in strangers] == [1] * 6
    assert abs(gate_of(run(job.program)).error) < 0.02


def test_a_trace_takes_little_memory_however_long_it_is(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(trace_stream, "CHUNK", 2**18)

    def size_and_peak(count: int) -> tuple[int, int]:
        content = trace(0)
        record = content["traceEvents"][0] | {"dur": 0.25}
        record["args"] = {"Input Dims": [[64, 64]] * 4, "Input type": ["float"] * 4, "Ev Idx": 7}
        content["traceEvents"] += [record | {"ts": 1 + n / 4} for n in range(count)]
        path = tmp_path / f"rank0-of-{count}.json"
        path.write_text(json.dumps(content))
        tracemalloc.start()
        read = read_rank_trace(path)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert len(read.busy) >= count
        return path.stat().st_size, peak

    (short, low), (long, high) = size_and_peak(1_000), size_and_peak(8_000)
    # An operator leaves its beginning, end and thread: 24 of more than 200 bytes, sorted in a copy.
    assert long - short > 1.4e6
    assert high - low < (long - short) / 2


def test_traces_that_do_not_fit_together_are_refused(tmp_path: Path) -> None:
    write(tmp_path, trace(0), trace(1, world=4))
    with pytest.raises(UserError, match="jobs of 2 and 4 ranks"):
        read_job(tmp_path)
    other = trace(1)
    for event in other["traceEvents"]:
        if event["name"] == "gloo:all_reduce":
            event["args"]["Input Dims"] = [[FLOATS * 2]]
    write(tmp_path, other)
    with pytest.raises(UserError, match="do not fit together"):
        read_job(tmp_path)


@pytest.mark.parametrize(
    ("name", "operation"),
    [
        ("c10d::allreduce_", "all_reduce"),
        ("c10d::_allgather_base_", "all_gather"),
        ("_c10d_functional::all_gather_into_tensor", "all_gather"),
        ("c10d::_reduce_scatter_base_", "reduce_scatter"),
        ("allGatherSingleImpl", "all_gather"),
        ("reduceScatterSingleImpl", "reduce_scatter"),
        ("gloo:all_reduce", "all_reduce"),
        ("nccl:all_reduce", "all_reduce"),
        ("ncclKernel_AllReduce_RING_LL_Sum_float(ncclDevComm*)", "all_reduce"),
        ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(x)", "reduce_scatter"),
        ("ncclDevKernel_Generic_4(ncclDevKernelArgsStorage<4096ul>)", None),
        ("aten::add_", None),
    ],
)
def test_collectives_are_told_by_the_names_of_all_versions(name, operation) -> None:
    assert collective(name) == operation


def test_the_command_predicts_and_says_what_one_rank_cannot_tell(folder: Path) -> None:
    printed = answered("predict", "--from-traces", folder, "--bucket-cap-mb", "100")
    assert "2 of 2 ranks" in printed
    assert "no slow rank" in printed
    (folder / "rank1.json").unlink()
    alone = answered("predict", "--from-traces", folder)
    assert "1 of 2 ranks" in alone
    assert "no slow rank: not judged" in alone


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--from-traces", "nowhere"), "no such folder"),
        (("--from-traces", "."), "no profiler trace"),
        (("--from-traces", ".", "--run-dir", "x"), "--run-dir has no effect"),
        (("--from-traces", ".", "--timeline", "x.png"), "x.png"),
        (("--from-traces", ".", "--timeline", "no/x.json"), "no folder no"),
        (("--timeline", "x.json", "--allreduce", "x"), "--from-traces only"),
    ],
)
def test_what_cannot_be_replayed_is_refused(tmp_path, monkeypatch, flags, words) -> None:
    monkeypatch.chdir(tmp_path)
    assert words in error_line(ddplab("predict", *flags))


def test_timelines_show_what_the_traces_have_and_what_changes(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    printed = answered("predict", "--from-traces", folder, "--timeline", out)
    assert "ui.perfetto.dev" in printed
    events = json.loads(out.read_text())["traceEvents"]
    process = {e["args"]["name"]: e["pid"] for e in events if e["name"] == "process_name"}
    thread = {
        e["args"]["name"]: e["tid"]
        for e in events
        if e["name"] == "thread_name"
        if e["pid"] == process["measured"]
    }
    assert {"measured", "replayed", "network × 2", "no slow rank"} <= {*process}
    measured = [e for e in events if e["ph"] == "X" and e["pid"] == process["measured"]]
    first = [e for e in measured if e["tid"] == thread["rank 0 exchange"]][:2]
    # Rank 0 comes at 10 ms, rank 1 4 ms later; the link takes the first bucket until 21 ms.
    assert [e["name"] for e in first] == ["waits for the last rank", "all_reduce"]
    assert [e["ts"] for e in first] == pytest.approx([10_001, 14_001], abs=5)
    assert first[1]["dur"] == pytest.approx(7_000, abs=5)
    html = tmp_path / "out.html"
    answered("predict", "--from-traces", folder, "--timeline", html)
    page = html.read_text()
    assert page.count("<svg") == 1
    assert [name in page for name in ("measured: 29 ms", "no slow rank", "launch cost gone: not")]


def test_traces_are_a_system_of_the_explorer(folder: Path) -> None:
    system = known_systems(traces=folder)[f"traces: {folder.name}"]()
    assert system.ranks == 2
    # A step of 29 ms: 9 of forward pass on the slower rank, 18 of backward pass, 2 of update.
    assert system.alone.forward_s == pytest.approx(0.009, rel=0.1)
    assert system.alone.update_s == pytest.approx(0.002, rel=0.05)
    assert system.start.model.simulate(((0,), (1,))).total_s == pytest.approx(0.018, rel=0.05)
    settings = first_settings(system, 1.0)
    assert "--from-traces" in predict_line(system, settings, settings).line


def test_traces_of_cpus_are_no_network_of_gpus(folder: Path) -> None:
    job = ("--model", "gpt2", "--cluster", "a100-ib", "--from-traces", folder)
    assert "all-reduces of CPUs" in error_line(ddplab("plan", *job))
