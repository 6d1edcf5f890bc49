"""Facts about the GPUs that this process sees, from the driver by NVML (``nvidia-ml-py``).

NVML makes no CUDA context. A fact that a GPU or a driver does not give is None. On a machine
without a driver nothing is found, which is no error.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from common.runtime.machine.pci import SYS, Nearest, local_cores, nearest_card, numa_node

COMPUTE_MODES = {0: "DEFAULT", 1: "EXCLUSIVE_THREAD", 2: "PROHIBITED", 3: "EXCLUSIVE_PROCESS"}
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
class Gpu:
    """One visible GPU.

    Attributes:
        memory_bytes: memory of the MIG slice, if this is one, else of the GPU.
        memory_used_bytes: memory used by all processes and by the driver itself.
        power_limit_w, power_draw_w: in watts.
        mig_mode: True if the GPU is split into MIG slices.
        mig_slice: True if the device that this process sees is such a slice.
        compute_mode: DEFAULT lets several processes use it, EXCLUSIVE_PROCESS one.
        pcie_generation, pcie_width: now (an idle link may be slower); with ``_max``, at most.
        local_cores: those of its NUMA node, as Linux writes them.
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
    found = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return [CudaDevice(one.name, str(one.uuid), one.total_memory) for one in found]


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
    devices: Sequence[CudaDevice] | None, nvml: ModuleType | None = None, root: Path = SYS
) -> GpuFacts:
    """Reads the facts of these devices from NVML and sysfs, in the order of the devices.

    Args:
        devices: those that CUDA shows; None for all that the driver lists, for machines where CUDA
            cannot be used.
        nvml: the module that speaks to the driver; by default pynvml.
        root: the folder mounted at ``/sys``.
    """
    if nvml is None:
        import pynvml as nvml
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return GpuFacts(gpus=tuple(_unknown(device) for device in devices or ()))
    try:
        return _Reader(nvml, root).read(devices)
    finally:
        nvml.nvmlShutdown()


class _Reader:
    """The open connection to the driver."""

    def __init__(self, nvml: ModuleType, root: Path) -> None:
        self.nvml = nvml
        self.root = root

    def ask(self, query: str, *arguments: Any) -> Any:
        """Returns the answer to one query; None if it is not supported or an argument is None."""
        if None in arguments:
            return None
        try:
            return getattr(self.nvml, query)(*arguments)
        except self.nvml.NVMLError:
            return None

    def read(self, devices: Sequence[CudaDevice] | None) -> GpuFacts:
        listed = self.ask("nvmlDeviceGetCount")
        if devices is None:
            count = listed or 0
            handles = [self.ask("nvmlDeviceGetHandleByIndex", index) for index in range(count)]
            known: list[CudaDevice | None] = [None] * count
        else:
            known = list(devices)
            handles = [self.handle_of(device.uuid) for device in devices]
        # Most queries need the whole GPU, even if only a slice of it is visible.
        whole = [self.whole_gpu(handle) for handle in handles]
        version = self.ask("nvmlSystemGetCudaDriverVersion_v2")
        return GpuFacts(
            driver=_text(self.ask("nvmlSystemGetDriverVersion")),
            driver_cuda=f"{version // 1000}.{version % 1000 // 10}" if version else None,
            listed=listed,
            gpus=tuple(
                self.gpu(handle, gpu, device)
                for handle, gpu, device in zip(handles, whole, known, strict=True)
            ),
            pairs=tuple(
                self.pair(whole, first, second)
                for second in range(len(whole))
                for first in range(second)
            ),
        )

    def handle_of(self, uuid: str) -> Any:
        """Returns NVML's handle of the device with a UUID of CUDA's; None if there is none.

        CUDA's order may differ from NVML's, and CUDA writes UUIDs without the prefix GPU or MIG.
        """
        bare = uuid.removeprefix("GPU-").removeprefix("MIG-")
        for kind in ("GPU", "MIG"):
            handle = self.ask("nvmlDeviceGetHandleByUUID", f"{kind}-{bare}")
            if handle is not None:
                return handle
        return None

    def is_slice(self, handle: Any) -> bool:
        found = self.ask("nvmlDeviceIsMigDeviceHandle", handle)
        return bool(getattr(found, "value", found))  # some versions return a c_uint

    def whole_gpu(self, handle: Any) -> Any:
        if self.is_slice(handle):
            return self.ask("nvmlDeviceGetDeviceHandleFromMigDeviceHandle", handle)
        return handle

    def gpu(self, handle: Any, whole: Any, device: CudaDevice | None) -> Gpu:
        memory = self.ask("nvmlDeviceGetMemoryInfo", handle)
        capability = self.ask("nvmlDeviceGetCudaComputeCapability", whole)
        pci = self.ask("nvmlDeviceGetPciInfo", whole)
        bus_id = _text(pci.busId) if pci is not None else None
        split = _first_is_on(self.ask("nvmlDeviceGetMigMode", whole))
        limit_mw = self.ask("nvmlDeviceGetPowerManagementLimit", whole)
        draw_mw = self.ask("nvmlDeviceGetPowerUsage", whole)
        return Gpu(
            name=device.name if device else _text(self.ask("nvmlDeviceGetName", handle)) or "",
            uuid=_text(self.ask("nvmlDeviceGetUUID", handle)) or (device.uuid if device else None),
            memory_bytes=device.memory_bytes if device else (memory.total if memory else None),
            memory_used_bytes=memory.used if memory else None,
            compute_capability=".".join(map(str, capability)) if capability else None,
            bus_id=bus_id,
            sm_clock=self.clock(whole, self.nvml.NVML_CLOCK_SM),
            memory_clock=self.clock(whole, self.nvml.NVML_CLOCK_MEM),
            power_limit_w=None if limit_mw is None else limit_mw / 1e3,
            power_draw_w=None if draw_mw is None else draw_mw / 1e3,
            ecc=_first_is_on(self.ask("nvmlDeviceGetEccMode", whole)),
            mig_mode=split,
            # CUDA may give a slice the UUID of its GPU, but never computes on a GPU that is split.
            mig_slice=self.is_slice(handle) or bool(split and device),
            compute_mode=COMPUTE_MODES.get(self.ask("nvmlDeviceGetComputeMode", whole)),
            persistence=_is_on(self.ask("nvmlDeviceGetPersistenceMode", whole)),
            pcie_generation=self.ask("nvmlDeviceGetCurrPcieLinkGeneration", whole),
            pcie_generation_max=self.ask("nvmlDeviceGetMaxPcieLinkGeneration", whole),
            pcie_width=self.ask("nvmlDeviceGetCurrPcieLinkWidth", whole),
            pcie_width_max=self.ask("nvmlDeviceGetMaxPcieLinkWidth", whole),
            numa_node=numa_node(bus_id, self.root) if bus_id else None,
            local_cores=local_cores(bus_id, self.root) if bus_id else None,
            nearest_network=nearest_card(bus_id, "net", self.root) if bus_id else None,
            nearest_infiniband=nearest_card(bus_id, "infiniband", self.root) if bus_id else None,
        )

    def clock(self, handle: Any, kind: int) -> Clock:
        return Clock(
            current_mhz=self.ask("nvmlDeviceGetClockInfo", handle, kind),
            max_mhz=self.ask("nvmlDeviceGetMaxClockInfo", handle, kind),
            application_mhz=self.ask("nvmlDeviceGetApplicationsClock", handle, kind),
        )

    def pair(self, handles: Sequence[Any], first: int, second: int) -> GpuPair:
        two = handles[first], handles[second]
        status = self.ask("nvmlDeviceGetP2PStatus", *two, P2P_READ)
        return GpuPair(
            first=first,
            second=second,
            nvlinks=self.nvlinks(*two),
            pcie=PCIE_LEVELS.get(self.ask("nvmlDeviceGetTopologyCommonAncestor", *two)),
            peer_to_peer=None if status is None else P2P_STATUS.get(status, "unknown"),
        )

    def nvlinks(self, one: Any, other: Any) -> int | None:
        """Returns the number of NVLinks between two GPUs; if a switch joins them, the smaller one.

        None if a handle is unknown.
        """
        if one is None or other is None:
            return None
        ends = self.far_ends(one), self.far_ends(other)
        bus_id = self.ask("nvmlDeviceGetPciInfo", other)
        direct = ends[0].count(_text(bus_id.busId)) if bus_id is not None else 0
        if direct or self.ask("nvmlDeviceGetP2PStatus", one, other, P2P_NVLINK) != 0:
            return direct
        return min(map(len, ends))

    def far_ends(self, handle: Any) -> list[str | None]:
        """Returns the PCI bus id at the far end of each active NVLink of a GPU."""
        links = range(self.nvml.NVML_NVLINK_MAX_LINKS)
        active = [i for i in links if self.ask("nvmlDeviceGetNvLinkState", handle, i) == 1]
        found = [self.ask("nvmlDeviceGetNvLinkRemotePciInfo", handle, i) for i in active]
        return [None if pci is None else _text(pci.busId) for pci in found]


def _unknown(device: CudaDevice) -> Gpu:
    """Makes the record of a GPU of which only CUDA's name, UUID and memory are known."""
    facts: dict[str, Any] = dict.fromkeys(Gpu.__dataclass_fields__)
    clock = Clock(None, None, None)
    facts.update(sm_clock=clock, memory_clock=clock, mig_slice=False)
    facts.update(name=device.name, uuid=device.uuid, memory_bytes=device.memory_bytes)
    return Gpu(**facts)


def _text(value: str | bytes | None) -> str | None:
    return value.decode() if isinstance(value, bytes) else value


def _is_on(value: int | None) -> bool | None:
    return None if value is None else bool(value)


def _first_is_on(values: Sequence[int] | None) -> bool | None:
    """Returns the present state; NVML gives the present one and the pending one."""
    return None if values is None else bool(values[0])
