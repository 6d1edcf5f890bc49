"""Reads what ``nvidia-smi topo -m``, ``-q`` and ``dmon`` print, whole or an excerpt of it."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from itertools import takewhile

import pandas as pd

from common.traces.logs.text_lines import Line

DEVICE = re.compile(r"^(?:GPU|NIC|mlx\w+_)\d+$")
LINK = re.compile(r"^(?:X|NV\d+|PIX|PXB|PHB|NODE|SYS|SOC|N/A)$")
GPU = re.compile(r"^GPU (?:[0-9A-Fa-f]{4,8}:)?([0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.\d)\s*$")
ENTRY = re.compile(r"^(\s*)([A-Za-z][^:]*?)\s*(?::\s(.*))?$")
QUERY = ("NVSMI LOG", "Attached GPUs")
SECTIONS = (
    "Clocks Event Reasons", "Clocks Throttle Reasons", "GPU Link Info", "ECC Errors", "ECC Mode",
    "Remapped Rows", "Retired Pages", "Power Readings", "GPU Power Readings", "Temperature",
    "Clocks", "Max Clocks", "Utilization", "FB Memory Usage", "PCI", "Performance State",
)  # fmt: skip
"""Sections of ``-q`` by which an excerpt is known that does not name its GPU."""
BEGINNING = re.compile(
    "|".join(["^GPU [0-9A-Fa-f]", *QUERY, *(rf"^\s+{section}\s*$" for section in SECTIONS)])
)
NOT_SAID = "not said"


@dataclass(frozen=True)
class Topology:
    """A matrix of ``topo -m``: pair of devices → link, such as ``NV18`` or ``SYS``."""

    links: dict[tuple[str, str], str]
    where: str

    def between_gpus(self) -> dict[tuple[int, int], str]:
        """Returns the links between GPUs, each pair once, by their numbers."""
        return {
            (int(a[3:]), int(b[3:])): link
            for (a, b), link in self.links.items()
            if a[:3] == b[:3] == "GPU" and int(a[3:]) < int(b[3:])
        }

    def to_nics(self) -> dict[int, set[str]]:
        """Returns GPU → its links to network adapters."""
        links: dict[int, set[str]] = {}
        for (a, b), link in self.links.items():
            if a[:3] == "GPU" and b[:3] != "GPU":
                links.setdefault(int(a[3:]), set()).add(link)
        return links


@dataclass(frozen=True)
class GpuState:
    """A GPU of ``nvidia-smi -q``: path of an entry (``PCI/Bus``) → its text, and its place."""

    name: str
    values: dict[str, str]
    where: dict[str, str]

    def find(self, *ends: str) -> dict[str, str]:
        """Returns the entries whose path ends with one of these: path → value."""
        return {p: v for p, v in self.values.items() if any(p.endswith(end) for end in ends)}


@dataclass
class NvidiaSmi:
    """A reader of lines.

    Attributes:
        topologies: matrices of ``topo -m``.
        states: GPUs of ``-q``.
        samples: rows of ``dmon`` as read: column → number, with the place of the line.
    """

    topologies: list[Topology] = field(default_factory=list)
    states: list[GpuState] = field(default_factory=list)
    samples: list[dict[str, float | str]] = field(default_factory=list)
    _devices: list[str] = field(default_factory=list)
    _path: list[tuple[int, str]] = field(default_factory=list)
    _is_query: bool = False
    _columns: list[str] = field(default_factory=list)

    def take(self, line: Line) -> bool:
        """Takes a line; returns True if it is one of these."""
        if line.number == 1:
            self._devices, self._path, self._columns, self._is_query = [], [], [], False
        return self._take_matrix(line) or self._take_sample(line) or self._take_entry(line)

    def table(self) -> pd.DataFrame:
        """Returns ``dmon``'s rows, one per moment and GPU."""
        return pd.DataFrame(self.samples)

    def _take_matrix(self, line: Line) -> bool:
        if not line.text.lstrip().startswith(("GPU", "NIC", "mlx")):
            return False
        words = line.text.split()
        if not words or not DEVICE.match(words[0]):
            return False
        devices = list(takewhile(DEVICE.match, words))
        if words[0] == "GPU0" and (len(words) == 1 or devices[1:] or words[1] == "CPU"):
            self._devices = devices
            self.topologies.append(Topology({}, line.where))
            return True
        if not self._devices:
            return False
        links = self.topologies[-1].links
        for device, link in zip(self._devices, words[1:], strict=False):
            if not LINK.match(link):
                break
            if link not in ("X", "N/A"):
                links[words[0], device] = links[device, words[0]] = link
        return True

    def _take_sample(self, line: Line) -> bool:
        if not self._columns and "#" not in line.text:
            return False
        words = line.text.split()
        if words[:1] == ["#"] or words[:1] == ["#Date"] or line.text.startswith("#gpu"):
            names = [word.lstrip("#") for word in words if word != "#"]
            if "gpu" in names:
                self._columns = names
            return bool(self._columns)
        if not self._columns or len(words) != len(self._columns):
            return False
        row = dict(zip(self._columns, words, strict=True))
        numbers = {n: float(v) for n, v in row.items() if re.fullmatch(r"-?\d+(\.\d+)?", v)}
        if "gpu" not in numbers:
            return False
        self.samples.append(numbers | {"where": line.where})
        return True

    def _take_entry(self, line: Line) -> bool:
        if not self._is_query and not BEGINNING.search(line.text):
            return False
        text = line.text.expandtabs(4)
        if any(mark in text for mark in QUERY):
            self._is_query, self._path = True, []
            return True
        if match := GPU.match(text.strip()):
            self._is_query, self._path = True, []
            self.states.append(GpuState(match[1], {}, {}))
            return True
        match = ENTRY.match(text)
        if not match:
            return False
        indent, name, value = len(match[1]), match[2].strip(), match[3]
        if not self._is_query:
            if name not in SECTIONS or value is not None or not indent:
                return False
            self._is_query = True
            self.states.append(GpuState(NOT_SAID, {}, {}))
        if not self.states or not indent:
            self._is_query = self._is_query and not self.states
            return False
        self._path = [part for part in self._path if part[0] < indent]
        path = "/".join([*(part for _, part in self._path), name])
        if value is None:
            self._path.append((indent, name))
        else:
            self.states[-1].values[path] = value.strip()
            self.states[-1].where[path] = line.where
        return True
