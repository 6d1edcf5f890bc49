"""``ddplab study emulation``: do emulated links carry what they say, and does nothing stay behind?

Three parts, each a table of raw results in one run directory: all-reduces on rings of emulated
hosts beside what a TCP stream reached on the same links (``ring-bandwidth.csv``), one DDP bucket
of a replayed model on eight hosts (``replay.csv``), and clusters started and stopped, some of them
killed (``starts.csv``). ``verdicts.csv`` holds them against what was promised.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from common.cluster.emulated import MAX_HOSTS, why_not
from common.errors import UserError
from common.perfmodel.published import UMD_A100, load_recorded
from common.report.progress import StageProgress
from common.studies.cluster_starts import START_COLUMNS, survive
from common.studies.ring_bandwidth import replay_bucket, ring_bandwidth, summarise
from common.studies.study import study_run, with_verdicts


@dataclass(frozen=True)
class EmulationStudy:
    """Settings of the study: sizes and rates of the rings, and how many clusters are started."""

    hosts: tuple[int, ...] = (2, 4, 8)
    rates: tuple[str, ...] = ("250mbit", "1gbit")
    starts: int = 50
    kills: int = 5

    def __post_init__(self) -> None:
        if not all(2 <= count <= MAX_HOSTS for count in self.hosts):
            raise UserError(f"hosts {self.hosts}: a ring has 2 to {MAX_HOSTS}")
        if not 0 <= self.kills <= self.starts:
            raise UserError(f"{self.kills} kills of {self.starts} starts: not more than the starts")


def run_study(study: EmulationStudy, output_dir: str, progress: StageProgress) -> Path:
    """Runs all three parts and returns the run directory.

    Raises:
        UserError: this machine cannot emulate hosts.
    """
    reason = why_not()
    if reason:
        raise UserError(reason)
    with study_run(
        "emulation", study, output_dir, progress, backend=None, ranks=max(study.hosts)
    ) as run:
        scratch = run.path / "runs"
        scratch.mkdir()
        rings = ring_bandwidth(study.hosts, study.rates, scratch, progress)
        run.write_table("ring-bandwidth.csv", rings)
        replay = replay_bucket(max(study.hosts), study.rates, scratch, progress)
        run.write_table("replay.csv", replay)
        stream = run.stream("starts.csv", START_COLUMNS)
        starts = survive(study.starts, study.kills, scratch, stream, progress)
        verdicts = judge(rings, replay, starts)
        run.write_table("verdicts.csv", verdicts)
    progress.say(summarise(rings, replay).to_string(index=False, float_format="%.3f"))
    progress.say(verdicts.to_string(index=False))
    return run.path


def judge(rings: pd.DataFrame, replay: pd.DataFrame, starts: pd.DataFrame) -> pd.DataFrame:
    """Compares what was found with what was promised; returns a row per promise.

    Columns: promise, at_least, at_most, found and held. Rings are judged by their largest message:
    with small ones a call's latency counts, too.
    """
    largest = rings[rings["size_bytes"] == rings["size_bytes"].max()]
    left = starts[["processes_left", "namespaces_left", "links_left"]]
    alike = largest[~largest["slow_host"] & (largest["hosts"] == 4)].set_index("rate")["time_ms"]
    slow = largest[largest["slow_host"]].set_index("rate")["time_ms"]
    slept = replay["backward_ms"] / (load_recorded(UMD_A100).profile.backward_s * 1e3)
    found = [
        ("all-reduces reach a share of the ring's limit", 0.95, None, largest["share"].min()),
        ("and so does DDP on a replay", 0.95, None, replay["share"].min()),
        ("a replay sleeps as long as recorded", 0.99, 1.01, slept[(slept - 1).abs().idxmax()]),
        ("a host at half the rate doubles the time", 1.95, 2.05, (slow / alike).min()),
        ("and no more than that", 1.95, 2.05, (slow / alike).max()),
        ("left over after any start", None, 0, left.to_numpy().max()),
    ]
    table = pd.DataFrame(found, columns=["promise", "at_least", "at_most", "found"])
    return with_verdicts(table)
