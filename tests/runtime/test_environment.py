"""The environment record: enough to know where, when and with what a number was measured."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import socket
import subprocess
import sys

import pytest

from common.runtime.environment import describe_environment, hardware_line
from common.runtime.paths import project_root


@pytest.fixture(scope="module")
def record(allreduce_run):
    """The record that a finished benchmark left."""
    return json.loads((allreduce_run / "environment.json").read_text())


def git(*arguments: str) -> str | None:
    done = subprocess.run(
        ["git", "-C", project_root(), *arguments], capture_output=True, text=True, check=False
    )
    return done.stdout.strip() if done.returncode == 0 else None


def test_the_record_of_a_finished_run_is_complete_and_has_its_times(record):
    start, end = (
        datetime.datetime.fromisoformat(record[f"{end}_time"]) for end in ("start", "end")
    )
    assert record["status"] == "complete"
    assert start.utcoffset() == datetime.timedelta(0)
    assert start <= end <= datetime.datetime.now(datetime.UTC)


def test_the_record_has_the_commit_and_whether_it_was_changed(record):
    assert record["git"]["commit"] == git("log", "-1", "--format=%H")
    assert record["git"]["dirty"] in (True, False, None)


def test_the_record_has_the_versions(record):
    assert record["python"] == platform.python_version()
    for package in ("torch", "numpy", "pandas", "transformers"):
        assert record["packages"][package] == importlib.metadata.version(package)


def test_the_record_has_the_machine(record):
    assert record["host"] == socket.gethostname()
    assert record["cpu"]["cores"] == os.cpu_count()
    assert record["cpu"]["model"]
    assert (record["device"], record["gpus"]) == ("cpu", [])


def test_the_record_has_backend_ranks_and_launcher(record):
    assert (record["backend"], record["world_size"], record["ranks_per_node"]) == ("gloo", 2, 2)
    assert record["launcher"] == "torchrun"
    assert record["interconnect"]["transport"] == "TCP over loopback"


def test_the_record_has_the_variables_that_change_results(record):
    assert record["variables"]["OMP_NUM_THREADS"] == "1"


def test_variables_of_nccl_are_recorded(monkeypatch):
    monkeypatch.setenv("NCCL_ALGO", "TREE")
    assert describe_environment(device="cpu")["variables"]["NCCL_ALGO"] == "TREE"


def test_the_hardware_line_names_ranks_device_and_backend(record):
    assert record["hardware"] == (
        f"2 ranks, {record['cpu']['cores']} cores of {record['cpu']['model']}, gloo"
    )
    on_gpus = record | {"gpus": [{"name": "NVIDIA H200"}] * 8, "backend": "nccl", "world_size": 1}
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


def test_a_machine_without_git_is_described_too(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert describe_environment(device="cpu")["git"] == {"commit": None, "dirty": None}


def test_the_record_can_be_written_as_json():
    assert json.loads(json.dumps(describe_environment("gloo", "cpu", 4)))["world_size"] == 4
