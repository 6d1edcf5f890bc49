"""Reads what NCCL prints under ``NCCL_DEBUG``: how its ranks are connected, and what it warns of.

The lines are those of NCCL 2.18 to 2.30 (its sources, and its user guide, *Troubleshooting,
Logging*). A log may be one rank's or all ranks', in any order, with other lines between.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field

from common.traces.logs.text_lines import Line

MARK = "NCCL "
PROCESS = re.compile(r"([^\s:\]]+):(\d+):\d+ \[-?\d+\] ")
RANK_OF = re.compile(r"NCCL INFO .*\brank (\d+) n[rR]anks (\d+)(?:.*commId (0x\w+))?")
CHANNEL = re.compile(
    r"NCCL INFO Channel \S+ : (\d+)\[(\w+)\] -> (\d+)\[(\w+)\](?: \[(?:send|receive)\])? via (\S+)"
)
NETWORK = re.compile(r"NCCL INFO (?:Using network (\S+)|NET/(\w+) ?: Using )")
ADAPTER = re.compile(r"\[\d+\] ?([\w.-]+:\d+)/(?:IB|RoCE)")
NO_INFINIBAND = re.compile(r"NCCL INFO NET/IB : No device found")
NOT_OPENED = re.compile(r"NCCL WARN NET/IB : Unable to (?:open|query) device (\S+)")
VERSION = re.compile(r"NCCL version (\d+\.\d+[\w.+]*)")
SETTING = re.compile(r"NCCL INFO (NCCL_\w+) set (?:by environment )?to (\S+?)\.?$")
NO_LIBRARY = "Failed to open libibverbs"
NO_DIRECT = re.compile(r"GPU Direct RDMA Disabled for HCA \d+ '([^']+)'")
WARNING = re.compile(r"NCCL WARN (.+)")


@dataclass
class Communicator:
    """What is known of one communicator.

    Attributes:
        size: number of its ranks; 0 where a log has lost its beginning.
        hosts: rank → the name of its host.
        processes: rank → number of its process.
        devices: rank → number of its GPU, as nvidia-smi counts.
        transports: (rank, rank) → how often each transport connects them, such as ``P2P/CUMEM``.
        places: (rank, rank) → place of the line that said so first.
    """

    size: int = 0
    hosts: dict[int, str] = field(default_factory=dict)
    processes: dict[int, str] = field(default_factory=dict)
    devices: dict[int, int] = field(default_factory=dict)
    transports: dict[tuple[int, int], Counter[str]] = field(default_factory=dict)
    places: dict[tuple[int, int], str] = field(default_factory=dict)

    def pairs(self, transport: str, *, one_host: bool) -> list[tuple[int, int]]:
        """Returns the pairs of ranks that a transport connects, on one host or on two.

        ``transport`` is the beginning of its name, such as ``SHM``. A pair whose hosts are not
        known is on neither.
        """
        return sorted(
            pair
            for pair, kinds in self.transports.items()
            if any(kind.startswith(transport) for kind in kinds)
            and all(rank in self.hosts for rank in pair)
            and (self.hosts[pair[0]] == self.hosts[pair[1]]) == one_host
        )


@dataclass(frozen=True)
class Warned:
    """A warning: host, how often it was printed, and the place of its first line."""

    host: str
    count: int
    where: str


@dataclass
class NcclLog:
    """A reader of lines: the contents of a job's logs.

    Attributes:
        networks: networks that NCCL said it uses.
        adapters: InfiniBand and RoCE adapters that it said it uses, on any host.
        version: version of NCCL.
        settings: variable → (value, place of the line), set by the environment.
        no_infiniband: place where NCCL said that it found no InfiniBand; empty where it did not.
        not_opened: InfiniBand device that was seen and could not be opened → warning.
        no_library: place where NCCL could not load the library of InfiniBand; empty where it could.
        no_direct: adapter without GPUDirect RDMA → place of the line.
        warnings: other warning → how often, where.
    """

    networks: set[str] = field(default_factory=set)
    adapters: set[str] = field(default_factory=set)
    version: str = ""
    settings: dict[str, tuple[str, str]] = field(default_factory=dict)
    no_infiniband: str = ""
    not_opened: dict[str, Warned] = field(default_factory=dict)
    no_library: str = ""
    no_direct: dict[str, str] = field(default_factory=dict)
    warnings: dict[str, Warned] = field(default_factory=dict)
    lines: int = 0
    _communicators: dict[str, Communicator] = field(default_factory=dict)
    _last: dict[tuple[str, str], str] = field(default_factory=dict)

    @property
    def largest(self) -> Communicator:
        """Returns the largest communicator, whose ranks are taken for the job's.

        Ranks are numbered anew in each, and a job may have some of a part of its ranks. Of several
        as large the one counts of which most is known, and of equals the last: a job that was begun
        again is known by its last beginning.
        """
        return max(
            reversed(self._communicators.values()),
            key=lambda c: (c.size, len(c.hosts), len(c.transports)),
            default=Communicator(),
        )

    @property
    def other_jobs(self) -> int:
        """Returns how many communicators as large as the largest have other processes."""
        largest = self.largest
        members = {(rank, largest.hosts[rank], p) for rank, p in largest.processes.items()}
        return sum(
            not {(rank, other.hosts[rank], p) for rank, p in other.processes.items()} <= members
            for other in self._communicators.values()
            if other.size == largest.size and other is not largest
        )

    def take(self, line: Line) -> bool:
        """Takes a line; returns True if NCCL has written it."""
        text = line.text
        if MARK not in text:
            return False
        if match := VERSION.search(text):
            self.version = match[1]
            return True
        process = PROCESS.search(text)
        if NO_LIBRARY in text:  # a warning until 2.18, then a fact
            self.no_library = self.no_library or line.where
        elif "NCCL INFO" in text:
            self._take_fact(line)
            if process:
                self._take_connection(text, process.group(1, 2), line)
        elif match := WARNING.search(text):
            self._take_warning(match[1].strip(), process[1] if process else "", line)
        else:
            return False
        self.lines += 1
        return True

    def _take_fact(self, line: Line) -> None:
        text = line.text
        if match := NETWORK.search(text):
            self.networks.add(match[1] or match[2])
            self.adapters.update(ADAPTER.findall(text))
        elif match := SETTING.search(text):
            self.settings.setdefault(match[1], (match[2], line.where))
        elif match := NO_DIRECT.search(text):
            self.no_direct.setdefault(match[1], line.where)
        elif NO_INFINIBAND.search(text):
            self.no_infiniband = self.no_infiniband or line.where

    def _take_warning(self, text: str, host: str, line: Line) -> None:
        device = NOT_OPENED.search(line.text)
        named, key = (self.not_opened, device[1]) if device else (self.warnings, text)
        before = named.get(key, Warned(host, 0, line.where))
        named[key] = Warned(before.host, before.count + 1, before.where)

    def _take_connection(self, text: str, process: tuple[str, str], line: Line) -> None:
        """Takes who is where, and how a pair is connected, from a line."""
        if match := RANK_OF.search(text):
            rank, size = int(match[1]), int(match[2])
            name = match[3] or self._last_of_size(process, size)
            self._last[process] = name
            communicator = self._communicators.setdefault(name, Communicator(size))
            communicator.hosts[rank], communicator.processes[rank] = process
        elif match := CHANNEL.search(text):
            name = self._last.get(process, "")
            communicator = self._communicators.setdefault(name, Communicator())
            ranks = int(match[1]), int(match[3])
            pair = min(ranks), max(ranks)
            communicator.transports.setdefault(pair, Counter())[match[5]] += 1
            communicator.places.setdefault(pair, line.where)
            for rank, device in zip(ranks, (match[2], match[4]), strict=True):
                if device.isdigit() and len(device) < 3:  # earlier ones write the bus here
                    communicator.devices[rank] = int(device)

    def _last_of_size(self, process: tuple[str, str], size: int) -> str:
        """Returns the name of a communicator of which a line says only how large it is."""
        last = self._last.get(process, "")
        communicator = self._communicators.get(last)
        return last if communicator and communicator.size == size else str(size)
