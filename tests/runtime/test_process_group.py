"""The process group: joined by one process or two real ranks, and left whatever happens."""

from __future__ import annotations

import json

import pytest
import torch
import torch.distributed as dist
from rank_support import free_port, torchrun_variables

from common.errors import RunFailed, UserError
from common.runtime.process_group import _rendezvous, find_shared_device, process_group
from common.runtime.ranks import current_ranks

PROBE = """
import json, os, pathlib, sys, time
import torch
import torch.distributed as dist
from common.runtime.environment import describe_environment
from common.runtime.process_group import process_group

folder = pathlib.Path(sys.argv[1])
with process_group("cpu") as worker:
    total = torch.full((3,), float(worker.rank + 1))
    dist.all_reduce(total)
    gathered = worker.gather({"rank": worker.rank, "pid": os.getpid()})
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
        "saw_the_late_rank": (folder / "late").exists(),
        "environment": describe_environment(worker.backend, "cpu", worker.world_size),
    }
print(json.dumps(said | {"left": not dist.is_initialized()}))
"""


@pytest.fixture
def probe(tmp_path):
    script = tmp_path / "probe.py"
    script.write_text(PROBE)
    return script


def slurm_variables(rank: int, port: int) -> dict[str, str]:
    """What srun sets for one of two tasks on this machine; the port follows from the job."""
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
@pytest.mark.parametrize("started_by", ["torchrun", "slurm"])
def test_two_ranks_reduce_gather_broadcast_and_wait(rank_server, probe, tmp_path, started_by):
    variables = slurm_variables if started_by == "slurm" else None
    done = rank_server.run(probe, tmp_path, ranks=2, variables=variables)
    assert done.exit_codes == [0, 0], done.stderr
    said = [json.loads(text) for text in done.stdout]
    assert [own["world"] for own in said] == [[0, 2, True, "gloo"], [1, 2, False, "gloo"]]
    for own in said:
        assert own["total"] == [3, 3, 3]  # 1 + 2, on both ranks
        assert own["gathered_ranks"] == [0, 1]  # rank order, everywhere
        assert own["processes"] == 2
        assert own["told"] == ["from", 0]
        assert own["saw_the_late_rank"]  # nobody passes a barrier before all are there
        assert own["left"]


@pytest.mark.two_ranks
@pytest.mark.parametrize("started_by", ["torchrun", "slurm"])
def test_the_environment_of_a_joined_rank_names_its_launcher(
    rank_server, probe, tmp_path, started_by
):
    variables = slurm_variables if started_by == "slurm" else None
    done = rank_server.run(probe, tmp_path, ranks=2, variables=variables)
    environment = json.loads(done.stdout[0])["environment"]
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
