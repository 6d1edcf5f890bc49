"""All-reduces on a ring of emulated hosts beside what the links allow.

A ring all-reduce of S bytes on n ranks sends 2(n−1)/n·S over every link (nccl-tests,
doc/PERFORMANCE.md). With links that carry R bytes/s of payload it takes at least that over R, so
its algorithm bandwidth is at most R·n/(2(n−1)). R is what a plain TCP stream reached on the
slowest link before the ranks started.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pandas as pd

from common.cluster.emulated import EmulatedCluster, parse_rate
from common.cluster.launch import launch
from common.perfmodel.collectives import algorithm_bandwidth
from common.perfmodel.published import UMD_A100
from common.report.progress import StageProgress
from common.runtime.paths import project_root
from common.runtime.run_directory import read_environment

SCRIPTS = project_root() / "assignments" / "assignment2"
ELEMENTS = (262144, 2097152)
FACTOR = 128


def ring_bandwidth(
    hosts: Sequence[int], rates: Sequence[str], scratch: Path, progress: StageProgress
) -> pd.DataFrame:
    """Measures all-reduces on rings; returns medians per ring and message size.

    The last ring of each rate has one host at half of it.

    Columns: hosts, rate, slow_host, size_bytes, time_ms, samples, link_mbit_per_s (the slowest
    TCP stream), limit_ms (lower bound on the time of a ring), algorithm_bandwidth_mb_per_s and
    share (limit / time).
    """
    tables = []
    for rate in rates:
        for count in hosts:
            tables.append(_ring(count, rate, False, scratch, progress))
        tables.append(_ring(4, rate, True, scratch, progress))
    return pd.concat(tables, ignore_index=True)


def _ring(
    hosts: int, rate: str, slow_host: bool, scratch: Path, progress: StageProgress
) -> pd.DataFrame:
    rates = [rate] * hosts
    if slow_host:
        rates[1] = f"{parse_rate(rate) / 2e6:g}mbit"
    cluster = EmulatedCluster.of(hosts, rates)
    name = f"ring-{hosts}x{rate}{'-slow-host' if slow_host else ''}"
    flags = ("--numel", *map(str, ELEMENTS), "--rounds", "3", "--iterations", "5")
    with progress.stage(f"all-reduce on {cluster}") as update:
        _run(
            "allreduce_benchmark", (*flags, "--in_flight_mib", "1"), cluster, scratch / name, update
        )
    samples = pd.read_csv(scratch / name / "allreduce-samples.csv")
    sequential = samples[samples["mode"] == "sequential"]
    keys = ["total_bytes", "round", "iteration"]
    # An all-reduce takes as long as its slowest rank; then the median over all-reduces of a size.
    slowest = sequential.groupby(keys)["time_ms"].max().groupby("total_bytes")
    table = slowest.agg(["median", "size"]).reset_index()
    table.columns = ["size_bytes", "time_ms", "samples"]
    table.insert(0, "hosts", hosts)
    table.insert(1, "rate", rate)
    table.insert(2, "slow_host", slow_host)
    return table.assign(**_limit(scratch / name, hosts, table["size_bytes"], table["time_ms"]))


def replay_bucket(
    hosts: int, rates: Sequence[str], scratch: Path, progress: StageProgress
) -> pd.DataFrame:
    """Measures the exposed communication of DDP with one bucket, on a replayed model.

    A single bucket is reduced when the backward pass is over, so the time beyond it is an
    all-reduce of all gradients with the copies of DDP. Columns as for the rings but slow_host, and
    backward_ms (the replayed computation) and step_ms (the backward pass under DDP).
    """
    tables = []
    for rate in rates:
        cluster = EmulatedCluster.of(hosts, [rate])
        name = f"replay-{hosts}x{rate}"
        flags = ["--replay", UMD_A100, "--replay_factor", str(FACTOR), "--bucket_cap_mb", "4096"]
        flags += ["--rounds", "3", "--num_steps", "3", "--initial_steps", "2", "--device", "cpu"]
        with progress.stage(f"replay on {cluster}") as update:
            _run("ddp_benchmark", flags, cluster, scratch / name, update)
        steps = pd.read_csv(scratch / name / "ddp-times.csv")
        local = pd.read_csv(scratch / name / "local-times.csv")
        keys = ["round", "iteration"]
        step_ms = steps.groupby(keys)["backward_time_ms"].max().median()
        backward_ms = local.groupby(keys)["backward_time_ms"].max().median()
        size = int(steps["first_bucket_bytes"].iloc[0])
        row = {
            "hosts": hosts,
            "rate": rate,
            "size_bytes": size,
            "backward_ms": backward_ms,
            "step_ms": step_ms,
            "time_ms": step_ms - backward_ms,
            "samples": int(steps[keys].drop_duplicates().shape[0]),
        }
        tables.append(row | _limit(scratch / name, hosts, size, row["time_ms"]))
    return pd.DataFrame(tables)


def _run(
    script: str,
    flags: Sequence[str],
    cluster: EmulatedCluster,
    run: Path,
    on_output: Callable[[str], None],
) -> None:
    """Runs a benchmark on emulated hosts, with the run directory ``run`` and its log beside it."""
    launch(
        SCRIPTS / f"{script}.py",
        [*flags, "--output_dir", str(run.parent), "--run_id", run.name],
        cluster.ranks,
        run.parent / f"{run.name}.log",  # a rate like 2.5gbit has a dot
        hosts=cluster,
        on_output=on_output,
    )


def _limit(run: Path, hosts: int, size_bytes, time_ms) -> dict:
    """Computes the lower bound on a ring's time over this run's links, and the share reached.

    2(n−1)/n of all bytes go over every link (the module's docstring), at the rate that a TCP stream
    reached on the slowest.
    """
    network = read_environment(run)["interconnect"]["emulated"]
    link = min(min(found["up"], found["down"]) for found in network["probe"])
    limit_ms = 2 * (hosts - 1) / hosts * size_bytes * 8 / link * 1e3
    return {
        "link_mbit_per_s": link / 1e6,
        "limit_ms": limit_ms,
        "algorithm_bandwidth_mb_per_s": algorithm_bandwidth(size_bytes, time_ms / 1e3) / 1e6,
        "share": limit_ms / time_ms,
    }


def summarise(rings: pd.DataFrame, replay: pd.DataFrame) -> pd.DataFrame:
    """Returns a row for the largest message of each ring and for each replay, with its share."""
    largest = rings[rings["size_bytes"] == rings["size_bytes"].max()].assign(what="all-reduce")
    largest.loc[largest["slow_host"], "what"] = "all-reduce, one host at half the rate"
    columns = ["what", "hosts", "rate", "link_mbit_per_s", "limit_ms", "time_ms", "share"]
    return pd.concat([largest, replay.assign(what="DDP, one bucket")])[columns]
