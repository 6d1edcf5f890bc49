"""What people paste: output, logs, tables and dumps in their public formats, whole and cut off."""

from __future__ import annotations

import gzip
import io
import json
import os
import pickle
import stat
import tarfile
from pathlib import Path

import job_texts as texts
import pytest
from command_line import ddplab, refused

from common.diagnose.evidence.case import Verdict
from common.diagnose.opened import open_postmortem
from common.errors import UserError
from common.traces.logs import text_lines

HOSTS = ["node1", "node1", "node2", "node2"]


def verdicts(text: str, folder: Path, name: str = "job.err") -> dict[str, Verdict]:
    """Diagnoses a text by itself."""
    path = folder / name
    path.write_text(text)
    return {v.cause: v for v in open_postmortem(path).diagnosis.verdicts}


def cut(text: str) -> str:
    """Returns the first half of a text, which then ends within a line."""
    half = text[: len(text) // 2]
    return half if not half.endswith("\n") else half[:-3]


# A hang -------------------------------------------------------------------------------------------

HANG = "\n".join(
    [
        "epoch 3 of 9",
        texts.timeout(0, 41),
        texts.progress(1, 40, 40),
        texts.timeout(2, 41),
        texts.progress(3, 41, 40),
        texts.timeout(3, 41),
    ]
)


def test_the_watchdogs_lines_name_who_waits_and_who_never_came(tmp_path: Path) -> None:
    found = verdicts(f"{texts.nccl_start(HOSTS)}\n{HANG}", tmp_path)["hang"]
    assert found.title == "rank 1 did not come to a collective"
    assert found.confidence == "high"
    waiting, behind, host = found.evidence
    assert waiting.startswith(
        "Ranks 0, 2, 3: in collective 41 of group 0, ALLREDUCE of 25 elements"
    )
    assert "(given up after 600 s) [job.err:6]" in waiting
    assert behind.startswith("Rank 1 ended collective 40 [job.err:7]")
    assert host == "Rank 1 runs on node1."


@pytest.mark.parametrize(
    "older",
    [
        "[E ProcessGroupNCCL.cpp:474] [Rank {0}] Watchdog caught collective operation timeout: "
        "WorkNCCL(SeqNum=7, OpType=BROADCAST, Timeout(ms)=1800000) ran for 1803170 milliseconds",
        "[PG ID 2 PG GUID 5(default_pg) Rank {0}] Watchdog caught collective operation timeout: "
        "WorkNCCL(SeqNum=7, OpType=BROADCAST, NumelIn=9, NumelOut=9, Timeout(ms)=60",
    ],
)
def test_lines_of_older_versions_and_half_a_line_are_read(tmp_path: Path, older: str) -> None:
    # Two ranks on one line, as a progress bar leaves them; the world is known from a variable.
    text = "WORLD_SIZE=3\n 41%|####  | 3/7 " + older.format(0) + ")" + older.format(2)
    found = verdicts(text, tmp_path)["hang"]
    assert "Ranks 0, 2: in collective 7" in found.evidence[0]
    if "PG ID" not in older:
        assert found.title == "rank 1 did not come to a collective"


def test_ranks_in_different_collectives_are_told_apart(tmp_path: Path) -> None:
    text = "\n".join([*[texts.timeout(r, 9) for r in (0, 1)], texts.timeout(2, 9, "BROADCAST", 64)])
    found = verdicts(text, tmp_path)["hang"]
    assert found.title == "rank 2 did not come to a collective"
    assert "BROADCAST of 64 elements" in found.evidence[1]
    fine = "\n".join(texts.timeout(rank, 9) for rank in (0, 1))
    assert verdicts(fine, tmp_path)["hang"].title.startswith("all ranks that are heard of")


def test_torchs_own_report_of_ranks_out_of_step_is_read(tmp_path: Path) -> None:
    text = (
        f"{texts.timeout(0, 5)}\n\t - [0] Timeout at collective: ALLREDUCE, #5"
        "\n\t - To our best knowledge, the lagging/dead/mismatched ranks that caused the desync "
        "are:"
        "\n\t   - [0] joined but didn't finish collective #5 (count from 1)"
        "\n\t     [1, 2] finished collective #4, but didn't join collective #5 (count from 1)"
    )
    found = verdicts(text, tmp_path)["hang"]
    assert found.title == "ranks 1, 2 did not come to a collective"
    assert any("did not join collective 5" in sentence for sentence in found.evidence)


def test_a_barrier_and_a_comparison_of_collectives_are_read(tmp_path: Path) -> None:
    barrier = "RuntimeError: [Rank 0]: Ranks 1, 3 failed to pass monitoredBarrier in 8000 ms"
    assert verdicts(barrier, tmp_path)["hang"].title.startswith("ranks 1, 3 did not come")
    print_ = (
        "CollectiveFingerPrint(SequenceNumber=4, OpType={}, TensorShape=[{}], TensorDtypes=Float"
    )
    detail = (
        "RuntimeError: Detected mismatch between collectives on ranks. Rank 0 is running "
        f"collective: {print_.format('ALLREDUCE', '4, 2')}), but Rank 1 is running collective: "
        f"{print_.format('BROADCAST', 8)}).Collectives differ in the following aspects: Op type"
    )
    [sentence] = verdicts(detail, tmp_path)["mismatched-collectives"].evidence
    assert "Rank 0 calls ALLREDUCE [4, 2] Float (number 4); Rank 1 calls BROADCAST [8]" in sentence


def test_stacks_show_the_rank_that_is_elsewhere(tmp_path: Path) -> None:
    # Rank 1's file has no number of a rank; its process is known from NCCL's log.
    waits = "all_reduce (torch/distributed/distributed_c10d.py:2501)"
    for rank in (0, 2):
        dump = texts.py_spy(70 + rank, rank, waits, "step (a.py:40)")
        (tmp_path / f"{rank}.txt").write_text(dump)
    dump = texts.py_spy(71, 1, "save (a.py:9)", "main (a.py:80)").replace(" --local-rank=1", "")
    (tmp_path / "third.txt").write_text(dump)
    (tmp_path / "nccl.log").write_text(texts.nccl_start(HOSTS))
    [found] = [v for v in open_postmortem(tmp_path).diagnosis.verdicts if v.cause == "stuck-stacks"]
    assert found.title == "rank 1 is not where the others wait"
    assert found.evidence[0] == "Rank 1 is in a.py:9 (save) [third.txt:1]."
    assert "waits in the exchange, called at a.py:40 (step) [0.txt:1]" in found.evidence[1]


# A failure ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "title", "parts"),
    [
        (  # a rank that was killed; the others lost their peer, and torchrun saw one of them first
            texts.traceback(0, "RuntimeError: Connection closed by peer [10.0.0.2]:4711")
            + "\n"
            + texts.summary((0, 1, ""), (1, -9, "SIGKILL"), (2, -15, "SIGTERM")),
            "rank 1 on node7 failed by itself",
            ("process 9001", "SIGKILL", "host memory"),
        ),
        (  # two hosts, whose clocks are minutes apart
            texts.traceback(
                3, "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB"
            )
            + "\n"
            + texts.summary((0, -15, "SIGTERM"))
            + texts.summary((3, 1, ""), host="node8").replace("_10:", "_09:"),
            "rank 3 on node8 failed by itself",
            ("/home/me/train.py:12 (step)", "OutOfMemoryError", "checkpointing"),
        ),
        (
            "E1127 10:00:00.1 77 torch/distributed/elastic/multiprocessing/api.py:1002] failed "
            "(exitcode: -7) local_rank: 2 (pid: 4242) of binary: /usr/bin/python3",
            "local rank 2 failed by itself",
            ("4242", "SIGBUS", "shm-size"),
        ),
    ],
)
def test_who_failed_first_is_told_from_who_followed(tmp_path, text, title, parts) -> None:
    found = verdicts(text, tmp_path)["failed-rank"]
    assert found.title == title
    assert found.confidence == "high"
    said = " ".join([*found.evidence, found.change])
    assert all(part in said for part in parts)
    assert "[job.err:" in found.evidence[0]


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (
            'Traceback (most recent call last):\n  File "/home/me/a.py", line 5, in main\n'
            "torch.distributed.DistBackendError: NCCL error in: x.cpp:13, unhandled system error\n"
            "ncclSystemError: System call failed.\nLast error:\n"
            "Error while creating shared memory segment /dev/shm/nccl-Y (size 9637888)\n",
            ("/home/me/a.py:5 (main)", "/dev/shm/nccl-Y", "--shm-size"),
        ),
        (
            "slurmstepd: error: Detected 1 oom_kill event in StepId=1.0. Some of the step tasks\n"
            "srun: error: node3: task 5: Out Of Memory\nsrun: error: node1: task 0: Killed\n",
            ("Task 5 on node3 ended by SIGKILL", "host memory"),
        ),
    ],
)
def test_what_nccl_and_slurm_say_of_a_failure_is_read(tmp_path, text, parts) -> None:
    found = verdicts(text, tmp_path)["failed-rank"]
    said = " ".join([*found.evidence, found.change])
    assert all(part in said for part in parts)
    assert "node1" not in said


def test_ranks_at_different_numbers_are_not_called_late(tmp_path: Path) -> None:
    found = verdicts(f"{texts.timeout(0, 96)}\n{texts.timeout(1, 64)}", tmp_path)["hang"]
    assert found.title == "ranks wait in different collectives"
    assert found.confidence == "medium"


def test_a_rank_that_its_watchdog_ended_is_no_first_failure(tmp_path: Path) -> None:
    text = f"{HANG}\n{texts.summary((0, -6, 'SIGABRT'), (1, -15, 'SIGTERM'))}"
    found = verdicts(text, tmp_path)
    assert list(found) == ["hang"]
    assert any("torchrun names rank 0 on node7" in sentence for sentence in found["hang"].evidence)


def test_parameters_without_a_gradient_are_named(tmp_path: Path) -> None:
    error = "RuntimeError: Expected to have finished reduction in the prior iteration before it"
    names = "Parameters which did not receive grad for rank 1: head.bias, head.weight"
    found = verdicts(f"{texts.traceback(1, error)}\n[rank1]: {names}", tmp_path)
    assert list(found) == ["unused-parameters"]
    assert found["unused-parameters"].evidence == ("Rank 1: head.bias, head.weight [job.err:7].",)


# Averages -----------------------------------------------------------------------------------------


def test_ddps_own_times_show_what_is_exposed_and_who_is_slow(tmp_path: Path) -> None:
    first = texts.ddp_runtime(0, 10**7, 2 * 10**7, 3 * 10**7, 10**7)
    second = texts.ddp_runtime(1, 10**7, 3 * 10**7, 2 * 10**7, 5 * 10**6)
    found = verdicts(f"{first}\n{second}", tmp_path)
    # Rank 1 waits least: 15 ms after 10 + 30 ms.
    assert found["exposed-communication"].lost_share == pytest.approx(15 / 55)
    assert found["slow-rank"].title == "rank 1 keeps the others waiting"
    assert found["slow-rank"].lost_share == pytest.approx(0.25)


def test_a_printed_record_shows_a_needless_search_whole_or_cut_off(tmp_path: Path) -> None:
    record = {"backend_name": "nccl", "bucket_cap_bytes": 26214400, "find_unused_parameters": 1}
    record |= {"iteration": 10, "unused_parameter_size": 0, "rank": 1, "world_size": 2, "x": "y"}
    for text in (str(record), json.dumps(record), str(record)[:-9]):
        assert "[job.err:1]" in verdicts(text, tmp_path)["needless-search"].evidence[0]


HTA = (
    "rank,idle_time(us),compute_time(us),non_compute_time(us),kernel_time(us),idle_time_pctg,"
    "compute_time_pctg,non_compute_time_pctg\n0,30,40,30,100,30.0,40.0,30.0\n1,25,40,35,100,25.0,"
    "40.0,35.0\n"
)
TIMELINE = "type,time ms,percent\ncomputation_time,60,60.0\nexposed_comm_time,35,35.0\n"
STRAGGLERS = (
    "rank,total_wait_time_us,mean_wait_time_us,times_arrived_last,times_arrived_first\n"
    "0,900,9,2,90\n1,10,0.1,97,3\n2,800,8,1,7\n"
)
COLLECTIVES = (
    "Collective name,dtype,In msg nelems,comm_latency_mean,comm_latency_std,"
    "skew in start time_mean,count\nallreduce,BFloat16,1024,200.0,3.0,5000.0,40\n"
)


@pytest.mark.parametrize(
    ("table", "cause", "part"),
    [
        (HTA, "exposed-communication", "At least 30 % of the time of each of 2 ranks"),
        (HTA, "idle-device", "at least 25 %"),
        (TIMELINE, "exposed-communication", "At least 35 %"),
        (STRAGGLERS, "slow-rank", "Rank 1 came last to 97 of 100 collectives"),
        (COLLECTIVES, "late-arrivals", "5 ms after the first, the exchange itself takes 0.2 ms"),
    ],
)
def test_tables_of_other_tools_are_judged(tmp_path: Path, table, cause, part) -> None:
    found = verdicts(table, tmp_path, "table.csv")[cause]
    assert part in found.evidence[0]
    assert "[table.csv:" in found.evidence[0]
    header, first, *_ = table.splitlines()
    if cause != "slow-rank":  # which needs two ranks
        broken = f"{header}\n{first}\n1,25" if table != TIMELINE else f"{table}idle_ti"
        assert cause in verdicts(broken, tmp_path, "table.csv")


# NCCL's log and nvidia-smi ------------------------------------------------------------------------


@pytest.mark.parametrize("wrapped", ["{}", "net.cc:9 {}"])  # before and since 2.18
def test_a_device_that_could_not_be_opened_is_not_no_infiniband(tmp_path: Path, wrapped) -> None:
    refusal = texts.nccl("node1", 0, "NET/IB : Unable to open device mlx5_0", "WARN")
    lines = [
        texts.nccl_start(HOSTS),
        refusal.replace("NCCL WARN", wrapped.format("NCCL WARN")),
        texts.nccl("node1", 0, "NET/IB : No device found."),
        texts.nccl("node1", 1, "Channel 00/0 : 1[1] -> 2[2] [send] via NET/Socket/0"),
    ]
    found = verdicts("\n".join(lines), tmp_path)
    assert list(found) == ["nccl-container"]
    assert "mlx5_0 is there and could not be opened on node1" in found["nccl-container"].evidence[0]
    del lines[1]
    found = verdicts("\n".join(lines), tmp_path)
    assert list(found) == ["nccl-connections"]
    assert "NCCL found no InfiniBand [job.err:5]" in found["nccl-connections"].evidence[0]


@pytest.mark.parametrize(
    ("warning", "cause", "change"),
    [
        ("Error: failed to extend /dev/shm/nccl-a to 9 bytes", "nccl-container", "shm-size"),
        (
            "Call to ibv_reg_mr failed with error Cannot allocate memory",
            "nccl-container",
            "memlock",
        ),
        (
            "NET/IB : Got completion from peer 10.0.0.2<1> with status=12 opcode=0",
            "nccl-errors",
            "GID",
        ),
        (
            "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 7000",
            "nccl-errors",
            "LOCAL",
        ),
        ("Call to ibv_open_device failed", "nccl-container", "/dev/infiniband"),
        ("something that nobody knows", "nccl-connections", "look the warning up"),
    ],
)
def test_a_warning_is_given_its_meaning(tmp_path: Path, warning, cause, change) -> None:
    found = verdicts(texts.nccl("node1", 0, warning, "WARN"), tmp_path)
    assert list(found) == [cause]
    assert change in found[cause].change
    assert "1 time on node1" in found[cause].evidence[0]


NVLINK = ("X NV12 SYS SYS SYS", "NV12 X SYS SYS SYS", "SYS SYS X NV12 PIX", "SYS SYS NV12 X PIX")
PCIE = tuple(row.replace("NV12", "PHB") for row in NVLINK)


@pytest.mark.parametrize(("rows", "level"), [(NVLINK, "high"), (PCIE, "low")])
def test_what_the_machine_is_and_what_is_kept_from_a_job_are_told_apart(tmp_path, rows, level):
    (tmp_path / "topo.txt").write_text(texts.topology([*rows, "SYS SYS PIX PIX X"], nics=1))
    lines = [texts.nccl_start(["a"] * 4)]
    lines.append(texts.nccl("a", 0, "Channel 00 : 0[0] -> 1[1] via SHM/direct/direct"))
    (tmp_path / "nccl.log").write_text("\n".join(lines))
    found = {v.cause: v for v in open_postmortem(tmp_path).diagnosis.verdicts}
    assert found["nccl-connections"].confidence == level
    is_linked = "though NVLink connects them (NV12)" in found["nccl-connections"].evidence[0]
    assert is_linked == (level == "high")
    far = 4 if is_linked else 6
    assert found["gpu-links"].evidence[0].startswith(f"{far} of 6 pairs of GPUs")
    assert found["gpu-links"].evidence[1].startswith("GPU0, GPU1: every network adapter")


def test_a_log_without_connections_is_not_judged_healthy(tmp_path: Path) -> None:
    (tmp_path / "nccl.log").write_text(texts.nccl("a", 0, "NCCL_SOCKET_IFNAME set to eth0"))
    (tmp_path / "topo.txt").write_text(texts.topology(["X NV4", "NV4 X"]))
    opened = open_postmortem(tmp_path)
    assert "nccl-connections" in {cause for cause, _ in opened.diagnosis.not_judged}
    assert "among the few that can be judged here" in "\n".join(opened.lines())
    assert "names no ranks" in opened.diagnosis.summary
    opened.write()
    assert json.loads((tmp_path / "diagnosis.json").read_text())["healthy"] is False


def test_the_state_of_gpus_is_read_whole_and_as_an_excerpt(tmp_path: Path) -> None:
    said = " ".join(verdicts(texts.QUERY, tmp_path)["gpu-surroundings"].evidence)
    parts = ("HW Thermal Slowdown", "8 of 16 lanes", "3 memory errors", "300 W, below the 400 W")
    assert all(part in said for part in parts)
    assert "65:00.0" not in said
    assert "9 memory errors" not in said
    part = texts.QUERY[texts.QUERY.index("    Clocks Event") : texts.QUERY.index("    ECC")]
    assert "GPU not said" in verdicts(part, tmp_path)["gpu-surroundings"].evidence[0]
    hot = texts.dmon([1410, 1000], heat=1)
    said = " ".join(verdicts(hot, tmp_path)["gpu-surroundings"].evidence)
    assert "GPU 1 runs at 1000 MHz while it is busy, the others at 1410 MHz" in said
    assert "GPU 0: clocks are lowered for want of heat" in said
    assert "gpu-surroundings" not in verdicts(texts.dmon([1410, 1400]), tmp_path)


# Whatever is in a folder --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        (f"{HANG}\n{HANG}", "hang"),
        (texts.traceback(1, "KeyError: 'labels'") * 2, "failed-rank"),
        (texts.QUERY, "gpu-surroundings"),
        (texts.dmon([1410, 1000], rows=9), "gpu-surroundings"),
        (texts.topology(["X SYS PHB", "SYS X SYS", "PHB SYS X"]), "gpu-links"),
        (texts.py_spy(1, 0, "sleep (a.py:9)") * 2, "stuck-stacks"),
    ],
)
def test_a_text_that_breaks_off_is_read_until_there(tmp_path: Path, text: str, cause: str) -> None:
    assert cause in verdicts(cut(text), tmp_path)


@pytest.mark.parametrize(
    "written",
    [
        lambda text: text.encode("utf-16"),
        lambda text: text.encode("utf-16-le"),
        lambda text: text.replace("\n", "\r\n").encode("utf-8-sig"),
        lambda text: "".join(f"\x1b[31m{line}\x1b[0m\n" for line in text.splitlines()).encode(),
        lambda text: "".join(f"[default3]:{line}\n" for line in text.splitlines()).encode(),
        lambda text: gzip.compress(text.encode()),
        lambda text: gzip.compress((text + "\n" + "x" * 9).encode())[:-12],
        lambda text: text.encode().replace(b"epoch", b"\xff\xfepoch"[1:]),
    ],
)
def test_a_log_is_read_however_it_was_written(tmp_path: Path, written) -> None:
    (tmp_path / "job.err").write_bytes(written(HANG))
    [found] = open_postmortem(tmp_path).diagnosis.verdicts
    assert found.title == "rank 1 did not come to a collective"
    assert "[job.err:2]" in found.evidence[0]


def test_of_a_large_log_beginning_and_end_are_read(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(text_lines, "MOST_BYTES", 8000)
    filling = "\n".join(f"step {i} loss 0.5" for i in range(2000))
    parts = (texts.progress(1, 40, 40), filling, texts.timeout(0, 41))
    (tmp_path / "job.err").write_text("\n".join(parts))
    opened = open_postmortem(tmp_path)
    waiting, behind = opened.diagnosis.verdicts[0].evidence
    assert "[job.err, near its end]" in waiting
    assert "[job.err:1]" in behind
    assert opened.job.notes == ("job.err: 0 MiB between beginning and end",)


def bad_files(folder: Path) -> None:
    """Writes what nobody can read, or must not."""

    class Trap:
        def __reduce__(self):
            return os.mkdir, (str(folder / "trapped"),)

    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        archive.add(__file__, "code.py")
    (folder / "logs.tar.gz").write_bytes(packed.getvalue())
    (folder / "junk.gz").write_bytes(b"\x1f\x8b" + bytes(range(256)))
    (folder / "nccl_trace_rank_0").write_bytes(pickle.dumps({"pg_config": Trap()}))
    (folder / "deep.json").write_text('{"traceEvents":' + "[" * 100_000)
    (folder / "foreign.json").write_text('{"traceEvents":[{"cat":"kernel","dur":"long"}]}')
    (folder / "weights.pt").write_bytes(b"PK\x03\x04" + bytes(64))
    (folder / "state.bin").write_bytes(bytes(range(256)))
    (folder / "loss.txt").write_text("loss 0.1\n")
    (folder / "empty.log").write_text("")
    os.mkfifo(folder / "pipe")
    (folder / "zero").symlink_to("/dev/zero")


LOOKS_LIKE = {
    "logs.tar.gz": "tar archive",
    "junk.gz": "gzip that cannot be unpacked",
    "nccl_trace_rank_0": "mkdir",
    "deep.json": "nested too deep",
    "foreign.json": "not a trace of torch.profiler",
    "weights.pt": "weights that torch.save wrote",
    "state.bin": "binary",
    "loss.txt": "text: loss 0.1",
    "empty.log": "empty",
    "pipe": "a pipe",
    "zero": "a device",
}


def test_a_folder_with_a_jobs_whole_output_is_read_by_one_command(tmp_path: Path) -> None:
    bad_files(tmp_path)
    attempt = tmp_path / "logs" / "attempt_0" / "1"
    attempt.mkdir(parents=True)
    frames = 'Traceback (most recent call last):\n  File "train.py", line 3, in load\n'
    (attempt / "stderr.log").write_text(f"{frames}KeyError: 'labels'\n")
    (tmp_path / "slurm-42.out").write_text(texts.summary((0, 1, ""), (1, 1, "")))
    (tmp_path / "topo.txt").write_text(texts.topology(["X SYS", "SYS X"]))
    (tmp_path / "smi.txt").write_text(texts.QUERY)
    (tmp_path / "hta.csv").write_text(HTA)
    done = ddplab("diagnose", "--read", tmp_path)
    assert done.status == 0, done.stderr
    assert not (tmp_path / "trapped").exists()
    assert "1. rank 1 on node7 failed by itself (failed-rank)" in done.stdout
    assert "Rank 1 raised KeyError: 'labels' at train.py:3" in done.stdout
    result = json.loads((tmp_path / "diagnosis.json").read_text())
    causes = {found["cause"] for found in result["verdicts"]}
    assert {"failed-rank", "gpu-links", "gpu-surroundings", "idle-device"} <= causes
    notes = {note.partition(": ")[0]: note for note in result["notes"]}
    assert notes.keys() == LOOKS_LIKE.keys()
    assert all(looks in notes[name] for name, looks in LOOKS_LIKE.items())


def test_a_folder_of_nothing_that_can_be_read_is_a_mistake(tmp_path: Path) -> None:
    bad_files(tmp_path)
    assert "nothing that can be read (empty.log: empty; " in refused("diagnose", "--read", tmp_path)
    assert not (tmp_path / "trapped").exists()
    assert not (tmp_path / "diagnosis.json").exists()


def test_a_device_a_pipe_and_an_input_that_is_one_are_refused(tmp_path: Path, monkeypatch) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in ("/dev/zero", tmp_path / "pipe"):
        assert "a device or a pipe" in refused("diagnose", "--read", path)
    with open("/dev/zero") as zero, monkeypatch.context() as patched:
        patched.setattr("sys.stdin", zero)
        with pytest.raises(UserError, match="the standard input is a device"):
            open_postmortem("-")


def test_files_and_what_is_piped_in_are_read_together(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "a.err").write_text(texts.timeout(0, 41))
    (tmp_path / "b.err").write_text(texts.progress(1, 40, 40))
    with (tmp_path / "b.err").open() as piped, monkeypatch.context() as patched:
        patched.setattr("sys.stdin", piped)
        opened = open_postmortem(tmp_path / "a.err", "-")
    assert "[standard input:1]" in opened.diagnosis.verdicts[0].evidence[1]
    assert opened.write() is None
    for words in (("a.err", "b.err"), ("a.err", "--read", "b.err")):
        named = [word if word == "--read" else tmp_path / word for word in words]
        done = ddplab("diagnose", "--read", *named)
        assert "Rank 1 ended collective 40 [b.err:1]" in done.stdout, done.stderr
    assert stat.S_ISREG((tmp_path / "a.err").stat().st_mode)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.err", "b.err"]


def test_two_jobs_in_one_log_are_noted_and_one_is_judged(tmp_path: Path) -> None:
    first = [texts.nccl_start(["a", "a"]), texts.nccl("a", 0, "Channel 0 : 0[0] -> 1[1] via SHM")]
    other = texts.nccl_start(["b", "c", "d"][:2], job="0xdef")
    (tmp_path / "nccl.log").write_text("\n".join([*first, other]))
    opened = open_postmortem(tmp_path)
    assert "such as ranks 0 and 1 of a" in opened.diagnosis.verdicts[0].evidence[0]
    assert "the job was begun again, or there are two" in opened.job.notes[0]
