"""What a job left behind: real flight recorders; dumps, traces and logs of known content."""

from __future__ import annotations

import gzip
import json
import os
import pickle
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path

import pytest
from command_line import ddplab, refused

from common.diagnose.evidence.case import Verdict
from common.diagnose.opened import open_postmortem

STEP_US = 100_000
HERE = Path(__file__).parent


def verdicts(folder: Path) -> dict[str, Verdict]:
    return {verdict.cause: verdict for verdict in open_postmortem(folder).diagnosis.verdicts}


def verdict(folder: Path, cause: str) -> Verdict:
    return verdicts(folder)[cause]


def not_judged(folder: Path) -> set[str]:
    return {cause for cause, _ in open_postmortem(folder).diagnosis.not_judged}


# Flight recorders ---------------------------------------------------------------------------------


def test_the_rank_that_never_came_is_found_in_real_dumps(rank_server, tmp_path: Path) -> None:
    script = HERE / "hanging_ranks.py"
    variables = {"TORCH_FR_BUFFER_SIZE": "2000"}
    done = rank_server.run(script, tmp_path, ranks=2, variables=variables)
    assert done.exit_codes == [0, 0], done.stderr
    found = verdict(tmp_path, "hang")
    assert found.title == "rank 1 did not come to a collective"
    assert found.confidence == "high"
    waiting, behind = found.evidence
    assert waiting.startswith("Rank 0: in collective 4 of group 0")
    assert "[7, 11]" in waiting
    assert behind.startswith("Rank 1 ended collective 3")


def entry(number: int, name: str = "nccl:all_reduce", state: str = "completed", size: int = 8):
    frames = [
        {"name": "all_reduce", "filename": "/x/site-packages/torch/distributed/c.py", "line": 3},
        {"name": "step", "filename": "/home/me/train.py", "line": 40 + number},
    ]
    return {
        "process_group": ("0", "default_pg"),
        "collective_seq_id": number,
        "profiling_name": name,
        "input_sizes": [[size]],
        "state": state,
        "is_p2p": False,
        "frames": frames,
    }


def dump(folder: Path, rank: int, *entries: dict, ranks: int = 2, as_json: bool = False) -> None:
    members = str(list(range(ranks)))
    content = {
        "version": "2.10",
        "pg_config": {"0": {"desc": "default_pg", "ranks": members}},
        "entries": list(entries),
    }
    octets = json.dumps(content).encode() if as_json else pickle.dumps(content)
    (folder / f"nccl_trace_rank_{rank}").write_bytes(octets)


@pytest.mark.parametrize("as_json", [False, True])
def test_where_the_others_wait_is_said_with_the_line_of_the_script(tmp_path, as_json) -> None:
    started = entry(6, state="started")
    for rank in (0, 2):
        dump(tmp_path, rank, entry(5), started, ranks=3, as_json=as_json)
    dump(tmp_path, 1, entry(4), entry(5), ranks=3, as_json=as_json)
    waiting, behind = verdict(tmp_path, "hang").evidence
    assert waiting.startswith("Ranks 0, 2: in collective 6 of group 0, nccl:all_reduce [8]")
    assert "/home/me/train.py:46 (step)" in waiting
    assert behind.startswith("Rank 1 ended collective 5")


def test_ranks_that_call_different_things_are_told_apart(tmp_path: Path) -> None:
    for rank in (0, 1):
        dump(tmp_path, rank, entry(9, state="started"), ranks=3)
    dump(tmp_path, 2, entry(9, "nccl:broadcast", "started", 64), ranks=3)
    found = verdict(tmp_path, "hang")
    assert found.title == "rank 2 did not come to a collective"
    assert "Rank 2 called something else: nccl:broadcast [64]" in found.evidence[1]


def test_the_rank_is_the_last_number_of_a_dumps_name(tmp_path: Path) -> None:
    dump(tmp_path, 0, entry(1), entry(2, state="started"))
    dump(tmp_path, 1, entry(1))
    for path in list(tmp_path.iterdir()):
        path.rename(path.with_name(f"job.1234.{path.name}"))
    assert verdict(tmp_path, "hang").title == "rank 1 did not come to a collective"


def test_a_rank_without_a_dump_is_suspected(tmp_path: Path) -> None:
    dump(tmp_path, 0, entry(1), entry(2, state="scheduled"))
    found = verdict(tmp_path, "hang")
    assert found.title == "rank 1 did not come to a collective"
    assert found.confidence == "medium"
    assert found.evidence[-1].startswith("Rank 1: no dump")


def test_all_ranks_in_one_collective_is_the_network_or_a_device(tmp_path: Path) -> None:
    for rank in (0, 1):
        dump(tmp_path, rank, entry(1), entry(2, state="started"))
    assert verdict(tmp_path, "hang").title == "all ranks that are heard of hang in one collective"


def test_ranks_that_ended_everything_do_not_hang(tmp_path: Path) -> None:
    # The recorder keeps the last calls only, and rank 1 was read out a call later.
    dump(tmp_path, 0, entry(1), entry(2), entry(3))
    dump(tmp_path, 1, entry(2), entry(3))
    assert not verdicts(tmp_path)


def test_a_dump_with_code_in_it_is_not_run(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "trapped"),)

    content = {"pg_config": {}, "version": "2.4", "entries": [Trap()]}
    (tmp_path / "nccl_trace_rank_0").write_bytes(pickle.dumps(content))
    dump(tmp_path, 1, entry(1))
    found = open_postmortem(tmp_path)
    assert not (tmp_path / "trapped").exists()
    assert "mkdir" in found.job.notes[0]


# Traces -------------------------------------------------------------------------------------------


OPERATIONS = {
    "compute": ("gemm", "aten::mm", ""),
    "reduce": ("ncclDevKernel_AllReduce", "gloo:all_reduce", ""),
    "gather": (
        "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage)",
        "gloo:all_gather",
        "c10d::_allgather_base_",
    ),
    "scatter": (
        "ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(nccl)",
        "gloo:all_reduce",
        "c10d::_reduce_scatter_base_",
    ),
}
"""What a step does: the kernel's name, what gloo or a CPU calls it, and the call it comes from."""


def write_trace(
    path: Path, rank: int, parts: Sequence[tuple[str, int, int]], steps: int, gpu: bool, **ranks
) -> Path:
    """Writes a trace of which each step has parts: (operation, its start and length in µs)."""
    records = []
    for step, index in product(range(steps), range(len(parts))):
        (what, start, length), at = parts[index], step * STEP_US
        kernel, name, call = OPERATIONS[what]
        number = len(parts) * step + index + 1
        if index == 0:
            records.append(span("user_annotation", f"ProfilerStep#{step}", at, STEP_US, 1))
        if gpu:
            launch = span("cuda_runtime", "cudaLaunchKernel", at + 1 + index, 1, 1)
            ran = span("kernel", kernel, at + start, length, 7 if what == "compute" else 9)
            records += [each | {"args": {"correlation": number}} for each in (launch, ran)]
        elif what == "compute":
            records.append(span("cpu_op", name, at + start, length, 1))
        else:
            records += [span("cpu_op", call, at + start, 1, 1)] * bool(call)
            records.append(span("user_annotation", name, at + start, length, 5))
    heading = {"schemaVersion": 1, "distributedInfo": {"backend": "nccl", "rank": rank} | ranks}
    path.write_bytes(gzip.compress(json.dumps(heading | {"traceEvents": records}).encode()))
    return path


def trace(
    folder: Path, rank: int, compute_us: int, reduce_us: int, *, steps: int = 12, gpu=True, **ranks
) -> Path:
    """Writes a trace whose steps compute, then communicate, and are idle for the rest."""
    path = folder / f"worker{7 - rank}.pt.trace.json.gz"  # the name does not tell the rank
    parts = [("compute", 0, compute_us), ("reduce", compute_us, reduce_us)]
    return write_trace(path, rank, parts, steps + 1, gpu, **ranks)


def traces(folder: Path, *passes_us: tuple[int, int], **options) -> list[Path]:
    """Writes a trace of each rank, which computes and communicates for so many µs."""
    return [trace(folder, rank, *passes, **options) for rank, passes in enumerate(passes_us)]


SLOW_SECOND = ((40_000, 60_000), (90_000, 10_000))
"""Passes of two ranks, of which the second keeps the other waiting."""


def span(category: str, name: str, start: int, length: int, thread: int) -> dict:
    place = {"ph": "X", "pid": 1, "tid": thread, "cat": category, "name": name, "args": {}}
    return place | {"ts": start, "dur": length}


def test_the_rank_that_communicates_least_keeps_the_others_waiting(tmp_path: Path) -> None:
    traces(tmp_path, *SLOW_SECOND)
    [found] = verdicts(tmp_path).values()  # a tenth of communication is not much
    assert (found.cause, found.title) == ("slow-rank", "rank 1 keeps the others waiting")
    assert found.lost_share == pytest.approx(0.5)
    assert "2.25 times as long" in found.evidence[0]
    assert found.evidence[1].startswith("It is computation: 50 ms more")
    assert found.confidence == "high"
    traces(tmp_path, (40_000, 60_000), (40_000, 10_000))
    assert verdict(tmp_path, "slow-rank").evidence[1].startswith("It is idle: 50 ms more")


@pytest.mark.parametrize("gpu", [True, False])
def test_exposed_communication_is_that_of_the_rank_that_waits_for_nobody(tmp_path, gpu) -> None:
    traces(tmp_path, (50_000, 50_000), (60_000, 40_000), gpu=gpu)
    found = verdict(tmp_path, "exposed-communication")
    assert found.lost_share == pytest.approx(0.4, rel=0.05)


def test_idle_time_counts_on_a_gpu_only(tmp_path: Path) -> None:
    for gpu in (True, False):
        folder = tmp_path / str(gpu)
        folder.mkdir()
        traces(folder, (50_000, 5_000), (50_000, 5_000), gpu=gpu)
    assert verdict(tmp_path / "True", "idle-device").lost_share == pytest.approx(0.45, rel=0.05)
    assert "idle-device" in not_judged(tmp_path / "False")


def test_one_ranks_trace_has_no_other_to_compare_with(tmp_path: Path) -> None:
    trace(tmp_path, 0, compute_us=95_000, reduce_us=5_000)
    assert {"slow-rank", "hang", "nccl-connections"} <= not_judged(tmp_path)
    assert not verdicts(tmp_path)


def test_a_trace_that_names_its_process_groups_is_no_dump(tmp_path: Path) -> None:
    for rank, packed in enumerate(traces(tmp_path, *SLOW_SECOND)):
        content = json.loads(gzip.decompress(packed.read_bytes()))
        group = {"pg_name": "0", "pg_desc": "default_pg", "ranks": [0, 1]}
        content["distributedInfo"] |= {"world_size": 2, "pg_count": 1, "pg_config": [group]}
        (tmp_path / f"node1_47{rank}.1764.pt.trace.json").write_text(json.dumps(content))
        packed.unlink()
    assert verdict(tmp_path, "slow-rank").title == "rank 1 keeps the others waiting"
    assert "hang" in not_judged(tmp_path)


def test_a_rank_may_have_a_trace_for_each_cycle_of_its_schedule(tmp_path: Path) -> None:
    for rank, packed in enumerate(traces(tmp_path, *SLOW_SECOND)):
        text = gzip.decompress(packed.read_bytes()).decode()
        for step in reversed(range(10)):  # the second cycle's steps have later numbers
            text = text.replace(f'ProfilerStep#{step}"', f'ProfilerStep#{step + 20}"')
        (tmp_path / f"later-{rank}.pt.trace.json").write_text(text)
    assert verdict(tmp_path, "slow-rank").title == "rank 1 keeps the others waiting"


def test_ranks_that_left_no_trace_are_named(tmp_path: Path) -> None:
    for rank in (0, 2):
        trace(tmp_path, rank, compute_us=95_000, reduce_us=5_000, world_size=4)
    assert open_postmortem(tmp_path).job.notes == ("profiler traces: ranks 1, 3 of 4 left none",)


def test_ranks_without_a_step_in_common_are_not_compared(tmp_path: Path) -> None:
    _, packed = traces(tmp_path, *SLOW_SECOND)
    text = gzip.decompress(packed.read_bytes()).decode()
    packed.write_bytes(gzip.compress(text.replace("ProfilerStep#", "ProfilerStep#9").encode()))
    assert "slow-rank" in not_judged(tmp_path)


@pytest.mark.parametrize("packed", [True, False])
def test_of_a_trace_that_breaks_off_the_steps_before_are_judged(tmp_path: Path, packed) -> None:
    path, _ = traces(tmp_path, *SLOW_SECOND, steps=200, gpu=False)
    octets = path.read_bytes() if packed else gzip.decompress(path.read_bytes())
    if not packed:
        path.unlink()
        path = path.with_suffix("")
    path.write_bytes(octets[: len(octets) * 3 // 4])
    opened = open_postmortem(tmp_path)
    [found] = [v for v in opened.diagnosis.verdicts if v.cause == "slow-rank"]
    assert found.title == "rank 1 keeps the others waiting"
    assert "50 ms more" in found.evidence[1]  # as in the whole trace
    [note] = opened.job.notes
    assert note.startswith(f"{path.name}: a trace of torch.profiler that breaks off after")
    assert int(note.split(";")[1].split()[0]) == pytest.approx(150, abs=25)


def test_of_a_gpus_trace_that_breaks_off_nothing_is_judged(tmp_path: Path) -> None:
    _, path = traces(tmp_path, (40_000, 60_000), (40_000, 60_000), steps=100)
    path.write_bytes(path.read_bytes()[:-200])
    opened = open_postmortem(tmp_path)
    assert set(opened.job.steps["rank"]) == {0}
    assert "breaks off" in opened.job.notes[0]
    assert "what the device did, which is in no order of time" in opened.job.notes[0]


def test_clocks_that_differ_by_minutes_do_not_matter(tmp_path: Path) -> None:
    for rank, path in enumerate(traces(tmp_path, *SLOW_SECOND)):
        content = json.loads(gzip.decompress(path.read_bytes()))
        for record in content["traceEvents"]:
            record["ts"] += rank * 300e6
        path.write_bytes(gzip.compress(json.dumps(content).encode()))
    assert verdict(tmp_path, "slow-rank").lost_share == pytest.approx(0.5)


def test_two_jobs_are_told_apart_by_folders_or_not_joined(tmp_path: Path) -> None:
    small, large = tmp_path / "small", tmp_path / "large"
    for folder, ranks in ((small, 2), (large, 3)):
        folder.mkdir()
        for rank in range(ranks):
            compute_us = 90_000 if (folder, rank) == (large, 2) else 40_000
            trace(folder, rank, compute_us=compute_us, reduce_us=100_000 - compute_us)
            dump(folder, rank, entry(1), entry(2, state="started"), ranks=ranks)
    opened = open_postmortem(tmp_path)
    found = {v.cause: v for v in opened.diagnosis.verdicts}
    assert found["slow-rank"].title == "rank 2 keeps the others waiting"
    assert found["hang"].evidence[0].startswith("Ranks 0, 1, 2: in collective 2")
    assert len(opened.job.notes) == 4
    assert all(note.startswith("small") for note in opened.job.notes)
    for rank in (0, 1):  # within one folder nothing tells which belong together
        packed = f"worker{7 - rank}.pt.trace.json.gz"
        (small / packed).rename(large / f"worker1{7 - rank}.pt.trace.json.gz")
    opened = open_postmortem(large)
    assert [v.cause for v in opened.diagnosis.verdicts] == ["hang"]
    assert len(opened.job.notes) == 5


# NCCL's log ---------------------------------------------------------------------------------------


def log(folder: Path, hosts: list[str], *lines: str) -> None:
    known = [
        f"{host}:71:71 [0] NCCL INFO ncclCommInitRank comm 0x1 rank {rank} nranks {len(hosts)} "
        "cudaDev 0 nvmlDev 0 busId 1000 - Init START"
        for rank, host in enumerate(hosts)
    ]
    text = "\n".join(["epoch 1 of 3", *known, *(f"{hosts[0]}:71:90 [0] {line}" for line in lines)])
    (folder / "job.out").write_text(text + "\n")


def connected(first: int, second: int, transport: str) -> str:
    return f"NCCL INFO Channel 00/0 : {first}[0] -> {second}[1] [send] via {transport}"


def test_gpus_of_one_host_that_do_not_copy_directly_are_named(tmp_path: Path) -> None:
    lines = [connected(0, 1, "SHM/direct/direct"), connected(1, 0, "SHM/direct/direct")]
    log(tmp_path, ["a", "a"], *lines)
    [sentence] = verdict(tmp_path, "nccl-connections").evidence
    assert sentence.startswith("1 pair of GPUs of one host exchange through host memory")


def test_sockets_between_hosts_and_warnings_are_named(tmp_path: Path) -> None:
    lines = [
        "NCCL INFO NET/IB : No device found.",
        "NCCL INFO Using network Socket",
        connected(1, 2, "NET/Socket/0"),
        connected(0, 1, "P2P/CUMEM"),
        "socket.cc:1 NCCL WARN Call to connect returned Connection refused",
    ]
    log(tmp_path, ["a", "a", "b", "b"], *lines)
    found = verdict(tmp_path, "nccl-connections")
    assert "NCCL found no InfiniBand" in found.evidence[0]
    assert len(found.evidence) == 1
    assert "Connection refused" in verdict(tmp_path, "nccl-errors").evidence[0]


def test_ranks_of_a_part_of_the_job_are_not_taken_for_the_jobs(tmp_path: Path) -> None:
    # Two hosts of two GPUs each. Ranks 0 and 2 of the job, of different hosts, are 0 and 1 of a
    # smaller communicator, and their lines begin as torchrun's --tee writes them.
    def line(host: str, process: int, text: str) -> str:
        return f"[default{process}]:{host}:{process}:9 [0] {text}"

    def began(rank: int, ranks: int) -> str:
        return (
            f"NCCL INFO ncclCommInitRank comm 0x1 rank {rank} nranks {ranks} cudaDev 0 - Init START"
        )

    places = [("a", 70), ("a", 71), ("b", 70), ("b", 71)]
    lines = [line(*place, began(rank, 4)) for rank, place in enumerate(places)]
    lines += [
        line("a", 70, connected(0, 1, "P2P/CUMEM")),
        line("a", 71, connected(1, 2, "NET/IB/0")),
    ]
    lines += [line("a", 70, began(0, 2)), line("b", 70, began(1, 2))]
    lines += [line("a", 70, connected(0, 1, "NET/IB/0"))]
    (tmp_path / "job.out").write_text("\n".join(lines))
    assert not verdicts(tmp_path)


def test_good_connections_are_no_cause(tmp_path: Path) -> None:
    log(tmp_path, ["a", "a"], connected(0, 1, "P2P/CUMEM"))
    assert not verdicts(tmp_path)


# The command --------------------------------------------------------------------------------------


def test_the_command_prints_it_and_writes_json(tmp_path: Path) -> None:
    traces(tmp_path, *SLOW_SECOND)
    (tmp_path / "broken.json").write_text("{")
    done = ddplab("diagnose", "--traces", tmp_path)
    assert done.status == 0, done.stderr
    assert "1. rank 1 keeps the others waiting (slow-rank; takes 50 % of the time)" in done.stdout
    assert "broken.json: JSON that is not a trace" in done.stdout
    written = json.loads((tmp_path / "diagnosis.json").read_text())
    assert written["verdicts"][0]["cause"] == "slow-rank"
    # Its own result is no trace.
    assert ddplab("diagnose", "--traces", tmp_path).stdout == done.stdout


@pytest.mark.parametrize(
    ("make", "words", "said"),
    [
        (lambda f: None, ("missing",), "no such file or folder"),
        (lambda f: None, (".",), "no file in it; what is read: profiler traces"),
        (lambda f: (f / "a.json").write_text("[]"), (".",), "not a trace of torch.profiler"),
        (
            lambda f: (f / "a.json.gz").write_bytes(gzip.compress(b"{}" * 9)[:-9]),
            (".",),
            "not a trace of torch.profiler",
        ),
        (lambda f: None, (".", "train.py"), "--traces runs nothing; leave out train.py"),
    ],
)
def test_a_mistake_is_refused_in_a_line(tmp_path: Path, make: Callable, words, said: str) -> None:
    make(tmp_path)
    folder, *program = words
    assert said in refused("diagnose", "--traces", tmp_path / folder, *program)
    assert not (tmp_path / "diagnosis.json").exists()
