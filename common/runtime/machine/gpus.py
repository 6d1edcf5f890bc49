"""Facts about all GPUs that this process sees, and their connections.

They are read by ``ddplab_watch.nvml``, a GPU's place in the machine from Linux's sysfs. A fact that
a GPU or a driver does not give is None. On a machine without a driver nothing is found, which is no
error.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from ddplab_watch.files import ROOT, read_text
from ddplab_watch.nvml import (
    MEMORY_CLOCK,
    SM_CLOCK,
    Device,
    Driver,
    opened,
    pci_folder,
    pci_numa_node,
    text,
    watts,
)

PCIE_LEVELS = {
    0: "the same board",
    10: "one PCIe switch",
    20: "several PCIe switches",
    30: "one PCIe host bridge",
    40: "one NUMA node",
    50: "different NUMA nodes",
}
"""nvmlGpuTopologyLevel_t: the parts that the PCIe path between two GPUs passes through."""
# nvmlGpuP2PCapsIndex_t. The binding's own name for the first is a tuple (a comma too many).
P2P_READ, P2P_NVLINK = 0, 2
P2P_STATUS = {
    0: "ok",
    1: "the chipset does not support it",
    2: "the GPU does not support it",
    3: "the topology of the I/O hubs does not support it",
    4: "switched off in the driver's settings",
    5: "not supported",
}


@dataclass(frozen=True)
class CudaDevice:
    """A GPU as CUDA numbers it in this process; ``uuid`` is that of the GPU or its MIG slice."""

    name: str
    uuid: str
    memory_bytes: int


@dataclass(frozen=True)
class Clock:
    """A clock in MHz: its present rate, its maximum, and the rate set for applications."""

    current_mhz: int | None
    max_mhz: int | None
    application_mhz: int | None


@dataclass(frozen=True)
class Nearest:
    """The network cards that are nearest to a GPU, all of them if several are equally near.

    ``by`` names what they share with it: ``PCIe`` (the longest common path from the root of the
    tree) or ``NUMA node``.
    """

    names: tuple[str, ...]
    by: str


@dataclass(frozen=True)
class Gpu:
    """One visible GPU.

    Attributes:
        memory_bytes: memory of the MIG slice, if this is one, else of the GPU.
        memory_used_bytes: memory used by all processes and by the driver itself.
        power_limit_w, power_draw_w: watts allowed, and drawn now.
        mig_mode: True if the GPU is split into MIG slices.
        mig_slice: True if the device that this process sees is such a slice.
        compute_mode: DEFAULT lets several processes use it, EXCLUSIVE_PROCESS one.
        pcie_generation, pcie_width: present values (an idle link may be slower); with ``_max``, the
            largest.
        local_cores: cores of its NUMA node, as Linux writes them.
    """

    name: str
    uuid: str | None
    memory_bytes: int | None
    memory_used_bytes: int | None
    compute_capability: str | None
    bus_id: str | None
    sm_clock: Clock
    memory_clock: Clock
    power_limit_w: float | None
    power_draw_w: float | None
    ecc: bool | None
    mig_mode: bool | None
    mig_slice: bool
    compute_mode: str | None
    persistence: bool | None
    pcie_generation: int | None
    pcie_generation_max: int | None
    pcie_width: int | None
    pcie_width_max: int | None
    numa_node: int | None
    local_cores: str | None
    nearest_network: Nearest | None
    nearest_infiniband: Nearest | None


@dataclass(frozen=True)
class GpuPair:
    """The connection of two visible GPUs, which are named by their index in the list.

    Attributes:
        nvlinks: active NVLinks between them, or up to the switch that joins them; 0 for none.
        pcie: the parts that the PCIe path between them passes through.
        peer_to_peer: ``ok`` if one can read the other's memory, else the reason why not.
    """

    first: int
    second: int
    nvlinks: int | None
    pcie: str | None
    peer_to_peer: str | None


@dataclass(frozen=True)
class GpuFacts:
    """The driver, the newest CUDA that it can run, the visible GPUs and their connections.

    ``listed`` counts the GPUs that the driver lists. CUDA_VISIBLE_DEVICES does not change it; a
    job whose other GPUs are hidden by a cgroup has fewer.
    """

    driver: str | None = None
    driver_cuda: str | None = None
    listed: int | None = None
    gpus: tuple[Gpu, ...] = ()
    pairs: tuple[GpuPair, ...] = ()


def cuda_devices() -> list[CudaDevice]:
    """Returns the GPUs that CUDA shows this process, in its order; none where it cannot be used.

    PyTorch reads their properties without making a context on any.
    """
    import torch

    if not torch.cuda.is_available():
        return []
    properties = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return [CudaDevice(gpu.name, str(gpu.uuid), gpu.total_memory) for gpu in properties]


def build_versions() -> dict[str, str | None]:
    """Returns the versions of CUDA and NCCL in this torch; None for one it lacks.

    Keys: build_cuda, nccl (as loaded), and build_nccl where torch was built with another than this.
    """
    import torch

    from common.runtime.group.nccl import loaded_version

    built = torch.cuda.nccl.version() if hasattr(torch._C, "_nccl_version") else None
    loaded = loaded_version() or built
    versions = {"build_cuda": torch.version.cuda, "nccl": _dotted(loaded)}
    return versions if built == loaded else versions | {"build_nccl": _dotted(built)}


def _dotted(version: Sequence[int] | None) -> str | None:
    return None if version is None else ".".join(map(str, version))


def read_gpu_facts(
    devices: Sequence[CudaDevice] | None, nvml: ModuleType | None = None, root: Path = ROOT
) -> GpuFacts:
    """Reads the facts of these devices from NVML and sysfs, in the order of the devices.

    Args:
        devices: devices that CUDA shows; None for all that the driver lists, for machines where
            CUDA cannot be used.
        nvml: the module that speaks to the driver; by default pynvml.
    """
    with opened(nvml) as driver:
        listed = driver.ask("nvmlDeviceGetCount")
        if devices is None:
            count = listed or 0
            handles = [driver.ask("nvmlDeviceGetHandleByIndex", index) for index in range(count)]
            cuda_gpus: Sequence[CudaDevice | None] = [None] * count
        else:
            handles = [driver.handle_of(device.uuid) for device in devices]
            cuda_gpus = devices
        nvml_devices = [Device(driver, handle) for handle in handles]
        version = driver.ask("nvmlSystemGetCudaDriverVersion_v2")
        return GpuFacts(
            driver=text(driver.ask("nvmlSystemGetDriverVersion")),
            driver_cuda=f"{version // 1000}.{version % 1000 // 10}" if version else None,
            listed=listed,
            gpus=tuple(
                _gpu(device, cuda, root)
                for device, cuda in zip(nvml_devices, cuda_gpus, strict=True)
            ),
            pairs=tuple(
                _pair(driver, nvml_devices, first, second)
                for second in range(len(nvml_devices) if listed else 0)
                for first in range(second)
            ),
        )


def _gpu(device: Device, cuda: CudaDevice | None, root: Path) -> Gpu:
    """Reads one GPU; ``cuda`` is what CUDA says of it, where CUDA was asked."""
    ask, gpu, facts = device.ask, device.whole, device.facts(root)
    memory = ask("nvmlDeviceGetMemoryInfo", device.handle)
    capability = ask("nvmlDeviceGetCudaComputeCapability", gpu)
    ecc = ask("nvmlDeviceGetEccMode", gpu)
    persistence = ask("nvmlDeviceGetPersistenceMode", gpu)
    bus_id, is_split = facts.get("gpu_bus_id"), facts.get("gpu_mig")
    return Gpu(
        name=cuda.name if cuda else facts.get("gpu_name") or "",
        uuid=facts.get("gpu_uuid") or (cuda.uuid if cuda else None),
        memory_bytes=cuda.memory_bytes if cuda else (memory.total if memory else None),
        memory_used_bytes=memory.used if memory else None,
        compute_capability=".".join(map(str, capability)) if capability else None,
        bus_id=bus_id,
        sm_clock=_clock(device, SM_CLOCK),
        memory_clock=_clock(device, MEMORY_CLOCK),
        power_limit_w=facts.get("gpu_power_limit_w"),
        power_draw_w=watts(ask("nvmlDeviceGetPowerUsage", gpu)),
        ecc=None if ecc is None else bool(ecc[0]),  # the present mode, and the pending one
        mig_mode=is_split,
        # CUDA may give a slice the UUID of its GPU, but never computes on a GPU that is split.
        mig_slice=device.is_slice or bool(is_split and cuda),
        compute_mode=facts.get("gpu_compute_mode"),
        persistence=None if persistence is None else bool(persistence),
        pcie_generation=facts.get("gpu_pcie_generation"),
        pcie_generation_max=facts.get("gpu_pcie_generation_max"),
        pcie_width=facts.get("gpu_pcie_width"),
        pcie_width_max=facts.get("gpu_pcie_width_max"),
        numa_node=facts.get("gpu_numa_node"),
        local_cores=_local_cores(bus_id, root) if bus_id else None,
        nearest_network=_nearest_card(bus_id, "net", root) if bus_id else None,
        nearest_infiniband=_nearest_card(bus_id, "infiniband", root) if bus_id else None,
    )


def _clock(device: Device, kind: int) -> Clock:
    return Clock(
        current_mhz=device.ask("nvmlDeviceGetClockInfo", device.whole, kind),
        max_mhz=device.ask("nvmlDeviceGetMaxClockInfo", device.whole, kind),
        application_mhz=device.ask("nvmlDeviceGetApplicationsClock", device.whole, kind),
    )


def _pair(driver: Driver, devices: Sequence[Device], first: int, second: int) -> GpuPair:
    two = devices[first].whole, devices[second].whole
    status = driver.ask("nvmlDeviceGetP2PStatus", *two, P2P_READ)
    return GpuPair(
        first=first,
        second=second,
        nvlinks=_nvlinks(devices[first], devices[second]),
        pcie=PCIE_LEVELS.get(driver.ask("nvmlDeviceGetTopologyCommonAncestor", *two)),
        peer_to_peer=None if status is None else P2P_STATUS.get(status, "unknown"),
    )


def _nvlinks(first: Device, second: Device) -> int | None:
    """Returns the number of NVLinks between two GPUs; if a switch joins them, the smaller one.

    None if a handle is unknown.
    """
    if first.whole is None or second.whole is None:
        return None
    ends = _far_ends(first), _far_ends(second)
    bus_id = second.bus_id()
    direct = ends[0].count(bus_id) if bus_id is not None else 0
    if direct or first.ask("nvmlDeviceGetP2PStatus", first.whole, second.whole, P2P_NVLINK) != 0:
        return direct
    return min(map(len, ends))


def _far_ends(device: Device) -> list[str | None]:
    """Returns the PCI bus id at the far end of each active NVLink of a GPU."""
    ask, gpu = device.ask, device.whole
    links = range(device.driver.nvml.NVML_NVLINK_MAX_LINKS)
    active = [link for link in links if ask("nvmlDeviceGetNvLinkState", gpu, link) == 1]
    ends = [ask("nvmlDeviceGetNvLinkRemotePciInfo", gpu, link) for link in active]
    return [None if pci is None else text(pci.busId) for pci in ends]


def _local_cores(bus_id: str, root: Path) -> str | None:
    """Returns the cores nearest to a PCI device, such as ``0-15,32-47``; None where unknown."""
    return read_text(pci_folder(bus_id, root) / "local_cpulist") or None


def _nearest_card(bus_id: str, kind: str, root: Path) -> Nearest | None:
    """Returns the nearest cards of one kind; None if no card shares anything with the device.

    ``kind`` is a class of sysfs: ``net`` (network interfaces) or ``infiniband`` (its adapters).
    """
    folder = pci_folder(bus_id, root)
    device_path = _pci_path(folder, root)
    cards = {
        link.parent.name: _pci_path(link, root)
        for link in sorted((root / "sys/class" / kind).glob("*/device"))  # virtual ones have none
    }
    shared = {name: _common_length(device_path, path) for name, path in cards.items()}
    longest = max(shared.values(), default=0)
    if longest:
        return Nearest(tuple(name for name, length in shared.items() if length == longest), "PCIe")
    node = pci_numa_node(folder)
    beside = tuple(name for name, path in cards.items() if _node_of_path(path, root) == node)
    return Nearest(beside, "NUMA node") if node is not None and beside else None


def _pci_path(link: Path, root: Path) -> tuple[str, ...]:
    """Returns the path from the PCI root complex to a device; empty if it is no PCI device."""
    devices = (root / "sys/devices").resolve()
    resolved = link.resolve()
    if not link.exists() or not resolved.is_relative_to(devices):
        return ()
    parts = resolved.relative_to(devices).parts
    return parts if parts and parts[0].startswith("pci") else ()


def _common_length(first: Sequence[str], second: Sequence[str]) -> int:
    pairs = zip(first, second, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def _node_of_path(path: Sequence[str], root: Path) -> int | None:
    """Returns the NUMA node of the last device on a path that has the file; None if unknown."""
    for length in range(len(path), 0, -1):
        folder = root.joinpath("sys/devices", *path[:length])
        if (folder / "numa_node").is_file():
            return pci_numa_node(folder)
    return None
