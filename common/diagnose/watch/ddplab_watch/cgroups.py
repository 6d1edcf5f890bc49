"""The limits that a process's cgroups set on it: processor time and memory, by both versions.

Slurm, Docker and Kubernetes grant parts of a machine in this way. A quota of 1.5 cores is 150 ms
of processor time in every period of 100 ms; when it is used up, all threads of the group stand
still until the next period. Any group above a process's own may have a limit; the smallest holds.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ddplab_watch.files import ROOT, read_fields, read_integer, read_text

NO_LIMIT_BYTES = 2**60
"""Version 1 writes a number near 2⁶³ where memory has no limit."""


@dataclass(frozen=True)
class Throttling:
    """Periods in which a cgroup wanted to run, and those in which it used up its quota."""

    periods: int
    throttled: int

    @property
    def share(self) -> float | None:
        """Returns the share of throttled periods; None where none has gone by."""
        return self.throttled / self.periods if self.periods > 0 else None

    def since(self, earlier: Throttling) -> Throttling:
        """Returns the periods after an earlier count."""
        return Throttling(self.periods - earlier.periods, self.throttled - earlier.throttled)


def own_groups(controller: str, root: Path = ROOT) -> list[Path]:
    """Returns the folders of this process's cgroup and of those above it that are visible.

    Args:
        controller: ``cpu`` or ``memory``.
        root: the root of the file system.
    """
    mounted = root / "sys/fs/cgroup"
    groups: list[Path] = []
    for line in (read_text(root / "proc/self/cgroup") or "").splitlines():
        controllers, _, path = line.partition(":")[2].partition(":")
        if controllers and controller not in controllers.split(","):
            continue
        # Version 2 names no controllers; it is mounted below where version 1 is in use as well.
        places = (controllers, controller) if controllers else ("unified", ".")
        mount = next((mounted / name for name in places if (mounted / name).is_dir()), None)
        if mount is None:
            continue
        # In a container the path may be the host's, and its own group is the mount itself.
        parts = [part for part in path.split("/") if part not in ("", "..")]
        folders = (mount.joinpath(*parts[:length]) for length in range(len(parts), -1, -1))
        groups += [folder for folder in folders if folder.is_dir()]
    return groups


def cpu_quota(root: Path = ROOT) -> float | None:
    """Returns the smallest quota of this process's cgroups, in cores; None for none."""
    return _smallest(_group_quota(folder) for folder in own_groups("cpu", root))


def _group_quota(folder: Path) -> float | None:
    words = (read_text(folder / "cpu.max") or "").split()  # "150000 100000" or "max 100000"
    if len(words) == 2 and words[0].isdigit():
        return int(words[0]) / int(words[1])
    quota_us = read_integer(folder / "cpu.cfs_quota_us")  # -1 for none
    period_us = read_integer(folder / "cpu.cfs_period_us")
    return quota_us / period_us if quota_us and quota_us > 0 and period_us else None


def throttling(root: Path = ROOT) -> dict[str, Throttling]:
    """Returns what was counted of each cgroup with a quota, since it was made, by folder."""
    counts = {}
    for folder in own_groups("cpu", root):
        fields = read_fields(folder / "cpu.stat")
        if _group_quota(folder) is not None and "nr_periods" in fields:
            counts[str(folder)] = Throttling(fields["nr_periods"], fields.get("nr_throttled", 0))
    return counts


def throttled_share(root: Path = ROOT) -> float | None:
    """Returns the share of periods in which the cgroup that was stopped most was stopped."""
    return largest_share(throttling(root).values())


def largest_share(groups: Iterable[Throttling]) -> float | None:
    """Returns the share of the cgroup that was stopped most; None where no period went by."""
    return max((group.share for group in groups if group.share is not None), default=None)


def memory_limit_bytes(root: Path = ROOT) -> int | None:
    """Returns the smallest limit of this process's cgroups; None for none."""
    limits = [
        read_integer(folder / name)  # "max" is no number
        for folder in own_groups("memory", root)
        for name in ("memory.max", "memory.limit_in_bytes")
    ]
    return _smallest(limit for limit in limits if limit is not None and limit < NO_LIMIT_BYTES)


def _smallest(values: Iterable[float | None]) -> float | None:
    return min((value for value in values if value is not None), default=None)
