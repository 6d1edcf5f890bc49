"""Which device is chosen, and what is said where it cannot be the one that was granted."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path

import pytest
import torch
from rank_support import ASSIGNMENT2
from refusals import problem

from common.cli import run
from common.errors import UserError
from common.runtime import job_device
from common.runtime.machine import device as module
from common.runtime.machine.device import (
    choose_device,
    driver_version,
    gpus_visible,
    refused_by_gpu,
)
from common.runtime.machine.gpus import GpuFacts
from common.runtime.script import exit_status

GRANTED = {"SLURM_JOB_ID": "7", "SLURM_GPUS_ON_NODE": "4", "CUDA_VISIBLE_DEVICES": "0,1,2,3"}


@pytest.fixture
def cuda(monkeypatch):
    """Returns ``cuda(usable)``: sets what torch says of CUDA, built for 13.0; warns where not."""

    def pretend(usable: bool) -> None:
        def is_available() -> bool:
            if not usable:
                warnings.warn("CUDA initialization: The NVIDIA driver is too old", stacklevel=2)
            return usable

        monkeypatch.setattr(torch.cuda, "is_available", is_available)
        monkeypatch.setattr(torch.version, "cuda", "13.0")

    return pretend


@pytest.fixture
def machine(tmp_path, monkeypatch) -> Path:
    """Makes the root of a machine with one GPU and a driver, which NVML does not tell."""
    monkeypatch.setattr(module, "read_gpu_facts", lambda _: GpuFacts())
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "nvidia0").touch()
    (tmp_path / "proc/driver/nvidia").mkdir(parents=True)
    (tmp_path / "proc/driver/nvidia/version").write_text(
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.01  Sun May 12 19:39:15 UTC 2024\n"
        "GCC version:  gcc version 11.4.0 (Ubuntu 11.4.0-1ubuntu1~22.04)\n"
    )
    return tmp_path


@pytest.mark.parametrize(
    ("asked", "env", "usable", "chosen"),
    [
        ("cpu", GRANTED, True, "cpu"),
        ("cpu", GRANTED, False, "cpu"),
        ("cuda", {}, True, "cuda"),
        (None, {}, True, "cuda"),
        (None, GRANTED, True, "cuda"),
        # Hidden GPUs are a wish for the CPU, whatever a job was granted.
        (None, GRANTED | {"CUDA_VISIBLE_DEVICES": ""}, False, "cpu"),
        (None, GRANTED | {"CUDA_VISIBLE_DEVICES": "-1"}, False, "cpu"),
        (None, GRANTED | {"CUDA_VISIBLE_DEVICES": "NoDevFiles"}, False, "cpu"),
        (None, {"SLURM_JOB_ID": "7", "SLURM_GPUS_ON_NODE": "0"}, False, "cpu"),
    ],
)
def test_the_device_is_the_one_asked_for_or_the_best_that_there_is(
    cuda, tmp_path, caplog, asked, env, usable, chosen
):
    cuda(usable)
    assert choose_device(asked, env=env, root=tmp_path) == chosen
    assert caplog.messages == []


@pytest.mark.filterwarnings("error")  # torch's own warning would be a second line
@pytest.mark.parametrize(
    ("asked", "env", "says"),
    [
        ("cuda", {}, "device cuda, but "),
        (None, GRANTED, "the job was granted 4 GPUs, but "),
        (None, {"SLURM_STEP_GPUS": "2"}, "the job was granted 1 GPU, but "),
        (None, {"SLURM_JOB_GPUS": "0,3"}, "the job was granted 2 GPUs, but "),
    ],
)
def test_gpus_that_were_granted_or_asked_for_and_cannot_be_used_are_an_error(
    cuda, machine, asked, env, says
):
    cuda(False)
    message = problem(choose_device, asked, env=env, root=machine)
    assert message.startswith(says)
    for part in ("535.183.01", torch.__version__, "CUDA 13.0", "sbatch/README.md", "--device cpu"):
        assert part in message


def test_a_driver_that_is_too_old_is_named_with_the_cuda_that_it_runs(cuda, machine, monkeypatch):
    cuda(False)
    monkeypatch.setattr(module, "read_gpu_facts", lambda _: GpuFacts("535.183.01", "12.2"))
    with pytest.raises(UserError, match=r"535\.183\.01, for CUDA up to 12\.2; .*CUDA 13\.0\)"):
        choose_device("cuda", env={}, root=machine)


def test_the_first_rank_of_each_host_says_what_is_wrong_with_its_gpus(cuda, machine):
    cuda(False)
    speaks = []
    for rank in range(4):
        place = {"RANK": rank, "LOCAL_RANK": rank % 2, "WORLD_SIZE": 4, "LOCAL_WORLD_SIZE": 2}
        env = GRANTED | {name: str(value) for name, value in place.items()}
        with pytest.raises(UserError) as refused:
            choose_device(env=env, root=machine)
        speaks.append(refused.value.this_rank_only)
    assert speaks == [True, False, True, False]


def test_asked_for_but_hidden_gpus_are_an_error_that_says_so(cuda, machine):
    cuda(False)
    with pytest.raises(UserError, match="CUDA_VISIBLE_DEVICES='' hides all GPUs"):
        choose_device("cuda", env={"CUDA_VISIBLE_DEVICES": ""}, root=machine)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(("rank", "warned"), [("0", 1), ("1", 0)])
def test_a_gpu_that_is_there_and_cannot_be_used_is_one_warning_of_rank_0(
    cuda, machine, caplog, rank, warned
):
    cuda(False)
    env = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    with caplog.at_level(logging.WARNING):
        assert choose_device(env=env, root=machine) == "cpu"
    assert len(caplog.messages) == warned
    assert all("535.183.01" in message for message in caplog.messages)


@pytest.mark.parametrize(
    ("paths", "env", "visible"),
    [
        ((), {}, False),
        ((), {"CUDA_VISIBLE_DEVICES": "GPU-1f2e"}, True),
        (("dev/nvidia3",), {}, True),  # a container's only one
        (("dev/nvidiactl",), {}, False),
        (("proc/driver/nvidia",), {}, True),
        (("dev/nvidia0",), {"CUDA_VISIBLE_DEVICES": "-1,0"}, False),
    ],
)
def test_gpus_are_visible_by_device_files_or_name_unless_hidden(tmp_path, paths, env, visible):
    for path in paths:
        (tmp_path / path).mkdir(parents=True)
    assert gpus_visible(env, tmp_path) == visible


@pytest.mark.parametrize(
    ("line", "version"),
    [
        (
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build",
            "580.65.06",
        ),
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  470.82  Wed Oct 27 2021", "470.82"),
        ("something else", None),
    ],
)
def test_the_drivers_version_is_read_where_nvml_does_not_tell_it(machine, line, version):
    (machine / "proc/driver/nvidia/version").write_text(line)
    assert driver_version(machine) == version


@pytest.mark.parametrize(
    ("usable", "gpus", "env", "preset"),
    [
        (True, 2, {"CUDA_VISIBLE_DEVICES": "0,1"}, "gpu"),
        (True, 1, {"CUDA_VISIBLE_DEVICES": "0"}, "laptop"),
        (False, 2, {"CUDA_VISIBLE_DEVICES": "0,1"}, "laptop"),  # the driver lists two, all the same
        (True, 2, {"CUDA_VISIBLE_DEVICES": ""}, "laptop"),
    ],
)
def test_the_preset_is_that_of_gpus_where_torch_can_use_two(
    cuda, monkeypatch, usable, gpus, env, preset
):
    cuda(usable)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    for name in ("SLURM_GPUS_ON_NODE", "SLURM_JOB_GPUS", "SLURM_STEP_GPUS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert run.default_preset() == preset


def test_a_job_whose_gpus_cannot_be_used_ends_with_one_line_and_no_rank_waits(
    cuda, rank_server, tmp_path, monkeypatch
):
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    flags = ("--output_dir", tmp_path / "out")
    done = rank_server.run(
        ASSIGNMENT2 / "allreduce_benchmark.py", *flags, ranks=2, variables=GRANTED
    )
    assert done.exit_codes == [2, 2]
    said = "error: the job was granted 4 GPUs, but torch can use no GPU here"
    assert done.error_line.startswith(said)
    # ddplab run says so before it makes a folder, too.
    for name, value in GRANTED.items():
        monkeypatch.setenv(name, value)
    cuda(False)
    with pytest.raises(UserError, match=r"the job was granted 4 GPUs.*--preset laptop"):
        run.Run("assignment2", output_dir=str(tmp_path / "out")).run()
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "asked"),
    [
        ("--model gpt2 --rounds 2", [None]),
        ("--device cpu --model gpt2 --numel 1 2", ["cpu"]),
        ("--device cpu --model gpt2 --device=cuda", ["cuda"]),  # FLAGS come last and win
        ("--device_mesh 2 --dev 3", [None]),
        ("--config laptop.yaml", []),  # it may say cpu
        ("--config=laptop.yaml --device cuda", ["cuda"]),
    ],
)
def test_a_job_file_asks_for_the_last_device_among_a_scripts_flags(monkeypatch, arguments, asked):
    devices = []
    monkeypatch.setattr(job_device, "choose_device", lambda device, **_: devices.append(device))
    job_device.main(arguments.split())
    assert devices == asked


def test_an_unusable_gpu_is_refused_with_the_variable_that_job_files_have(monkeypatch):
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "4")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(UserError, match=r"granted 4 GPUs.*DEVICE=cpu"):
        job_device.main(["--num_steps", "3"])
    job_device.main(["--device", "cpu"])


BUSY = (
    "CUDA error: CUDA-capable device(s) is/are busy or unavailable\n"
    "Search for `cudaErrorDevicesUnavailable' in https://docs.nvidia.com/cuda/ for more information"
)


def test_a_gpu_in_exclusive_mode_that_another_process_has_is_one_line(capsys):
    with pytest.raises(SystemExit) as stop, exit_status():
        raise RuntimeError(BUSY)
    assert stop.value.code == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "compute mode" in line
    assert "nvidia-smi -c DEFAULT" in line


@pytest.mark.parametrize(
    "error",
    [
        ValueError("busy or unavailable"),
        MemoryError("of the host"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:117] can't allocate memory: you tried"),
        torch.OutOfMemoryError("CUDA out of memory, as somebody says who uses no GPU"),
    ],
)
def test_what_no_gpu_has_refused_stays_what_it_is(error):
    assert refused_by_gpu(error) is None
