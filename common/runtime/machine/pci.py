"""A card's place in the machine, read from Linux's sysfs: NUMA node and nearest network card."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

SYS = Path("/sys")


@dataclass(frozen=True)
class Nearest:
    """The network cards that are nearest to a GPU, all of them if several are equally near.

    ``by`` names what they share with it: ``PCIe`` (the longest common path from the root of the
    tree) or ``NUMA node``.
    """

    names: tuple[str, ...]
    by: str


def numa_node(bus_id: str, root: Path = SYS) -> int | None:
    """Returns the NUMA node of a PCI device; None if the system does not tell it.

    Args:
        bus_id: as NVML writes it (``00000000:17:00.0``) or sysfs does (``0000:17:00.0``).
        root: the folder mounted at ``/sys``.
    """
    try:
        node = int((_device(bus_id, root) / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None  # −1: the firmware does not say


def local_cores(bus_id: str, root: Path = SYS) -> str | None:
    """Returns the cores nearest to a PCI device, such as ``0-15,32-47``; None where unknown."""
    try:
        return (_device(bus_id, root) / "local_cpulist").read_text().strip() or None
    except OSError:
        return None


def nearest_card(bus_id: str, kind: str, root: Path = SYS) -> Nearest | None:
    """Returns the nearest cards of one kind; None if no card shares anything with the device.

    Args:
        bus_id: as in ``numa_node``.
        kind: a class of sysfs: ``net`` (network interfaces) or ``infiniband`` (its adapters).
        root: the folder mounted at ``/sys``.
    """
    own = _path(_device(bus_id, root), root)
    cards = {
        link.parent.name: _path(link, root)
        for link in sorted((root / "class" / kind).glob("*/device"))  # virtual ones have none
    }
    shared = {name: _common_length(own, path) for name, path in cards.items()}
    longest = max(shared.values(), default=0)
    if longest:
        return Nearest(tuple(name for name, length in shared.items() if length == longest), "PCIe")
    node = numa_node(bus_id, root)
    beside = tuple(name for name, path in cards.items() if _node_of_path(path, root) == node)
    return Nearest(beside, "NUMA node") if node is not None and beside else None


def _device(bus_id: str, root: Path) -> Path:
    """Returns a device's folder; NVML writes the PCI domain with eight digits, sysfs with four."""
    domain, _, rest = bus_id.lower().partition(":")
    return root / "bus" / "pci" / "devices" / f"{int(domain, 16):04x}:{rest}"


def _path(link: Path, root: Path) -> tuple[str, ...]:
    """Returns the path from the PCI root complex to a device; empty if it is no PCI device."""
    devices = (root / "devices").resolve()
    resolved = link.resolve()
    if not link.exists() or not resolved.is_relative_to(devices):
        return ()
    parts = resolved.relative_to(devices).parts
    return parts if parts and parts[0].startswith("pci") else ()


def _common_length(one: Sequence[str], other: Sequence[str]) -> int:
    length = 0
    for mine, its in zip(one, other, strict=False):
        if mine != its:
            break
        length += 1
    return length


def _node_of_path(path: Sequence[str], root: Path) -> int | None:
    """Returns the NUMA node of the last device on a path that has the file; None if unknown."""
    for length in range(len(path), 0, -1):
        found = root.joinpath("devices", *path[:length], "numa_node")
        if found.is_file():
            node = int(found.read_text())
            return node if node >= 0 else None
    return None
