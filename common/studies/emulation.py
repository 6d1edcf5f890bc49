"""``ddplab study emulation``: do emulated links carry what they say, and does nothing stay behind?

Three parts, each a table of raw results in one run directory: all-reduces on rings of emulated
hosts beside what a TCP stream reached on the same links (``ring-bandwidth.csv``), one DDP bucket
of a replayed model on eight hosts (``replay.csv``), and clusters started and stopped, some of them
killed (``starts.csv``).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from common.cluster.emulated import MAX_HOSTS, why_not
from common.errors import UserError
from common.report.progress import StageProgress
from common.runtime.environment import describe_environment
from common.runtime.run_directory import RunDirectory
from common.studies.ring_bandwidth import replay_bucket, ring_bandwidth, summarise
from common.studies.survival import START_COLUMNS, survive


@dataclass(frozen=True)
class EmulationStudy:
    """What is measured."""

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
    """Run all three parts; returns the run directory.

    Raises:
        UserError: this machine cannot emulate hosts.
    """
    reason = why_not()
    if reason:
        raise UserError(reason)
    environment = describe_environment("gloo", "cpu", max(study.hosts))
    run = RunDirectory.create(output_dir, "emulation", asdict(study), environment)
    progress.say(f"emulation study: {run.path}")
    with run:
        scratch = run.path / "runs"
        scratch.mkdir()
        rings = ring_bandwidth(study.hosts, study.rates, scratch, progress)
        run.write_table("ring-bandwidth.csv", rings)
        replay = replay_bucket(max(study.hosts), study.rates, scratch, progress)
        run.write_table("replay.csv", replay)
        stream = run.stream("starts.csv", START_COLUMNS)
        survive(study.starts, study.kills, scratch, stream, progress)
    progress.say(summarise(rings, replay).to_string(index=False, float_format="%.3f"))
    return run.path
