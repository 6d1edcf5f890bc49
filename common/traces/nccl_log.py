"""Reads what NCCL prints under ``NCCL_DEBUG=INFO``: how its ranks are connected, and its warnings.

The lines are those of NCCL's user guide (*Troubleshooting, Logging*). A log may be one rank's or
all ranks', in any order, with other lines between.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

MARK = b"NCCL "
PROCESS = re.compile(r"([^\s:\]]+):(\d+):\d+ \[\d+\] NCCL ")
RANK_OF = re.compile(r"NCCL INFO .*\brank (\d+) nranks (\d+)")
CHANNEL = re.compile(
    r"NCCL INFO Channel \S+ : (\d+)\[\w+\] -> (\d+)\[\w+\](?: \[(?:send|receive)\])? via (\S+)"
)
NETWORK = re.compile(r"NCCL INFO (?:Using network (\S+)|NET/(\w+) : Using )")
NO_INFINIBAND = re.compile(r"NCCL INFO NET/IB : No device found")
WARNING = re.compile(r"NCCL WARN (.+)")
MOST_WARNINGS = 5


@dataclass
class NcclLog:
    """The contents of a job's logs.

    Attributes:
        hosts: rank → the name of its host.
        transports: (rank, rank) → how often each transport connects them, such as ``P2P/CUMEM``.
        networks: networks that NCCL said it uses.
        no_infiniband: NCCL looked for InfiniBand and found none.
        warnings: warning → how often it was printed.
    """

    hosts: dict[int, str] = field(default_factory=dict)
    transports: dict[tuple[int, int], Counter[str]] = field(default_factory=dict)
    networks: set[str] = field(default_factory=set)
    no_infiniband: bool = False
    warnings: Counter[str] = field(default_factory=Counter)

    def pairs(self, transport: str, *, one_host: bool) -> list[tuple[int, int]]:
        """Returns the pairs of ranks that a transport connects.

        Args:
            transport: beginning of the transport's name, such as ``SHM``.
            one_host: True for pairs on one host, False for pairs on two; a pair whose hosts are
                not known is neither.
        """
        return sorted(
            pair
            for pair, kinds in self.transports.items()
            if any(kind.startswith(transport) for kind in kinds)
            and all(rank in self.hosts for rank in pair)
            and (self.hosts[pair[0]] == self.hosts[pair[1]]) == one_host
        )


def is_nccl_log(path: Path) -> bool:
    """Returns True for a file in whose beginning NCCL says something."""
    try:
        head = path.open("rb").read(2**20)
    except OSError:
        return False
    return MARK + b"INFO" in head or MARK + b"WARN" in head


def read_nccl_logs(paths: Iterable[Path]) -> NcclLog:
    """Reads the logs of a job.

    Ranks are numbered anew in each communicator, and a job may have some of a part of its ranks.
    Hosts and transports are those of the largest.
    """
    by_size: dict[int, NcclLog] = {}
    sizes: dict[tuple[str, str], int] = {}
    log = NcclLog()
    for path in paths:
        for line in path.read_text(errors="replace").splitlines():
            _take(line, log)
            _take_connection(line, by_size, sizes)
    if by_size:
        largest = by_size[max(by_size)]
        log.hosts, log.transports = largest.hosts, largest.transports
    return log


def _take_connection(
    line: str, by_size: dict[int, NcclLog], sizes: dict[tuple[str, str], int]
) -> None:
    """Takes who is where, and how a pair is connected, from a line.

    Args:
        line: a line of a log.
        by_size: number of a communicator's ranks → what is known of it.
        sizes: (host, process) → ranks of the communicator that it last began.
    """
    process = PROCESS.search(line)
    if process and (match := RANK_OF.search(line)):
        rank, size = map(int, match.groups())
        sizes[process.groups()] = size
        by_size.setdefault(size, NcclLog()).hosts[rank] = process.group(1)
    if process and (match := CHANNEL.search(line)):
        first, second, transport = match.groups()
        pair = (min(int(first), int(second)), max(int(first), int(second)))
        communicator = by_size.setdefault(sizes.get(process.groups(), 0), NcclLog())
        communicator.transports.setdefault(pair, Counter())[transport] += 1


def _take(line: str, log: NcclLog) -> None:
    if match := NETWORK.search(line):
        log.networks.add(match.group(1) or match.group(2))
    if NO_INFINIBAND.search(line):
        log.no_infiniband = True
    if match := WARNING.search(line):
        log.warnings[match.group(1).strip()] += 1
