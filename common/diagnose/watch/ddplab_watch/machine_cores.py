"""The cores that a process may run on, those of the machine, and who has used them.

What a processor did between two moments is the difference of two readings (``read_cpu_times``), so
that nothing has to wait: one is taken as the watching begins, the other with the surroundings.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ddplab_watch.cgroups import Throttling, largest_share, throttling
from ddplab_watch.files import ROOT, read_integer, read_text

CPUS = "sys/devices/system/cpu"


def own_cores() -> frozenset[int]:
    """Returns the cores that this process may run on; empty where the system does not tell."""
    if not hasattr(os, "sched_getaffinity"):
        return frozenset()
    return frozenset(os.sched_getaffinity(0))


def online_cores(root: Path = ROOT) -> frozenset[int]:
    """Returns the machine's cores that are online; empty where the system does not tell."""
    return parse_cores(read_text(root / CPUS / "online") or "")


def write_cores(cores: Iterable[int]) -> str:
    """Returns a list of numbers as Linux writes it: ``0-3,8``."""
    runs: list[list[int]] = []
    for core in sorted(cores):
        if runs and core == runs[-1][-1] + 1:
            runs[-1] = [runs[-1][0], core]
        else:
            runs.append([core])
    return ",".join("-".join(map(str, run)) for run in runs)


def parse_cores(text: str) -> frozenset[int]:
    """Returns the numbers of a list as Linux writes it: ``0-3,8``."""
    cores: set[int] = set()
    for run in filter(None, text.strip().split(",")):
        first, _, last = run.partition("-")
        cores |= set(range(int(first), int(last or first) + 1))
    return frozenset(cores)


def physical_cores(cores: Iterable[int], root: Path = ROOT) -> int | None:
    """Returns the number of physical cores that these are hyper-threads of; None if unknown."""
    count, counted = 0, set()
    for core in cores:
        if core in counted:
            continue
        topology = root / CPUS / f"cpu{core}" / "topology"
        siblings = read_text(topology / "core_cpus_list")
        if siblings is None:  # before Linux 5.3
            siblings = read_text(topology / "thread_siblings_list")
        if siblings is None:
            return None
        counted |= parse_cores(siblings)
        count += 1
    return count or None


def numa_nodes(cores: frozenset[int], root: Path = ROOT) -> str | None:
    """Returns the NUMA nodes that these cores belong to, such as ``0-1``; None if unknown."""
    nodes = [
        int(folder.name.removeprefix("node"))
        for folder in (root / "sys/devices/system/node").glob("node[0-9]*")
        if cores & parse_cores(read_text(folder / "cpulist") or "")
    ]
    return write_cores(nodes) or None


def load_1min(root: Path = ROOT) -> float | None:
    """Returns the mean number of tasks of the machine that ran or wanted to, in the last minute."""
    words = (read_text(root / "proc/loadavg") or "").split()
    return float(words[0]) if words else None


def clocks_mhz(root: Path = ROOT) -> tuple[float | None, float | None]:
    """Returns the clock of the core that this process is on, now and at most; None where unknown.

    Not of all its cores: idle ones rest at any clock, and to read one may take 10 ms.
    """
    stat = read_text(root / "proc/self/stat")
    if stat is None:
        return None, None
    core = int(stat.rpartition(")")[2].split()[36])  # field 39 of proc(5)
    folder = root / CPUS / f"cpu{core}" / "cpufreq"
    now, most = (read_integer(folder / f"{n}_freq") for n in ("scaling_cur", "cpuinfo_max"))
    if now is not None:
        return now / 1e3, None if most is None else most / 1e3
    lines = (line.partition(":") for line in (read_text(root / "proc/cpuinfo") or "").splitlines())
    clocks = [float(value) for name, _, value in lines if name.strip() == "cpu MHz"]
    return (
        clocks[core] if core < len(clocks) else None
    ), None  # a virtual machine's may stand still


def heat_stops(cores: Iterable[int], root: Path = ROOT) -> int | None:
    """Returns how often heat has lowered these cores' clocks since the start; None if unknown."""
    folders = [root / CPUS / f"cpu{core}" / "thermal_throttle" for core in cores]
    counts = [read_integer(folder / "core_throttle_count") for folder in folders]
    return None if None in counts or not counts else sum(counts)


@dataclass(frozen=True)
class CpuTimes:
    """Counters of processors and cgroups at a moment, in seconds; None where unknown.

    Attributes:
        at_s: the moment, on a clock of this machine.
        busy_s: time that the machine's cores computed, all together.
        stolen_s: time that a hypervisor gave its cores to other machines.
        own_s: time that this process and those that it started computed.
        throttling: counters of the cgroups with a quota, by folder.
        heat_stops: times that heat has lowered the clocks of this process's cores.
    """

    at_s: float
    busy_s: float | None
    stolen_s: float | None
    own_s: float | None
    throttling: Mapping[str, Throttling]
    heat_stops: int | None = None


def read_cpu_times(
    root: Path = ROOT, pid: int | None = None, cores: Iterable[int] = ()
) -> CpuTimes:
    """Reads the counts as they are now, of this process unless another is named.

    With ``cores`` the times of the machine are those of these cores alone.
    """
    busy_s, stolen_s = _machine_times_s(root, cores)
    own_s = process_tree_s(os.getpid() if pid is None else pid, root)
    at_s, stops = time.monotonic(), heat_stops(own_cores(), root)
    return CpuTimes(at_s, busy_s, stolen_s, own_s, throttling(root), stops)


def _machine_times_s(root: Path, cores: Iterable[int]) -> tuple[float | None, float | None]:
    names = {f"cpu{core}" for core in cores} or {"cpu"}
    words = map(str.split, (read_text(root / "proc/stat") or "").splitlines())
    lines = [line for line in words if len(line) >= 9 and line[0] in names]
    if len(lines) < len(names):
        return None, None
    # Time of guests is counted in user and nice already; waiting for a disk is not computing.
    ticks = [sum(map(int, column)) for column in zip(*(line[1:9] for line in lines), strict=True)]
    user, nice, system, _idle, _iowait, irq, softirq, steal = ticks
    ticks_per_s = os.sysconf("SC_CLK_TCK")
    return (user + nice + system + irq + softirq) / ticks_per_s, steal / ticks_per_s


def process_tree_s(pid: int, root: Path = ROOT) -> float | None:
    """Returns the processor time of a process and of all that it started, such as loader workers.

    Workers that have ended are counted as soon as their parent has waited for them. None for no
    such process.
    """
    stat = read_text(root / f"proc/{pid}/stat")
    if stat is None:
        return None
    # The name before the parenthesis may hold anything; utime, stime, cutime, cstime come 12th on.
    times = stat.rpartition(")")[2].split()[11:15]
    total = sum(map(int, times)) / os.sysconf("SC_CLK_TCK")
    for children in (root / f"proc/{pid}/task").glob("*/children"):
        for child in (read_text(children) or "").split():
            total += process_tree_s(int(child), root) or 0.0
    return total


def used_between(before: CpuTimes, after: CpuTimes) -> dict[str, float | None]:
    """Returns what was used between two readings, by the names of the columns ``interval_…``."""
    seconds = after.at_s - before.at_s
    if seconds <= 0:
        return {}
    groups = (
        group.since(before.throttling[name])
        for name, group in after.throttling.items()
        if name in before.throttling
    )
    heat = (before.heat_stops, after.heat_stops)
    return {
        "interval_s": round(seconds, 3),
        "interval_own_cores": _rate(before.own_s, after.own_s, seconds),
        "interval_busy_cores": _rate(before.busy_s, after.busy_s, seconds),
        "interval_stolen_cores": _rate(before.stolen_s, after.stolen_s, seconds),
        "interval_throttled_share": largest_share(groups),
        "interval_heat_stops": None if None in heat else heat[1] - heat[0],
    }


def _rate(before: float | None, after: float | None, seconds: float) -> float | None:
    return None if before is None or after is None else round((after - before) / seconds, 3)
