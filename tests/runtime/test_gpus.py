"""What a run and the watch record of GPUs: a driver and a sysfs tree of known numbers stand in."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from ddplab_watch import nvml
from ddplab_watch.surroundings import COLUMNS
from nvml_support import GIB, FakeGpu, fake_nvml, h100, no_driver, sysfs

from common.runtime.machine import environment, gpus
from common.runtime.machine.environment import describe_environment
from common.runtime.machine.gpus import Clock, GpuFacts, GpuPair, Nearest, read_gpu_facts

SWITCH = "00000000:C4:00.0"
TREE = {
    "pci0000:16/0000:16:01.0/0000:17:00.0": 0,  # GPU 0
    "pci0000:16/0000:16:01.0/0000:18:00.0": 0,  # mlx5_0, on the same switch
    "pci0000:16/0000:16:02.0/0000:19:00.0": 0,  # eth0, on the same root complex
    "pci0000:b0/0000:b0:01.0/0000:b9:00.0": 1,  # GPU 1
    "pci0000:c0/0000:c0:01.0/0000:c1:00.0": 1,  # mlx5_1, on the same NUMA node only
}
CARDS = {
    "net/eth0": "0000:19:00.0",
    "infiniband/mlx5_0": "0000:18:00.0",
    "infiniband/mlx5_1": "0000:c1:00.0",
}
ALIKE = (
    *("name", "uuid", "bus_id", "numa_node", "power_limit_w", "compute_mode"),
    *("pcie_width", "pcie_width_max", "pcie_generation", "pcie_generation_max"),
)
"""Facts that the record of a run and that of the watch call by one name."""


def read(gpus: list[FakeGpu], root: Path, **driver: object) -> GpuFacts:
    """Reads GPUs that CUDA shows, from a driver that answers so."""
    return read_gpu_facts([gpu.cuda() for gpu in gpus], fake_nvml(gpus, **driver), root)


def test_two_gpus_are_read_with_all_their_numbers(tmp_path: Path) -> None:
    two = [h100(0), h100(1)]
    module = fake_nvml(two)
    found = read_gpu_facts([gpu.cuda() for gpu in two], module, sysfs(tmp_path, TREE, CARDS))
    assert (found.driver, found.driver_cuda, found.listed) == ("580.82.07", "13.0", 2)
    first, second = found.gpus
    assert (first.name, first.uuid) == ("NVIDIA Pretend 80GB", "GPU-00000000")
    assert (first.memory_bytes, first.compute_capability) == (80 * GIB, "9.0")
    assert first.memory_used_bytes == 3 * GIB
    assert first.sm_clock == Clock(1200, 1980, 1755)
    assert second.memory_clock == Clock(2601, 2620, 2611)
    assert (second.power_limit_w, second.power_draw_w) == (701.0, 71.5)
    # of a present and a pending state the present one counts
    assert (first.ecc, first.persistence) == (True, True)
    assert (first.mig_mode, first.mig_slice) == (False, False)
    assert first.compute_mode == "DEFAULT"
    assert (first.pcie_generation, first.pcie_generation_max) == (1, 5)
    assert (first.pcie_width, first.pcie_width_max) == (8, 16)
    row = nvml.gpu_facts(1, {}, module, root=tmp_path)  # that of the watch
    assert set(row) <= set(COLUMNS)
    assert {name: row[f"gpu_{name}"] for name in ALIKE} == {
        name: getattr(second, name) for name in ALIKE
    }
    assert (row["gpu_sm_clock_mhz"], row["gpu_sm_clock_max_mhz"]) == (1201, 1981)
    assert row["gpu_mig"] is False
    # This driver does not answer these questions.
    assert (row["gpu_throttle_reasons"], row["gpu_other_processes"]) == (None, None)
    assert module.opened == []  # NVML is closed again


def test_each_gpu_has_its_numa_node_and_its_nearest_network_cards(tmp_path: Path) -> None:
    two = [h100(0), h100(1)]
    first, second = read(two, sysfs(tmp_path, TREE, CARDS)).gpus
    assert (first.numa_node, first.local_cores) == (0, "0-15")
    assert (second.numa_node, second.local_cores) == (1, "16-31")
    assert first.nearest_infiniband == Nearest(("mlx5_0",), "PCIe")
    assert first.nearest_network == Nearest(("eth0",), "PCIe")
    assert second.nearest_infiniband == Nearest(("mlx5_1",), "NUMA node")
    assert second.nearest_network is None  # eth0 is on the other node


def test_a_machine_that_does_not_know_its_numa_nodes_has_none(tmp_path: Path) -> None:
    tree = sysfs(tmp_path, {"pci0000:16/0000:16:01.0/0000:17:00.0": -1}, {})
    [gpu] = read([h100(0)], tree).gpus
    assert (gpu.numa_node, gpu.nearest_network, gpu.nearest_infiniband) == (None, None, None)


def test_cudas_order_is_kept_where_the_drivers_is_another(tmp_path: Path) -> None:
    two = [h100(0), h100(1)]
    reversed_ = [gpu.cuda() for gpu in reversed(two)]
    found = read_gpu_facts(reversed_, fake_nvml(two), tmp_path)
    assert [gpu.sm_clock.current_mhz for gpu in found.gpus] == [1201, 1200]


def test_only_what_cuda_shows_is_read(tmp_path: Path) -> None:
    two = [h100(0), h100(1)]
    found = read_gpu_facts([two[1].cuda()], fake_nvml(two), tmp_path)
    assert [gpu.uuid for gpu in found.gpus] == ["GPU-00000001"]
    assert (found.pairs, found.listed) == ((), 2)


def test_a_gpu_that_refuses_queries_has_none_for_them_and_keeps_the_rest(tmp_path: Path) -> None:
    silent = FakeGpu("GPU-0000000s", "00000000:17:00.0", {"ComputeMode": 3})
    [gpu] = read([silent], tmp_path).gpus
    assert gpu.compute_mode == "EXCLUSIVE_PROCESS"
    assert gpu.sm_clock == Clock(None, None, None)
    unknown = (gpu.ecc, gpu.mig_mode, gpu.power_limit_w, gpu.persistence, gpu.pcie_width)
    assert set(unknown) == {None}
    assert not gpu.mig_slice


@pytest.mark.parametrize(
    ("ends", "peer", "nvlinks"),
    [
        ((["00000000:B9:00.0"] * 4, ["00000000:17:00.0"] * 4), {0: 0, 2: 0}, 4),
        (([SWITCH] * 18, [SWITCH] * 12), {0: 0, 2: 0}, 12),  # what both have up to the switch
        (([SWITCH] * 18, [SWITCH] * 12), {0: 0, 2: 5}, 0),  # to a switch of somebody else
        (([], []), {0: 0, 2: 5}, 0),
    ],
)
def test_the_nvlinks_between_two_gpus_are_counted(
    tmp_path: Path, ends: tuple, peer: dict, nvlinks: int
) -> None:
    two = [h100(0), h100(1)]
    for gpu, links in zip(two, ends, strict=True):
        gpu.links = links
    found = read(two, tmp_path, peer=peer)
    assert found.pairs == (GpuPair(0, 1, nvlinks, "different NUMA nodes", "ok"),)


def test_without_nvlink_the_way_over_pcie_and_what_forbids_peers_are_told(tmp_path: Path) -> None:
    two = [h100(0), h100(1)]
    [pair] = read(two, tmp_path, ancestor=10, peer={0: 1, 2: 5}).pairs
    assert (pair.nvlinks, pair.pcie) == (0, "one PCIe switch")
    assert pair.peer_to_peer == "the chipset does not support it"
    [silent] = read(two, tmp_path, ancestor=None, peer={}).pairs
    assert (silent.pcie, silent.peer_to_peer) == (None, None)


def test_a_slice_has_its_own_memory_and_the_clocks_of_its_gpu(tmp_path: Path) -> None:
    whole = h100(0, MigMode=[1, 1])
    part = FakeGpu("MIG-0000000m", "", slice_of=whole)
    shown = gpus.CudaDevice("NVIDIA Pretend 80GB MIG 1g.10gb", "0000000m", 10 * GIB)
    [gpu] = read_gpu_facts([shown], fake_nvml([whole, part]), tmp_path).gpus
    assert (gpu.mig_slice, gpu.mig_mode, gpu.memory_bytes) == (True, True, 10 * GIB)
    assert (gpu.uuid, gpu.sm_clock.max_mhz) == ("MIG-0000000m", 1980)


def test_a_split_gpu_that_cuda_shows_by_the_whole_gpus_uuid_is_a_slice(tmp_path: Path) -> None:
    [gpu] = read([h100(0, MigMode=[1, 1])], tmp_path).gpus
    assert gpu.mig_slice


def test_without_cuda_the_driver_lists_its_gpus(tmp_path: Path) -> None:
    found = read_gpu_facts(None, fake_nvml([h100(0), h100(1)], cuda=12040), tmp_path)
    assert [(gpu.name, gpu.memory_bytes) for gpu in found.gpus] == [
        ("NVIDIA Pretend 80GB", 81 * GIB)
    ] * 2
    assert found.driver_cuda == "12.4"


def test_without_a_driver_nothing_is_found(tmp_path: Path) -> None:
    found = read_gpu_facts(None, no_driver(), tmp_path)
    assert (found.driver, found.gpus, found.pairs) == (None, (), ())
    # what CUDA says is kept where only NVML is missing, as in some containers
    [gpu] = read_gpu_facts([h100(0).cuda()], no_driver(), tmp_path).gpus
    assert (gpu.name, gpu.memory_bytes, gpu.ecc) == ("NVIDIA Pretend 80GB", 80 * GIB, None)
    two = read_gpu_facts([h100(0).cuda(), h100(1).cuda()], no_driver(), tmp_path)
    assert (len(two.gpus), two.pairs) == (2, ())
    assert nvml.gpu_facts(0, {}, no_driver()) == {}


def row_of(**asked: object) -> dict[str, object]:
    """Reads the watch's row of GPU 0 from a driver that answers these questions, too."""
    driver = fake_nvml([h100(0), h100(1)])
    for name, answer in asked.items():
        setattr(driver, f"nvmlDeviceGet{name}", lambda handle, answer=answer: answer)
    return nvml.gpu_facts(0, {}, driver)


@pytest.mark.parametrize("name", ["CurrentClocksEventReasons", "CurrentClocksThrottleReasons"])
def test_reasons_for_lower_clocks_are_named_by_both_generations_of_drivers(name: str) -> None:
    assert row_of(**{name: 0x44})["gpu_throttle_reasons"] == "SwPowerCap HwThermalSlowdown"
    assert row_of(**{name: 0})["gpu_throttle_reasons"] == "none"


def test_other_processes_are_those_beside_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    others = [SimpleNamespace(pid=-1), SimpleNamespace(pid=-2)]
    own = SimpleNamespace(pid=os.getpid())
    asked = "ComputeRunningProcesses"
    assert row_of(**{asked: [own, *others]})["gpu_other_processes"] == 2
    assert row_of(**{asked: others})["gpu_other_processes"] == 2
    assert row_of(**{asked: []})["gpu_other_processes"] == 0
    # In a container the own process is listed under a number that it does not know.
    monkeypatch.setattr(nvml, "uses_cuda", lambda: True)
    monkeypatch.setattr(nvml, "cuda_uuid", lambda index: None)
    assert row_of(**{asked: others})["gpu_other_processes"] == 1
    assert row_of(**{asked: []})["gpu_other_processes"] is None


@pytest.mark.parametrize(
    ("index", "visible", "uuid", "expected"),
    [
        (1, None, None, "GPU-00000001"),
        (0, "1,0", None, "GPU-00000001"),
        (1, "GPU-00000001,GPU-00000000", None, "GPU-00000000"),
        (0, None, "00000001", "GPU-00000001"),  # torch writes it bare; it counts more than indices
        (2, "1,0", None, None),
        (0, "", None, None),
    ],
)
def test_the_gpu_is_the_one_that_cuda_means(index, visible, uuid, expected) -> None:
    env = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    facts = nvml.gpu_facts(index, env, fake_nvml([h100(0), h100(1)]), uuid)
    assert facts.get("gpu_uuid") == expected


def test_the_record_of_a_run_on_gpus_keeps_what_was_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    two = [h100(0), h100(1)]
    shared = {"name": "NVIDIA Pretend 80GB", "total_memory": 80 * GIB}
    properties = [SimpleNamespace(uuid=gpu.uuid[4:], **shared) for gpu in two]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties.__getitem__)
    monkeypatch.setattr(
        environment, "read_gpu_facts", lambda devices: read_gpu_facts(devices, fake_nvml(two))
    )
    record = describe_environment("nccl", "cuda", 2)
    assert record["device_name"] == "NVIDIA Pretend 80GB"
    assert record["network"] == "NCCL, 1 host × 2 ranks"
    assert record["hardware"] == "2 ranks, NVIDIA Pretend 80GB, nccl"
    assert (record["cuda"]["driver"], record["cuda"]["driver_cuda"]) == ("580.82.07", "13.0")
    assert record["cuda"]["build_cuda"] == torch.version.cuda
    first = record["gpus"][0]
    assert (first["name"], first["memory_bytes"]) == ("NVIDIA Pretend 80GB", 80 * GIB)
    assert first["sm_clock"]["application_mhz"] == 1755
    assert record["gpu_pairs"][0]["peer_to_peer"] == "ok"


def test_the_record_of_a_run_on_the_cpu_asks_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "read_gpu_facts", lambda devices: pytest.fail("asked"))
    record = describe_environment("gloo", "cpu", 2)
    assert (record["gpus"], record["gpu_pairs"], record["cuda"]) == ([], [], None)
    assert record["device_name"] == record["cpu"]["model"]
