"""The environment record: enough to know where, when and with what a number was measured."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import socket
import sys

import pytest

from common.errors import UserError
from common.runtime.group.network import (
    EMULATED_NETWORK,
    give_gloo_the_interface_of_nccl,
    ranks_on_machine,
    require_interfaces,
)
from common.runtime.machine import environment
from common.runtime.machine.environment import (
    RankGroup,
    cpu_model,
    describe_environment,
    hardware_line,
    usable_cores,
)
from common.runtime.paths import git, project_root


@pytest.fixture(scope="module")
def record(allreduce_run):
    """Reads the record that a finished benchmark left."""
    return json.loads((allreduce_run / "environment.json").read_text())


def test_the_record_of_a_finished_run_is_complete_and_has_its_times(record):
    start, end = (
        datetime.datetime.fromisoformat(record[f"{end}_time"]) for end in ("start", "end")
    )
    assert record["status"] == "complete"
    assert start.utcoffset() == datetime.timedelta(0)
    assert start <= end <= datetime.datetime.now(datetime.UTC)


def test_the_record_has_commit_versions_machine_ranks_and_variables(record):
    newest = git(project_root(), "log", "-1", "--format=%H").stdout.strip()
    assert record["git"]["commit"] == (newest or None)
    assert record["git"]["dirty"] in (True, False, None)
    assert record["python"] == platform.python_version()
    for package in ("torch", "numpy", "pandas", "transformers"):
        assert record["packages"][package] == importlib.metadata.version(package)
    assert record["host"] == socket.gethostname()
    assert record["cpu"]["cores"] == usable_cores()
    assert record["cpu"]["model"]
    assert (record["device"], record["gpus"]) == ("cpu", [])
    assert (record["backend"], record["world_size"], record["ranks_per_node"]) == ("gloo", 2, 2)
    assert record["launcher"] == "torchrun"
    assert record["interconnect"]["transport"] == "TCP over loopback"
    assert record["variables"]["OMP_NUM_THREADS"] == "1"


def test_variables_of_nccl_are_recorded(monkeypatch):
    monkeypatch.setenv("NCCL_ALGO", "TREE")
    assert describe_environment(device="cpu")["variables"]["NCCL_ALGO"] == "TREE"


def test_the_hardware_line_names_ranks_device_and_backend(record):
    assert record["hardware"] == (
        f"2 ranks, {record['cpu']['cores']} cores of {record['cpu']['model']}, gloo"
    )
    on_gpus = record | {"gpus": [{"name": "NVIDIA H200"}] * 8, "backend": "nccl", "world_size": 1}
    on_gpus |= {"process_group": "ProcessGroupNCCL"}
    assert hardware_line(on_gpus) == "1 rank, NVIDIA H200, nccl"


def test_the_command_is_what_was_typed_without_the_projects_absolute_path(record):
    assert record["command"].startswith(
        "python assignments/assignment2/allreduce_benchmark.py --rounds 3"
    )
    assert str(project_root()) not in record["command"]


@pytest.mark.parametrize("argument", ["{root}/outputs", "--output_dir={root}/outputs", "{root}"])
def test_no_argument_brings_the_projects_absolute_path_into_the_command(monkeypatch, argument):
    typed = [f"{project_root()}/assignments/x.py", argument.format(root=project_root())]
    monkeypatch.setattr(sys, "argv", typed)
    assert str(project_root()) not in describe_environment(device="cpu")["command"]


def test_a_folder_whose_name_begins_with_the_projects_is_another(monkeypatch):
    beside = f"{project_root()}-runs/one"
    monkeypatch.setattr(sys, "argv", ["x.py", beside])
    assert describe_environment(device="cpu")["command"] == f"python x.py {beside}"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give a folder to another user")
def test_a_checkout_of_another_user_has_its_commit(tmp_path):
    def ask(*arguments: str) -> str:
        return git(tmp_path, *arguments).stdout.strip()

    identity = ("-c", "user.name=n", "-c", "user.email=n@example.org")
    ask("init")
    ask(*identity, "commit", "--allow-empty", "--message", "first")
    commit = ask("rev-parse", "HEAD")
    assert len(commit) == 40
    for path in (tmp_path, tmp_path / ".git"):
        os.chown(path, 64201, 64201)
    assert ask("rev-parse", "HEAD") == commit


def test_a_machine_without_git_is_described_too(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert describe_environment(device="cpu")["git"] == {"commit": None, "dirty": None}
    monkeypatch.setenv("DDPLAB_COMMIT", "50dbdc0")  # a copy without its history
    assert describe_environment(device="cpu")["git"] == {"commit": "50dbdc0", "dirty": None}


def test_the_record_can_be_written_as_json():
    assert json.loads(json.dumps(describe_environment("gloo", "cpu", 4)))["world_size"] == 4


def be_a_rank(monkeypatch: pytest.MonkeyPatch, world_size: int, local_world_size: int) -> None:
    """Makes this process rank 0 of a job, as torchrun tells it."""
    for name, value in (
        ("RANK", 0),
        ("LOCAL_RANK", 0),
        ("WORLD_SIZE", world_size),
        ("LOCAL_WORLD_SIZE", local_world_size),
    ):
        monkeypatch.setenv(name, str(value))


def network_name(backend: str | None, world_size: int | None = None, **group: object) -> str | None:
    """Returns the name of the network in the record of a rank, or of who starts ranks."""
    record = describe_environment(backend, "cpu", world_size, group=RankGroup(**group))
    return record["network"]


@pytest.mark.parametrize(
    ("backend", "world_size", "local_world_size", "name"),
    [
        ("nccl", 8, 4, "NCCL, 2 hosts × 4 ranks"),
        ("nccl", 8, 8, "NCCL, 1 host × 8 ranks"),
        ("nccl", 6, 4, "NCCL, hosts with 4 + 2 ranks"),
        ("nccl", 1, 1, None),  # one rank exchanges nothing
        ("gloo", 2, 1, "gloo, 2 hosts × 1 rank"),
        ("gloo", 2, 2, "TCP over loopback"),
        ("gloo", 1, 1, "TCP over loopback"),
        ("", 1, 1, None),
        (None, 8, 4, None),
    ],
)
def test_a_network_is_named_by_backend_and_layout(
    monkeypatch: pytest.MonkeyPatch,
    backend: str | None,
    world_size: int,
    local_world_size: int,
    name: str | None,
) -> None:
    be_a_rank(monkeypatch, world_size, local_world_size)
    assert network_name(backend) == name


def test_gathered_hosts_tell_how_ranks_lie_where_the_first_host_does_not(monkeypatch) -> None:
    be_a_rank(monkeypatch, 6, 2)
    assert network_name("nccl") == "NCCL, 3 hosts × 2 ranks"
    hosts = ["n1"] * 2 + ["n2"] * 4
    assert network_name("nccl", hosts=hosts) == "NCCL, hosts with 2 + 4 ranks"
    record = describe_environment("nccl", "cpu", 6, group=RankGroup(hosts=hosts))
    assert (record["hosts"], record["host_names"]) == (2, ["n1", "n2"])
    assert record["hardware"].startswith("6 ranks on 2 hosts, ")


def test_a_process_that_starts_ranks_starts_them_on_its_own_host() -> None:
    assert network_name("nccl", 8) == "NCCL, 1 host × 8 ranks"
    assert network_name("gloo", 4) == "TCP over loopback"


def test_ranks_that_share_a_gpu_say_so_in_network_and_caption(monkeypatch) -> None:
    be_a_rank(monkeypatch, 2, 2)
    record = describe_environment("gloo", "cpu", 2, group=RankGroup(ranks_per_gpu=2))
    assert record["network"] == f"gloo, 2 ranks on one {cpu_model()}"  # the device of this record
    on_gpu = record | {"gpus": [{"name": "NVIDIA H100"}]}
    assert hardware_line(on_gpu) == "2 ranks on one NVIDIA H100, gloo"
    on_two = on_gpu | {"world_size": 4}
    assert hardware_line(on_two) == "4 ranks, 2 ranks on one NVIDIA H100, gloo"


def test_another_group_than_the_old_is_told_in_network_and_caption(monkeypatch) -> None:
    be_a_rank(monkeypatch, 2, 2)
    new = describe_environment("nccl", "cpu", 2, group=RankGroup(process_group="ProcessGroupNCCL2"))
    assert new["process_group"] == "ProcessGroupNCCL2"
    assert new["network"] == "NCCL (ProcessGroupNCCL2), 1 host × 2 ranks"
    assert new["hardware"].endswith(", nccl (ProcessGroupNCCL2)")
    shared = network_name("nccl", ranks_per_gpu=2, process_group="ProcessGroupNCCL2")
    assert shared == f"nccl (ProcessGroupNCCL2), 2 ranks on one {cpu_model()}"
    for backend, group in (("nccl", "ProcessGroupNCCL"), ("gloo", "ProcessGroupGloo")):
        known = describe_environment(backend, "cpu", 2, group=RankGroup(process_group=group))
        before = describe_environment(backend, "cpu", 2)
        assert (known["network"], known["hardware"]) == (before["network"], before["hardware"])


def test_emulated_networks_keep_their_names(monkeypatch) -> None:
    be_a_rank(monkeypatch, 2, 1)
    emulated = {"hosts": 2, "rates_bit_per_s": [1e9, 1e9], "delay_ms": 0.5}
    monkeypatch.setenv(EMULATED_NETWORK, json.dumps(emulated))
    assert ranks_on_machine(3) == 6  # both hosts have this machine's memory
    record = describe_environment("gloo", "cpu", 2, group=RankGroup(hosts=["here", "here"]))
    assert record["network"] == "2 emulated hosts at 1 Gbit/s, 0.5 ms delay"
    assert record["hosts"] == 2
    monkeypatch.setenv(EMULATED_NETWORK, json.dumps(emulated | {"hosts": 1}))
    assert network_name("gloo") == "1 emulated host at 1 Gbit/s, 0.5 ms delay"


def test_different_gpus_of_one_host_are_all_named() -> None:
    record = describe_environment("nccl", "cpu", 2)
    mixed = [{"name": name} for name in ("NVIDIA A100", "NVIDIA H100", "NVIDIA A100")]
    assert hardware_line(record | {"gpus": mixed}) == ("2 ranks, NVIDIA A100 + NVIDIA H100, nccl")


@pytest.mark.parametrize(
    ("nccl", "gloo", "becomes"),
    [
        ("ib0", None, "ib0"),
        ("ib0", "eth0", "eth0"),
        (None, None, None),
        # A prefix, an exclusion, an exact name in NCCL's spelling, lists, and no interface of here.
        *((text, None, None) for text in ("ib", "^lo", "=ib0", "ib0,eth0", "^lo,eth0", "ib1", "")),
    ],
)
def test_gloo_takes_the_one_interface_that_nccl_was_given(nccl, gloo, becomes):
    given = {"NCCL_SOCKET_IFNAME": nccl, "GLOO_SOCKET_IFNAME": gloo}
    env = {name: value for name, value in given.items() if value is not None}
    give_gloo_the_interface_of_nccl(env, interfaces=("lo", "eth0", "ib0"))
    assert env.get("GLOO_SOCKET_IFNAME") == becomes
    assert env.get("NCCL_SOCKET_IFNAME") == nccl


def test_interfaces_are_those_of_this_host():
    [(_, here), *_] = socket.if_nameindex()
    env = {"NCCL_SOCKET_IFNAME": here}
    give_gloo_the_interface_of_nccl(env)
    assert env["GLOO_SOCKET_IFNAME"] == here


def test_an_interface_that_is_not_there_is_refused_by_name() -> None:
    first = socket.if_nameindex()[0][1]
    require_interfaces({"GLOO_SOCKET_IFNAME": first})
    with pytest.raises(UserError, match=f"GLOO_SOCKET_IFNAME=eth99: .*; it has {first}"):
        require_interfaces({"GLOO_SOCKET_IFNAME": f"{first},eth99"})


@pytest.mark.parametrize(("quota", "cores"), [(None, 8), (2.0, 2), (1.5, 1), (0.5, 1), (64.0, 8)])
def test_a_containers_quota_counts_as_whole_cores(monkeypatch, quota, cores) -> None:
    monkeypatch.setattr(environment, "own_cores", lambda: range(8))
    monkeypatch.setattr(environment, "cpu_quota", lambda: quota)
    assert usable_cores() == cores
