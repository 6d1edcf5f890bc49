"""A GPU's place in the machine, read from Linux's sysfs: nearest cores and network cards."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ddplab_watch.files import ROOT, read_text
from ddplab_watch.nvml import pci_folder, pci_numa_node


@dataclass(frozen=True)
class Nearest:
    """The network cards that are nearest to a GPU, all of them if several are equally near.

    ``by`` names what they share with it: ``PCIe`` (the longest common path from the root of the
    tree) or ``NUMA node``.
    """

    names: tuple[str, ...]
    by: str


def local_cores(bus_id: str, root: Path = ROOT) -> str | None:
    """Returns the cores nearest to a PCI device, such as ``0-15,32-47``; None where unknown."""
    return read_text(pci_folder(bus_id, root) / "local_cpulist") or None


def nearest_card(bus_id: str, kind: str, root: Path = ROOT) -> Nearest | None:
    """Returns the nearest cards of one kind; None if no card shares anything with the device.

    ``kind`` is a class of sysfs: ``net`` (network interfaces) or ``infiniband`` (its adapters).
    """
    folder = pci_folder(bus_id, root)
    device_path = _path(folder, root)
    cards = {
        link.parent.name: _path(link, root)
        for link in sorted((root / "sys/class" / kind).glob("*/device"))  # virtual ones have none
    }
    shared = {name: _common_length(device_path, path) for name, path in cards.items()}
    longest = max(shared.values(), default=0)
    if longest:
        return Nearest(tuple(name for name, length in shared.items() if length == longest), "PCIe")
    node = pci_numa_node(folder)
    beside = tuple(name for name, path in cards.items() if _node_of_path(path, root) == node)
    return Nearest(beside, "NUMA node") if node is not None and beside else None


def _path(link: Path, root: Path) -> tuple[str, ...]:
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
