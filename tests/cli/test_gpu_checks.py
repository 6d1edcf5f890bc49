"""What ``ddplab doctor`` says of GPUs, from facts that are made up and so known."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from nvml_support import GIB, FakeGpu, fake_nvml, h100

from common.cli import doctor
from common.cli import gpu_checks as checks
from common.cli.gpu_checks import Check, gpu_rows
from common.runtime.group.overlap_probe import Tried
from common.runtime.machine.gpus import CudaDevice, GpuFacts, GpuPair, read_gpu_facts

MIB = 2**20


def pair_of_gpus(tmp_path: Path, **driver: object) -> GpuFacts:
    two = [h100(0), h100(1, EccMode=[0, 0])]
    for gpu, other in zip(two, reversed(two), strict=True):
        gpu.links = [other.bus_id] * 4
    return read_gpu_facts([gpu.cuda() for gpu in two], fake_nvml(two, **driver), tmp_path)


def row(check: Check | None, works: bool, *words: str) -> None:
    """Asserts that the row is there, and has this verdict and these words."""
    assert check is not None
    assert check.works is works, check.detail
    for word in words:
        assert word in check.detail, check.detail


def test_a_driver_runs_the_cuda_of_its_own_major_version_and_older_ones() -> None:
    row(checks.driver_for_build("580.82", "13.0", "13.2"), True, "580.82", "13.0", "13.2")
    row(checks.driver_for_build("580.82", "13.0", "12.6"), True)
    too_old = checks.driver_for_build("535.161", "12.2", "13.0")
    row(too_old, False, "535.161", "12.2", "13.0", "sbatch/README.md")
    assert checks.driver_for_build(None, None, "13.0") is None
    assert checks.driver_for_build("580.82", "13.0", None) is None  # a build for CPUs


@pytest.mark.parametrize(
    ("mode", "works", "word"),
    [(0, True, "DEFAULT"), (3, False, "EXCLUSIVE_PROCESS"), (2, False, "PROHIBITED")],
)
def test_a_gpu_for_one_process_cannot_have_several(
    tmp_path: Path, mode: int, works: bool, word: str
) -> None:
    two = [h100(0), h100(1, ComputeMode=mode)]
    gpus = read_gpu_facts([gpu.cuda() for gpu in two], fake_nvml(two), tmp_path).gpus
    row(checks.several_processes(gpus), works, word)


def test_where_a_gpu_does_not_tell_its_mode_there_is_no_row(tmp_path: Path) -> None:
    silent = FakeGpu("GPU-0000000s", "00000000:17:00.0")
    gpus = read_gpu_facts([silent.cuda()], fake_nvml([silent]), tmp_path).gpus
    assert checks.several_processes(gpus) is None


def test_a_slice_is_no_whole_gpu(tmp_path: Path) -> None:
    whole = h100(0, MigMode=[1, 1])
    part = FakeGpu("MIG-0000000m", "", slice_of=whole)
    shown = CudaDevice("NVIDIA Pretend 80GB MIG 1g.10gb", "0000000m", 10 * GIB)
    slices = read_gpu_facts([shown], fake_nvml([whole, part]), tmp_path).gpus
    row(checks.mig_slices(slices), False, "1 MIG slice", "10.0 GiB", "gloo")
    assert checks.mig_slices(pair_of_gpus(tmp_path).gpus) is None


def test_a_group_that_waits_and_one_that_does_not_any_more_are_told_with_the_variable() -> None:
    old, new = Tried("ProcessGroupNCCL", waits=False), Tried("ProcessGroupNCCL2", waits=True)
    row(checks.overlap(old, None), True, "ProcessGroupNCCL does not wait")
    row(checks.overlap(old, old), True)  # a torch whose own choice it is
    row(checks.overlap(old, new), True, "ProcessGroupNCCL2", "runs set TORCH_DIST_USE_NCCL2=0")
    row(checks.overlap(old, replace(new, waits=False)), True, "TORCH_DIST_USE_NCCL2=1 takes it")
    row(checks.overlap(new, None), False, "ProcessGroupNCCL2 waits", "TORCH_DIST_USE_NCCL2=0")


def test_peers_that_a_job_hides_from_a_rank_are_told_with_the_flags_that_help() -> None:
    row(checks.reachable_peers(1, 4), False, "1 of 4", "--gpus-per-node", "--gpu-bind=none")
    row(checks.reachable_peers(4, 4), True)
    assert checks.reachable_peers(1, 1) is None
    assert checks.reachable_peers(1, 0) is None  # outside Slurm
    assert checks.reachable_peers(None, 4) is None  # no driver to ask


def test_gpus_that_cannot_read_each_others_memory_are_named(tmp_path: Path) -> None:
    row(checks.peer_access(pair_of_gpus(tmp_path).pairs), True, "1 pair")
    off = pair_of_gpus(tmp_path, peer={0: 4, 2: 5}).pairs
    row(checks.peer_access(off), False, "0–1", "switched off in the driver's settings")
    assert checks.peer_access(()) is None


def test_host_memory_is_held_against_what_a_checkpoint_stages() -> None:
    # gpt2-large has 774,030,080 parameters, with 12 bytes each under AdamW: 9.29 GB on all ranks.
    row(checks.host_memory(4, int(9.4e9)), True, "9.4 GB", "9.3 GB")
    row(checks.host_memory(4, int(9.2e9)), False, "9.2 GB", "--mem=0")
    assert checks.host_memory(0, 1) is None


def test_a_job_has_no_more_memory_than_slurm_gave_it() -> None:
    assert checks.job_memory_bytes(64 * GIB, {"SLURM_MEM_PER_NODE": "16384"}) == 16 * GIB
    assert checks.job_memory_bytes(8 * GIB, {"SLURM_MEM_PER_NODE": "16384"}) == 8 * GIB
    # 0 is the whole node's; outside Slurm nobody says anything
    assert checks.job_memory_bytes(64 * GIB, {"SLURM_MEM_PER_NODE": "0"}) == 64 * GIB
    assert checks.job_memory_bytes(64 * GIB, {}) == 64 * GIB


def test_a_containers_default_of_shared_memory_is_too_little_for_several_gpus() -> None:
    row(checks.shared_memory(2, 64 * MIB), False, "64 MiB", "--shm-size")
    row(checks.shared_memory(2, 16 * GIB), True)
    assert checks.shared_memory(1, 64 * MIB) is None
    assert checks.shared_memory(2, None) is None


def test_without_gpus_there_are_no_rows_of_them() -> None:
    assert doctor.check_gpus(GpuFacts()) == []


def test_gpus_that_are_alike_share_a_line_and_others_have_their_own(tmp_path: Path) -> None:
    rows = dict(gpu_rows(pair_of_gpus(tmp_path)))
    assert rows["driver"] == "580.82.07, for CUDA up to 13.0"
    assert rows["compute mode"] == "DEFAULT"
    assert rows["ECC"].splitlines() == ["0: on", "1: off"]
    assert rows["power limit"].splitlines() == ["0: 700 W", "1: 701 W"]
    assert rows["power draw"] == "72 W, 72 W"
    assert rows["PCIe"] == "generation 1 × 8 (at most 5 × 16)"
    assert rows["between GPUs"] == "4 NVLinks, peer-to-peer ok"


def test_of_many_pairs_the_usual_ones_are_not_named_one_by_one(tmp_path: Path) -> None:
    found = pair_of_gpus(tmp_path)
    pairs = [
        GpuPair(one, other, 0 if (one, other) == (2, 3) else 4, "one NUMA node", "ok")
        for one in range(5)
        for other in range(one + 1, 5)
    ]
    rows = dict(gpu_rows(replace(found, pairs=tuple(pairs))))
    assert rows["between GPUs"].splitlines() == [
        "2–3: PCIe through one NUMA node, peer-to-peer ok",
        "all others: 4 NVLinks, peer-to-peer ok",
    ]


def test_a_gpu_that_another_process_holds_is_shown_without_a_context(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_context(*_: object) -> None:
        raise RuntimeError("CUDA-capable device(s) is/are busy or unavailable")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "mem_get_info", no_context)
    monkeypatch.setattr(doctor, "_overlap", lambda: Check("overlap", True, "tried elsewhere"))
    [gpu] = [
        check
        for check in doctor.check_features(pair_of_gpus(tmp_path))
        if check.feature == "benchmarks on GPU"
    ]
    row(gpu, True, "2 GPUs", "3.0 of 80.0 GiB in use")


@pytest.mark.parametrize(
    ("driver", "reason"),
    [("535.183.01", "torch cannot use it"), (None, "no NVIDIA driver here")],
)
def test_a_driver_is_told_from_none_where_there_is_no_nvidia_smi(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, driver: str | None, reason: str
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    checks_made = {check.feature: check for check in doctor.check_features(GpuFacts(driver))}
    row(checks_made["benchmarks on GPU"], False, reason)
    row(checks_made["overlap over NCCL"], False, "no GPU here")


def test_doctor_shows_the_gpus_and_their_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    found = pair_of_gpus(tmp_path, cuda=12020)
    monkeypatch.setattr(doctor, "find_gpus", lambda: found)
    monkeypatch.setattr(doctor, "check_features", lambda found: [])
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "8")
    doctor.Doctor().show_features()
    shown = capsys.readouterr().out
    for word in ("580.82.07", "GPU-00000001", "4 NVLinks", "1980", "DEFAULT", "2 of 8 granted"):
        assert word in shown
    assert "too old for this torch" in " ".join(shown.split())
    assert max(map(len, shown.splitlines())) <= 100


@pytest.mark.parametrize("hidden", ["", "-1", "NoDevFiles"])
def test_gpus_that_are_hidden_on_purpose_are_not_looked_for(
    monkeypatch: pytest.MonkeyPatch, hidden: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    monkeypatch.setattr(
        "common.runtime.machine.gpus.read_gpu_facts",
        lambda devices: pytest.fail("asked the driver"),
    )
    assert doctor.find_gpus() == GpuFacts()
