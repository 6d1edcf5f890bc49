"""A driver that tells what a test wants: a stand-in for pynvml, and GPUs of a sysfs tree."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

from common.runtime.machine.gpus import CudaDevice

GIB = 2**30


class NVMLError(Exception):
    """What pynvml raises."""


@dataclass
class FakeGpu:
    """Answers by query, without ``nvmlDeviceGet``; a query that is missing is not supported."""

    uuid: str
    bus_id: str
    answers: Mapping[str, object] = field(default_factory=dict)
    links: Sequence[str] = ()
    """Bus ids at the far ends of active NVLinks."""
    slice_of: FakeGpu | None = None

    def cuda(self) -> CudaDevice:
        """Returns the device as PyTorch shows it, with the UUID bare."""
        return CudaDevice("NVIDIA Pretend 80GB", self.uuid[4:], 80 * GIB)


def h100(number: int, **changed: object) -> FakeGpu:
    """Makes a GPU of known numbers; those of GPU 1 are 1 more than those of GPU 0."""
    answers = {
        "Name": "NVIDIA Pretend 80GB",
        "MemoryInfo": SimpleNamespace(total=81 * GIB, used=3 * GIB),
        "CudaComputeCapability": (9, 0),
        "ClockInfo": {1: 1200 + number, 2: 2600 + number},
        "MaxClockInfo": {1: 1980 + number, 2: 2619 + number},
        "ApplicationsClock": {1: 1755 + number, 2: 2610 + number},
        "PowerManagementLimit": 700_000 + 1000 * number,
        "PowerUsage": 71_500,
        "EccMode": [1, 0],
        "MigMode": [0, 1],
        "ComputeMode": 0,
        "PersistenceMode": 1,
        "CurrPcieLinkGeneration": 1,
        "MaxPcieLinkGeneration": 5,
        "CurrPcieLinkWidth": 8,
        "MaxPcieLinkWidth": 16,
    }
    bus = ("17", "B9")[number]
    return FakeGpu(f"GPU-0000000{number}", f"00000000:{bus}:00.0", answers | changed)


def fake_nvml(
    gpus: Sequence[FakeGpu],
    ancestor: int | None = 50,
    peer: Mapping[int, int] | None = None,
    driver: str = "580.82.07",
    cuda: int = 13000,
) -> SimpleNamespace:
    """Makes a module like pynvml for these GPUs.

    Args:
        ancestor: what the way over PCIe between any two passes through.
        peer: the peer-to-peer status of any two by capability (0: read, 2: NVLink).
        cuda: the driver's, 1000 times the major version and 10 times the minor one.
    """
    peer = {0: 0, 2: 0} if peer is None else peer
    opened = []

    def unsupported(*_: object) -> None:
        raise NVMLError("Not Supported")

    def by_uuid(uuid: str) -> FakeGpu:
        return next((gpu for gpu in gpus if gpu.uuid == uuid), None) or unsupported()

    def query(name: str) -> Callable:
        def ask(gpu: FakeGpu, *key: int) -> object:
            if name not in gpu.answers:
                unsupported()
            found = gpu.answers[name]
            return found[key[0]] if key else found

        return ask

    def answer(value: object) -> object:
        return unsupported() if value is None else value

    whole = [gpu for gpu in gpus if gpu.slice_of is None]
    module = SimpleNamespace(
        NVMLError=NVMLError,
        NVML_CLOCK_SM=1,
        NVML_CLOCK_MEM=2,
        NVML_NVLINK_MAX_LINKS=18,
        opened=opened,
        nvmlInit=lambda: opened.append(1),
        nvmlShutdown=lambda: opened.pop(),
        nvmlSystemGetDriverVersion=lambda: driver,
        nvmlSystemGetCudaDriverVersion_v2=lambda: cuda,
        nvmlDeviceGetCount=lambda: len(whole),
        nvmlDeviceGetHandleByIndex=lambda index: whole[index],
        nvmlDeviceGetHandleByUUID=by_uuid,
        nvmlDeviceGetUUID=lambda gpu: gpu.uuid,
        nvmlDeviceGetPciInfo=lambda gpu: SimpleNamespace(busId=gpu.bus_id.encode()),
        nvmlDeviceIsMigDeviceHandle=lambda gpu: SimpleNamespace(value=int(bool(gpu.slice_of))),
        nvmlDeviceGetDeviceHandleFromMigDeviceHandle=lambda gpu: gpu.slice_of,
        nvmlDeviceGetNvLinkState=lambda gpu, link: (
            int(link < len(gpu.links)) if gpu.links else unsupported()
        ),
        nvmlDeviceGetNvLinkRemotePciInfo=lambda gpu, link: SimpleNamespace(busId=gpu.links[link]),
        nvmlDeviceGetTopologyCommonAncestor=lambda one, other: answer(ancestor),
        nvmlDeviceGetP2PStatus=lambda one, other, index: answer(peer.get(index)),
    )
    for name in h100(0).answers:
        setattr(module, f"nvmlDeviceGet{name}", query(name))
    return module


def no_driver() -> SimpleNamespace:
    """Makes pynvml on a machine without NVIDIA's driver."""

    def missing() -> None:
        raise NVMLError("NVML Shared Library Not Found")

    return SimpleNamespace(NVMLError=NVMLError, nvmlInit=missing)


def sysfs(root: Path, devices: Mapping[str, int], cards: Mapping[str, str]) -> Path:
    """Makes a tree like /sys below a root; returns the root.

    Args:
        devices: the way of each PCI device from its root complex, such as
            ``pci0000:16/0000:16:01.0/0000:17:00.0``, and its NUMA node.
        cards: network cards (``net/eth0``, ``infiniband/mlx5_0``) and the devices they belong to.
    """
    links = root / "sys/bus/pci/devices"
    links.mkdir(parents=True)
    for path, node in devices.items():
        device = root / "sys/devices" / path
        device.mkdir(parents=True)
        (device / "numa_node").write_text(f"{node}\n")
        (device / "local_cpulist").write_text(f"{node * 16}-{node * 16 + 15}\n")
        (links / device.name).symlink_to(device)
    for card, name in cards.items():
        folder = root / "sys/class" / card
        folder.mkdir(parents=True)
        (folder / "device").symlink_to((links / name).resolve())
    (root / "sys/class/net/lo").mkdir(parents=True, exist_ok=True)
    return root
