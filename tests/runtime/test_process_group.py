"""The process group: joined by one process or two real ranks, and left whatever happens."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
import torch.distributed as dist
from interruptible import living
from rank_support import torchrun_variables

from common.errors import RunFailed, UserError
from common.runtime.group.nccl import loaded_version
from common.runtime.group.process_group import (
    Worker,
    _choose_device,
    _rendezvous,
    find_shared_device,
    is_lost_peer,
    process_group,
)
from common.runtime.processes.ranks import Ranks, current_ranks, free_port

PRETENDED = Path(__file__).with_name("pretended_gpus_worker.py")
ALONE = Path(__file__).with_name("one_rank_group_worker.py")
SLOW_HOST = """
import time
from common.runtime.group.process_group import process_group

with process_group("cpu", timeout_s=1) as worker:
    time.sleep(2.5 * worker.rank)
    print(worker.gather(worker.rank), worker.broadcast("from 0"))
"""

PROBE = """
import json, os, pathlib, sys, time
import torch
import torch.distributed as dist
from common.errors import UserError
from common.runtime.machine.environment import describe_environment
from common.runtime.group.process_group import process_group

folder = pathlib.Path(sys.argv[1])
with process_group("cpu") as worker:
    total = torch.full((3,), float(worker.rank + 1))
    dist.all_reduce(total)
    gathered = worker.gather({"rank": worker.rank, "pid": os.getpid()})
    mistake = ""
    try:
        with worker.mistakes_shared():
            if worker.rank == 1:
                raise UserError("rank 1 has no such folder")
    except UserError as error:
        mistake = str(error)
    told = worker.broadcast(["from", worker.rank])
    if worker.rank == 1:
        time.sleep(0.3)
        (folder / "late").touch()
    worker.barrier()
    said = {
        "world": [worker.rank, worker.world_size, worker.is_main, worker.backend],
        "total": total.tolist(),
        "gathered_ranks": [item["rank"] for item in gathered],
        "processes": len({item["pid"] for item in gathered}),
        "told": told,
        "mistake": mistake,
        "saw_the_late_rank": (folder / "late").exists(),
        "environment": describe_environment(worker.backend, "cpu", worker.world_size),
    }
print(json.dumps(said | {"left": not dist.is_initialized()}))
"""


def slurm_variables(rank: int, port: int) -> dict[str, str]:
    """Returns what srun sets for one of two tasks on this machine; the job decides the port."""
    return {
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank),
        "SLURM_NTASKS": "2",
        "SLURM_NODEID": "0",
        "SLURM_TASKS_PER_NODE": "2",
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_JOB_ID": str(port),
        "SLURM_STEP_ID": "0",
    }


@pytest.fixture(scope="module", params=["torchrun", "slurm"])
def joined(request, rank_server, tmp_path_factory) -> tuple[str, list[dict]]:
    """Returns whose variables started two ranks, and what each of them said."""
    folder = tmp_path_factory.mktemp("joined")
    (folder / "probe.py").write_text(PROBE)
    variables = slurm_variables if request.param == "slurm" else None
    done = rank_server.succeed(folder / "probe.py", folder, ranks=2, variables=variables)
    return request.param, [json.loads(text) for text in done.stdout]


def test_one_process_needs_no_launcher_and_can_all_reduce():
    with process_group("cpu") as worker:
        tensor = torch.arange(4.0)
        dist.all_reduce(tensor)
        assert tensor.tolist() == [0, 1, 2, 3]  # the sum over one rank
        assert (worker.rank, worker.world_size, worker.backend) == (0, 1, "gloo")
        assert worker.gather("only") == ["only"]
        assert worker.broadcast("mine") == "mine"


def test_the_group_is_left_when_the_block_ends_and_when_it_raises():
    with process_group("cpu"):
        assert dist.is_initialized()
    assert not dist.is_initialized()
    with pytest.raises(ZeroDivisionError), process_group("cpu"):
        raise ZeroDivisionError
    assert not dist.is_initialized()


@pytest.mark.two_ranks
@pytest.mark.xdist_group("joined_ranks")
def test_two_ranks_reduce_gather_broadcast_and_wait(joined):
    _, said = joined
    assert [own["world"] for own in said] == [[0, 2, True, "gloo"], [1, 2, False, "gloo"]]
    for own in said:
        assert own["total"] == [3, 3, 3]  # 1 + 2, on both ranks
        assert own["gathered_ranks"] == [0, 1]  # rank order, everywhere
        assert own["processes"] == 2
        assert own["told"] == ["from", 0]
        assert own["mistake"] == "rank 1 has no such folder"  # on both, though one had it
        assert own["saw_the_late_rank"]  # nobody passes a barrier before all are there
        assert own["left"]


@pytest.mark.two_ranks
@pytest.mark.xdist_group("joined_ranks")
def test_the_environment_of_a_joined_rank_names_its_launcher(joined):
    started_by, said = joined
    environment = said[0]["environment"]
    assert environment["launcher"] == started_by
    assert (environment["world_size"], environment["ranks_per_node"]) == (2, 2)
    assert environment["interconnect"]["transport"] == "TCP over loopback"


@pytest.mark.parametrize(
    ("device", "backend", "message"),
    [
        ("tpu", None, "device 'tpu': legal are cpu and cuda"),
        ("cpu", "mpi", "backend 'mpi': legal are nccl and gloo"),
        ("cpu", "nccl", "backend nccl needs GPUs"),
    ],
)
def test_an_unusable_device_or_backend_is_refused(device, backend, message):
    with pytest.raises(UserError, match=message), process_group(device, backend):
        pass
    assert not dist.is_initialized()


@pytest.mark.two_ranks
def test_objects_wait_for_a_slow_host_longer_than_tensors_do(rank_server, tmp_path):
    (tmp_path / "slow.py").write_text(SLOW_HOST)
    done = rank_server.succeed(tmp_path / "slow.py", ranks=2)
    assert done.stdout == ["[0, 1] from 0\n"] * 2


@pytest.mark.two_ranks
@pytest.mark.parametrize(
    ("how", "status", "message"),
    [
        ("user", 2, "error: the batch is no batch"),
        ("failed", 1, "failed: the disk of rank 1 is full"),
        ("interrupted", 130, "interrupted"),
        (
            "memory",
            2,
            "error: out of memory on NVIDIA A100 MIG 1g.5gb with 5.0 GiB, a MIG slice of a GPU "
            "(tried to allocate 20.00 MiB); take a smaller model, batch or sequence, or a larger "
            "GPU",
        ),
    ],
)
def test_a_rank_of_an_nccl_job_that_fails_ends_with_one_line_and_its_status(
    rank_server, tmp_path, how, status, message
):
    error_file = tmp_path / "error.json"
    files = {"TORCHELASTIC_ERROR_FILE": str(error_file)}
    done = rank_server.run(PRETENDED, "--how", how, ranks=2, variables=files, timeout_s=20)
    assert done.exit_codes == [1, status]  # rank 0 has lost its peer
    assert done.stderr[1] == f"{message}\n"
    assert done.stderr[0].startswith("failed: rank 0 lost another rank: ")
    if status == 2:  # the cause is left for torchrun's summary, and a victim says nothing there
        cause = json.loads(error_file.read_text())["message"]["message"]
        assert cause.startswith(("UserError: ", "OutOfMemoryError: "))


@pytest.mark.two_ranks
def test_ranks_of_an_nccl_job_that_stop_together_leave_the_group_in_order(rank_server):
    done = rank_server.run(PRETENDED, "--how", "stopped", ranks=2)
    assert done.exit_codes == [75, 75]
    assert done.error_line == "stopped: by all ranks"


@pytest.mark.two_ranks
def test_a_bug_on_one_rank_of_an_nccl_job_keeps_its_traceback_and_ends_both(rank_server, tmp_path):
    files = {"TORCHELASTIC_ERROR_FILE": str(tmp_path / "error.json")}
    done = rank_server.run(PRETENDED, "--how", "bug", ranks=2, variables=files, timeout_s=20)
    assert done.exit_codes == [1, 1]
    assert done.stderr[1].startswith("Traceback")
    assert done.stderr[1].endswith("ZeroDivisionError: of rank 1\n")
    assert done.stderr[0].startswith("failed: rank 0 lost another rank: ")


@pytest.mark.slow
@pytest.mark.two_ranks
def test_a_bug_on_one_rank_of_an_nccl_job_is_told_at_once_and_no_process_is_left(tmp_path):
    # Its peer waits in C++, where only the end of its process ends it.
    def left() -> list[psutil.Process]:
        return living(lambda own: own.get("STARTED_BY_TEST") == str(tmp_path))

    arguments = ["--how", "bug", "--peer-waits-outside-python"]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    process = subprocess.Popen(
        [*command, "--nproc-per-node=2", PRETENDED, *arguments],
        env=os.environ | {"STARTED_BY_TEST": str(tmp_path), "OMP_NUM_THREADS": "1"},
        cwd=PRETENDED.parents[2],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        seen: dict[str, float] = {}
        for line in process.stdout:
            seen.setdefault(line.strip(), time.monotonic())
        assert process.wait(10) != 0
        # Without it torchrun kills the peer after 30 s.
        assert seen["ZeroDivisionError: of rank 1"] - seen["failing"] < 15
        assert any(line.startswith("Traceback") for line in seen)  # a bug keeps it
        assert left() == []
    finally:
        process.kill()
        for process in left():
            process.kill()


def test_each_rank_is_alone_in_a_group_that_it_makes_in_one_call(rank_server):
    done = rank_server.succeed(ALONE, ranks=3)
    for rank, [said] in enumerate(map(done.lines, range(3))):
        assert said["size"] == 1
        assert said["made"] == 2  # groups, by as many calls: none for another rank's
        assert said["sums"] == [rank + 1, 6, rank + 1, 6]  # the world still sums 1 + 2 + 3


@pytest.mark.two_ranks
def test_after_a_failure_on_all_ranks_of_an_nccl_job_they_can_join_again(rank_server):
    done = rank_server.succeed(PRETENDED, "--how", "again", ranks=2)
    assert [json.loads(text)[0] for text in done.stdout] == [0, 1]


@pytest.mark.two_ranks
def test_ranks_share_a_gpu_over_gloo_and_their_record_says_so(rank_server, tmp_path):
    flags = ("--backend", "gloo", "--gpus", 1, "--output_dir", tmp_path)
    done = rank_server.succeed(PRETENDED, *flags, ranks=2)
    # GPU and ranks on it, for this block and for one inside it, whose backend is the same
    assert [json.loads(text) for text in done.stdout] == [[0, 2, 0, 2, "gloo"]] * 2
    record = json.loads((tmp_path / "run" / "environment.json").read_text())
    assert (record["device"], record["backend"], record["ranks_per_gpu"]) == ("cuda", "gloo", 2)


@pytest.mark.two_ranks
def test_each_rank_has_a_gpu_of_its_own_where_there_are_enough(rank_server):
    done = rank_server.succeed(PRETENDED, "--gpus", 2, ranks=2)
    assert [json.loads(text) for text in done.stdout] == [
        [0, 1, 0, 1, "nccl"],
        [1, 1, 1, 1, "nccl"],
    ]


@pytest.mark.two_ranks
def test_ranks_do_not_share_a_gpu_over_nccl(rank_server):
    done = rank_server.run(PRETENDED, "--gpus", 1, ranks=2)
    assert done.exit_codes == [2, 2]
    assert done.error_line.startswith("error: ranks 0 and 1 share one GPU (")
    assert "--backend gloo" in done.error_line
    assert "NCCL_MULTI_RANK_GPU_ENABLE=1" in done.error_line


@pytest.mark.two_ranks
@pytest.mark.skipif((loaded_version() or (0,)) < (2, 30), reason="needs NCCL 2.30")
def test_ranks_share_a_gpu_over_an_nccl_that_is_told_so_on_all_of_them(rank_server, tmp_path):
    def told(ranks_told: int) -> Callable[[int, int], dict[str, str]]:
        sharing = {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}
        return lambda rank, port: (
            torchrun_variables(rank, 2, port) | (sharing if rank < ranks_told else {})
        )

    flags = ("--gpus", 1, "--output_dir", tmp_path)
    done = rank_server.run(PRETENDED, *flags, ranks=2, variables=told(1), timeout_s=20)
    assert done.exit_codes == [2, 2], done.stderr
    assert not list(tmp_path.iterdir())
    done = rank_server.succeed(PRETENDED, *flags, ranks=2, variables=told(2))
    assert [json.loads(text) for text in done.stdout] == [[0, 2, 0, 2, "nccl"]] * 2
    record = json.loads((tmp_path / "run" / "environment.json").read_text())
    assert record["network"].startswith("nccl, 2 ranks on one ")


@pytest.mark.two_ranks
def test_no_rank_waits_for_one_that_has_no_gpu(rank_server):
    done = rank_server.run(PRETENDED, "--gpus", 2, ranks=3, timeout_s=20)
    assert done.exit_codes == [2, 2, 2], done.stderr
    assert re.match(r"error: rank 2 on \S+: local rank 2, but 2 GPUs are", done.error_line)
    assert "--backend gloo" in done.error_line


@pytest.mark.parametrize(("backend", "places"), [("nccl", [0, 1, None]), ("gloo", [0, 1, 0])])
def test_three_ranks_on_two_gpus_are_for_gloo(monkeypatch, backend, places):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for rank, place in enumerate(places):
        ranks = Ranks(rank, 3, rank, 3, "torchrun")
        if place is None:
            with pytest.raises(UserError, match="--backend gloo") as refused:
                _choose_device(ranks, "cuda", backend)
            assert refused.value.this_rank_only  # the others have theirs
        else:
            assert _choose_device(ranks, "cuda", backend) == torch.device("cuda", place)


REMOTE = """NCCL error in: /pytorch/torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:77, remote
process exited or there was a network error, NCCL version 2.27.5
ncclRemoteError: A call failed possibly due to a network error or a remote process exiting."""
TWICE = """NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:77, invalid usage
ncclInvalidUsage: This usually reflects invalid usage of NCCL library.
Last error: Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1000"""


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (dist.DistBackendError(REMOTE), True),
        (dist.DistBackendError("NCCL communicator was aborted on rank 1."), True),
        (dist.DistBackendError("NCCL operation failed"), True),  # ProcessGroupNCCL2's
        (dist.DistBackendError("NCCL AllReduce failed: invalid usage \nNCCL Last Error: "), False),
        (dist.DistNetworkError("The client socket has timed out after 60s"), True),
        (RuntimeError("[gloo/transport/tcp/pair.cc:561] Connection closed by peer"), True),
        (dist.DistBackendError(TWICE), False),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ConnectionError("Broken pipe"), False),  # no collective's
    ],
)
def test_what_says_that_a_rank_is_gone_is_told_from_other_errors(error, lost):
    assert is_lost_peer(error) == lost


def test_a_program_that_only_starts_others_leaves_the_gpu_to_them(monkeypatch):
    claimed = []
    gpu = SimpleNamespace(uuid="a", name="GPU", total_memory=1)
    for name, answer in {"is_available": True, "device_count": 1}.items():
        monkeypatch.setattr(torch.cuda, name, lambda answer=answer: answer)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: gpu)
    monkeypatch.setattr(torch.cuda, "set_device", claimed.append)
    with process_group("cuda", "gloo", claim_gpu=False) as worker:
        assert worker.device == torch.device("cuda", 0)
    assert claimed == []
    with process_group("cuda", "gloo"):
        assert claimed == [torch.device("cuda", 0)]


@pytest.mark.parametrize(
    ("backend", "expected"),
    [
        # gloo's barrier is one of hosts, and knows no GPUs: kernels may still run on them.
        ("gloo", [("synchronize", torch.device("cuda", 1)), ("barrier", {})]),
        ("nccl", [("barrier", {"device_ids": [1]})]),
        (None, [("barrier", {})]),
    ],
)
def test_a_barrier_waits_for_gpus_over_either_backend(monkeypatch, backend, expected):
    waited = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda gpu: waited.append(("synchronize", gpu)))
    monkeypatch.setattr(dist, "barrier", lambda *_, **how: waited.append(("barrier", how)))
    device = torch.device("cuda", 1) if backend else torch.device("cpu")
    Worker(Ranks(), device, backend or "gloo").barrier()
    assert waited == expected


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_cuda_is_refused_where_there_is_no_gpu():
    with pytest.raises(UserError, match="--device cpu"), process_group("cuda"):
        pass


@pytest.mark.parametrize(
    ("devices", "shared"),
    [
        (["a GPU 0", "a GPU 1", "b GPU 0"], None),
        (["a GPU 0", "a GPU 1", "a GPU 0"], (0, 2)),
        (["a GPU 1", "b GPU 0", "b GPU 0", "a GPU 1"], (1, 2)),
        ([], None),
    ],
)
def test_two_ranks_on_one_device_are_found(devices, shared):
    assert find_shared_device(devices) == shared


def test_a_rank_whose_launcher_is_gone_does_not_wait_for_it_for_long(monkeypatch) -> None:
    for name, value in torchrun_variables(rank=1, ranks=2, port=free_port()).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RunFailed, match="rank 1 found no rendezvous: "):
        _rendezvous(current_ranks(), rendezvous_s=1)
