"""Facts about GPUs, from the driver by NVML where pynvml can be imported.

NVML makes no CUDA context and needs none. What a GPU or a driver does not give is None. Bits and
functions are those of NVIDIA's NVML API reference.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any

from ddplab_watch.files import ROOT, read_integer

REASONS = {
    0x001: "GpuIdle",
    0x002: "ApplicationsClocksSetting",
    0x004: "SwPowerCap",
    0x008: "HwSlowdown",
    0x010: "SyncBoost",
    0x020: "SwThermalSlowdown",
    0x040: "HwThermalSlowdown",
    0x080: "HwPowerBrakeSlowdown",
    0x100: "DisplayClockSetting",
}
"""Reasons for lower clocks, by bit (nvmlClocksEventReasons)."""
SM_CLOCK, MEMORY_CLOCK = 1, 2
"""Kinds of clocks (nvmlClockType)."""
COMPUTE_MODES = {0: "DEFAULT", 1: "EXCLUSIVE_THREAD", 2: "PROHIBITED", 3: "EXCLUSIVE_PROCESS"}


def gpu_facts(
    device_index: int,
    env: Mapping[str, str] = os.environ,
    nvml: ModuleType | None = None,
    uuid: str | None = None,
    root: Path = ROOT,
) -> dict[str, Any]:
    """Returns the facts of a GPU by the columns ``gpu_…``; none where there is no driver or GPU.

    Args:
        device_index: the GPU as CUDA numbers it in this process.
        env: the variables, of which CUDA_VISIBLE_DEVICES is read where CUDA was not asked.
        nvml: the module that speaks to the driver; by default pynvml, if it can be imported.
        uuid: the GPU's, by default as torch says where it has begun to use CUDA.
        root: the root of the file system.
    """
    with opened(nvml) as driver:
        uuid = uuid or cuda_uuid(device_index)
        return Device(driver, driver.visible_handle(device_index, uuid, env)).facts(root)


@contextmanager
def opened(nvml: ModuleType | None = None) -> Iterator[Driver]:
    """Opens the connection to the driver; one that answers nothing where there is none.

    Args:
        nvml: the module that speaks to the driver; by default pynvml, if it can be imported.
    """
    if nvml is None:
        with suppress(ImportError):
            import pynvml as nvml
    if nvml is not None:
        try:
            nvml.nvmlInit()
        except nvml.NVMLError:
            nvml = None
    try:
        yield Driver(nvml)
    finally:
        if nvml is not None:
            nvml.nvmlShutdown()


def uses_cuda() -> bool:
    """Returns True if this process has begun to use CUDA. It is not made to begin."""
    torch = sys.modules.get("torch")
    return torch is not None and torch.cuda.is_initialized()


def cuda_uuid(device_index: int) -> str | None:
    """Returns a GPU's UUID as torch says it; None where CUDA is not in use, or torch too old."""
    if not uses_cuda():
        return None
    properties = sys.modules["torch"].cuda.get_device_properties(device_index)
    uuid = getattr(properties, "uuid", None)
    return None if uuid is None else str(uuid)


def pci_folder(bus_id: str, root: Path = ROOT) -> Path:
    """Returns a PCI device's folder in sysfs.

    Args:
        bus_id: as NVML writes it (``00000000:17:00.0``) or sysfs does (``0000:17:00.0``).
        root: the root of the file system.
    """
    domain, _, address = bus_id.lower().partition(":")
    return root / "sys/bus/pci/devices" / f"{int(domain, 16):04x}:{address}"


def pci_numa_node(folder: Path) -> int | None:
    """Returns the NUMA node of the PCI device with this folder; None where nobody tells."""
    node = read_integer(folder / "numa_node")
    return node if node is not None and node >= 0 else None  # -1: the firmware does not say


class Driver:
    """The open connection to the driver; without one (None) no question has an answer."""

    def __init__(self, nvml: ModuleType | None) -> None:
        self.nvml = nvml

    def ask(self, query: str, *arguments: Any) -> Any:
        """Returns the answer to a question; None where it is not supported or nobody to ask."""
        if None in arguments or not hasattr(self.nvml, query):
            return None
        try:
            return getattr(self.nvml, query)(*arguments)
        except self.nvml.NVMLError:
            return None

    def handle_of(self, uuid: str) -> Any:
        """Returns the handle of the GPU or slice with a UUID of CUDA's; None if there is none.

        CUDA's order may differ from NVML's, and CUDA writes UUIDs without the prefix GPU or MIG.
        """
        bare = uuid.removeprefix("GPU-").removeprefix("MIG-")
        for kind in ("GPU", "MIG"):
            handle = self.ask("nvmlDeviceGetHandleByUUID", f"{kind}-{bare}")
            if handle is not None:
                return handle
        return None

    def visible_handle(self, device_index: int, uuid: str | None, env: Mapping[str, str]) -> Any:
        """Returns the handle of a GPU by its UUID, or else as the variables number it."""
        if uuid is not None:
            return self.handle_of(uuid)
        visible = env.get("CUDA_VISIBLE_DEVICES")
        entries = [] if visible is None else [entry.strip() for entry in visible.split(",")]
        if visible is not None and device_index >= len(entries):
            return None
        entry = entries[device_index] if entries else str(device_index)
        if entry.isdigit():
            return self.ask("nvmlDeviceGetHandleByIndex", int(entry))
        return self.handle_of(entry)


class Device:
    """A GPU, or a MIG slice of one, as the driver knows it."""

    def __init__(self, driver: Driver, handle: Any) -> None:
        self.driver, self.handle, self.ask = driver, handle, driver.ask
        self.whole = handle  # most questions are answered for the whole GPU only
        answer = self.ask("nvmlDeviceIsMigDeviceHandle", handle)
        self.is_slice = bool(getattr(answer, "value", answer))  # some versions return a c_uint
        if self.is_slice:
            self.whole = self.ask("nvmlDeviceGetDeviceHandleFromMigDeviceHandle", handle)

    def bus_id(self) -> str | None:
        """Returns the GPU's id on the PCI bus, as NVML writes it."""
        return text(getattr(self.ask("nvmlDeviceGetPciInfo", self.whole), "busId", None))

    def facts(self, root: Path = ROOT) -> dict[str, Any]:
        """Returns the row's columns of this GPU; none of one that the driver does not know."""
        if self.handle is None:
            return {}
        gpu = self.whole
        bus_id = self.bus_id()
        mode = self.ask("nvmlDeviceGetMigMode", gpu)
        utilisation = self.ask("nvmlDeviceGetUtilizationRates", gpu)
        return {
            "gpu_uuid": text(self.ask("nvmlDeviceGetUUID", self.handle)),
            "gpu_name": text(self.ask("nvmlDeviceGetName", gpu)),
            "gpu_bus_id": bus_id,
            "gpu_numa_node": pci_numa_node(pci_folder(bus_id, root)) if bus_id else None,
            "gpu_pcie_width": self.ask("nvmlDeviceGetCurrPcieLinkWidth", gpu),
            "gpu_pcie_width_max": self.ask("nvmlDeviceGetMaxPcieLinkWidth", gpu),
            "gpu_pcie_generation": self.ask("nvmlDeviceGetCurrPcieLinkGeneration", gpu),
            "gpu_pcie_generation_max": self.ask("nvmlDeviceGetMaxPcieLinkGeneration", gpu),
            "gpu_sm_clock_mhz": self.ask("nvmlDeviceGetClockInfo", gpu, SM_CLOCK),
            "gpu_sm_clock_max_mhz": self.ask("nvmlDeviceGetMaxClockInfo", gpu, SM_CLOCK),
            "gpu_throttle_reasons": self.throttle_reasons(),
            "gpu_power_limit_w": watts(self.ask("nvmlDeviceGetPowerManagementLimit", gpu)),
            "gpu_power_default_w": watts(self.ask("nvmlDeviceGetPowerManagementDefaultLimit", gpu)),
            "gpu_utilisation_share": None if utilisation is None else utilisation.gpu / 100,
            "gpu_mig": self.is_slice or (None if mode is None else bool(mode[0])),
            "gpu_compute_mode": COMPUTE_MODES.get(self.ask("nvmlDeviceGetComputeMode", gpu)),
            "gpu_other_processes": self.other_processes(),
        }

    def throttle_reasons(self) -> str | None:
        """Returns the names of the reasons, ``none`` where clocks are free; None where unknown."""
        bits = self.ask("nvmlDeviceGetCurrentClocksEventReasons", self.whole)
        if bits is None:  # the name before driver 535
            bits = self.ask("nvmlDeviceGetCurrentClocksThrottleReasons", self.whole)
        if bits is None:
            return None
        return " ".join(name for bit, name in REASONS.items() if bits & bit) or "none"

    def other_processes(self) -> int | None:
        """Returns the number of other processes that compute on the GPU.

        In a container this process is listed under a number that it does not know, so one of the
        list is taken to be it where it uses CUDA; and a list that lacks it is no list.
        """
        listed = self.ask("nvmlDeviceGetComputeRunningProcesses", self.handle)
        if listed is None:
            return None
        is_listed = uses_cuda() or any(process.pid == os.getpid() for process in listed)
        if is_listed and not listed:
            return None
        return len(listed) - is_listed


def text(value: str | bytes | None) -> str | None:
    """Returns a text of NVML, which some versions give as bytes."""
    return value.decode() if isinstance(value, bytes) else value


def watts(milliwatts: int | None) -> float | None:
    """Returns a power of NVML in W; None for none."""
    return None if milliwatts is None else milliwatts / 1e3
