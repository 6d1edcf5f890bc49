"""A witness of a measurement: a fixed computation, and what the system tells of meanwhile.

The computation takes longer where the cores are slower, whatever the reason: their clock, a
neighbour on the same core, or another machine on the same host. Who used them, /proc tells.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from ddplab_watch.files import ROOT, read_text
from ddplab_watch.machine_cores import CpuTimes, load_1min, own_cores, read_cpu_times

PIECES, PASSES, NUMBERS = 6, 60, 4096
"""The computation, 2 ms a piece. It fits a core's first cache, and NumPy makes it on one thread.
The fastest piece counts: that a thread had to wait for a core is what the shares tell."""
LEAST_SPAN_S = 0.5
"""Least time of which shares are taken: the system counts in hundredths of a second."""


@dataclass(frozen=True)
class Reading:
    """What one rank sees at a moment.

    Attributes:
        machine: equal for ranks that see the same cores, such as those of emulated hosts.
        cores: number of cores that the rank may run on.
        times: counters of these cores.
    """

    machine: str
    cores: int
    times: CpuTimes
    witness_ms: float
    load_1min: float | None


def read_machine(root: Path = ROOT) -> Reading:
    """Does the fixed computation and reads the counters."""
    witness_ms, cores = fixed_computation_ms(), own_cores()
    # Emulated hosts have names of their own, and one kernel.
    kernel = read_text(root / "proc/sys/kernel/random/boot_id") or os.uname().nodename
    return Reading(
        machine=f"{kernel.strip()} {sorted(cores)}",
        cores=len(cores) or os.cpu_count() or 1,
        times=read_cpu_times(root, cores=cores),
        witness_ms=witness_ms,
        load_1min=load_1min(root),
    )


def fixed_computation_ms() -> float:
    """Does the fixed computation; returns the time of its fastest piece."""
    numbers, pieces = np.linspace(0.1, 1, NUMBERS), []
    for _ in range(PIECES):
        values = numbers.copy()
        began = time.perf_counter()
        for _ in range(PASSES):
            np.sin(values, out=values)
            values += 0.5
        pieces.append(time.perf_counter() - began)
    return min(pieces) * 1e3


def witness_rows(before: list[Reading], after: list[Reading], hosts: list[str]) -> list[dict]:
    """Returns a row for each rank, but for ``stage`` and ``round`` (``tables.WITNESS_COLUMNS``).

    Readings are those of all ranks, in rank order; at the beginning there are no earlier ones.
    """
    used_s: dict[str, float | None] = {}
    for first, last in zip(before, after, strict=False):
        computed_s = _difference(first.times.own_s, last.times.own_s)
        earlier_s = used_s.get(last.machine, 0.0)
        is_known = None not in (computed_s, earlier_s)
        used_s[last.machine] = computed_s + earlier_s if is_known else None
    rows = []
    for rank, last in enumerate(after):
        row = {"rank": rank, "host": hosts[rank], "witness_ms": round(last.witness_ms, 4)}
        shares = _shares(before[rank], last, used_s[last.machine]) if before else {}
        row |= dict.fromkeys(("span_s", "others_share", "steal_share", "idle_share")) | shares
        rows.append(row | {"load_1min": last.load_1min})
    return rows


def _shares(first: Reading, last: Reading, used_s: float | None) -> dict[str, float | None]:
    span_s = last.times.at_s - first.times.at_s
    row: dict[str, float | None] = {"span_s": round(span_s, 3)}
    busy_s = _difference(first.times.busy_s, last.times.busy_s)
    stolen_s = _difference(first.times.stolen_s, last.times.stolen_s)
    if span_s < LEAST_SPAN_S or busy_s is None or stolen_s is None:
        return row
    capacity_s = span_s * last.cores
    row["steal_share"] = _share(stolen_s, capacity_s)
    row["idle_share"] = _share(capacity_s - busy_s - stolen_s, capacity_s)
    if used_s is not None:
        row["others_share"] = _share(busy_s - used_s, capacity_s)
    return row


def _share(seconds: float, capacity_s: float) -> float:
    return round(min(1.0, max(0.0, seconds / capacity_s)), 4)


def _difference(before: float | None, after: float | None) -> float | None:
    return None if before is None or after is None else after - before
