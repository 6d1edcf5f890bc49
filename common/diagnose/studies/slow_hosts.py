"""One of four emulated hosts at half of the others' rate, or none: who is named by its pairs."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from common.analysis.pairs import hosts_of, per_pair, slow_parts
from common.cluster.emulated import EmulatedCluster
from common.cluster.launch import launch_series
from common.runtime.paths import project_root
from common.runtime.stage_progress import StageProgress

SCRIPT = project_root() / "common" / "benchmarks" / "pairs.py"
SLOW_HOST, HOSTS = "slow-host", 4
RATE, HALF = "200mbit", "100mbit"
RUNS = 20


def run_slow_hosts(folder: Path, progress: StageProgress) -> pd.DataFrame:
    """Runs all cases: each host slowed in turn, and as many runs in which none is.

    Returns:
        A row per run: slowed (the host's number; 0 for none), run, named (ranks and links, in
        words), ratio, right.
    """
    rows = []
    for slowed, runs in [(0, RUNS), *((host, RUNS // HOSTS) for host in range(1, HOSTS + 1))]:
        rates = [HALF if host == slowed else RATE for host in range(1, HOSTS + 1)]
        with launch_series(HOSTS, hosts=EmulatedCluster.of(HOSTS, rates)) as series:
            for run in range(runs):
                name = f"pairs-{slowed}-{run}"
                table = folder / "logs" / f"{name}.csv"
                series.add(SCRIPT, "--device", "cpu", "--results", table)
                with progress.stage(f"{SLOW_HOST} {slowed or 'none'}, run {run + 1}") as update:
                    series.wait(table.with_suffix(".log"), update)
                rows.append({"slowed": slowed, "run": run} | found_in(pd.read_csv(table), slowed))
    return pd.DataFrame(rows)


def found_in(samples: pd.DataFrame, slowed: int) -> dict[str, object]:
    """Returns what the times of pairs name, and whether that is the host that was slowed."""
    slow = slow_parts(per_pair(samples), hosts_of(samples))
    expected = [(slowed - 1,)] if slowed else []
    return {
        "named": "; ".join(" and ".join(map(str, part.ranks)) for part in slow),
        "ratio": slow[0].ratio.estimate if slow else None,
        "right": [part.ranks for part in slow] == expected,
    }
