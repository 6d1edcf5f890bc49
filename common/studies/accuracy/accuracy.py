"""``ddplab study accuracy``: how well steps of DDP are predicted, on bucketings never seen before.

Models × networks. All networks of a model are visited in one job (``ranks``), whose ranks
set the rates of their own links, so that a slow minute of the machine meets all of them: links at
which all communication takes 1.8, 1.0 and 0.45 times as long as the backward pass, for some models
one with latency added to every bucket, which makes a cap between the extremes the best. Some models
also run over loopback or on four hosts; a replay of published gpt2-large gradients, which sleeps
instead of computing, on four and eight.

Every case has the same time. All of it takes more than two hours, so a study that was cut is
continued by another: ``ddplab study accuracy --continues RUN_DIR`` takes over the jobs that are
complete. The raw samples of all cases are joined in tables (``tables``), from which
``common.analysis.accuracy.study`` predicts and judges.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from common.analysis.accuracy.study import open_study
from common.cluster.emulated import EmulatedCluster, why_no_hosts
from common.cluster.launch import launch
from common.errors import UserError
from common.perfmodel.expected_error import ERRORS
from common.runtime.flags import as_flags
from common.runtime.machine.environment import describe_environment
from common.runtime.paths import project_root
from common.runtime.records.study import earlier_tables, require_same_settings, study_run
from common.runtime.stage_progress import StageProgress
from common.settings import Positive, Settings
from common.studies.accuracy.networks import FASTEST_MBIT, LOOPBACK, REGIMES, parse_network
from common.studies.accuracy.tables import TABLES, join_case, open_tables

RANKS = project_root() / "common" / "studies" / "accuracy" / "ranks.py"
SETUP_S = 8.0
"""Seconds that a job takes per host before its first round."""
REPLAY = "replay"
FREE = ("minutes_per_case", "minutes_per_replay", "continues")
"""Settings in which a study may differ from the one that it continues."""
MAX_BUCKETS, REPLAY_MAX_BUCKETS = 48, 16
"""Upper bounds on the buckets of a bucketing. A replay's is lower: its four processes or more share
two cores, which then decide how long small messages take."""


@dataclass(frozen=True)
class Job:
    """A model on ranks of their own hosts, and the networks between them."""

    model: str
    batch_size: int
    hosts: int
    networks: tuple[str, ...]

    @property
    def name(self) -> str:
        """Returns the name, such as ``bert-2``; over loopback, which has no hosts, ``bert``."""
        return self.model if self.networks == (LOOPBACK,) else f"{self.model}-{self.hosts}"

    @property
    def cases(self) -> list[str]:
        """Returns the names of its cases, one for each network."""
        return [f"{self.name}-{network}" for network in self.networks]


@dataclass(frozen=True)
class AccuracyStudy(Settings):
    """Settings of the study. A model is its name and the batch of each rank, as ``bert:8``."""

    models: tuple[str, ...] = ("gpt2-nano:12", "mlp:2400", "bert:36", "convnext:48")
    """Models and their batches. The batches are large: the links of all regimes are then so slow
    that two cores fill them."""
    regimes: tuple[str, ...] = tuple(REGIMES)
    """Networks between the ranks, by name."""
    over_loopback: tuple[str, ...] = ("gpt2-nano", "bert", "convnext")
    """Models judged over loopback too."""
    on_four_hosts: tuple[str, ...] = ()
    """Models judged on four emulated hosts too."""
    with_latency: tuple[str, ...] = ("bert",)
    """Models judged with latency added to the network too."""
    added_latency_ms: float = 8.0
    """Latency that is added, in milliseconds."""
    replays: tuple[str, ...] = ("4:communication-bound", "8:balanced")
    """Number of hosts and regime of each case of the replayed recording."""
    replay_factor_per_host: Annotated[float, Positive] = 128.0
    """Factor per host that the recording's sizes are divided by: one machine carries all links."""
    replay_time_factor: float = 1.0
    """Factor on the times of replayed computation."""
    calibration_rounds: Annotated[int, Positive] = 4
    """Rounds that the model is calibrated with."""
    rounds: Annotated[int, Positive] = 8
    """Least rounds of the judged measurement."""
    max_rounds: Annotated[int, Positive] = 80
    """Most rounds of the judged measurement."""
    minutes_per_case: Annotated[float, Positive] = 7.0
    """Time of a job for each of its networks. After two rounds it begins none that would end
    later."""
    minutes_per_replay: Annotated[float, Positive] = 12.0
    """Time of a job for each of its networks, for replays, whose steps take seconds."""
    continues: str = ""
    """The run directory of a study that was cut."""

    def __post_init__(self) -> None:
        super().__post_init__()
        names = list(self._batches())
        if len(names) < len(self.models):
            raise UserError(f"models {self.models}: each once")
        for what in ("over_loopback", "on_four_hosts", "with_latency", "regimes", "replays"):
            chosen = getattr(self, what)
            if len(set(chosen)) < len(chosen):
                raise UserError(f"{what} {chosen}: each once")
            if what not in ("regimes", "replays") and (strange := set(chosen) - set(names)):
                raise UserError(f"{what}: model {strange.pop()!r} is not among models {names}")
        for job in self.jobs():
            for network in job.networks:
                parse_network(network)

    def jobs(self) -> list[Job]:
        """Returns the jobs, the quietest first."""
        replays: dict[int, list[str]] = {}
        for hosts, regime in map(self._hosts_and_regime, self.replays):
            replays.setdefault(hosts, []).append(regime)
        jobs = [Job(REPLAY, 1, hosts, tuple(regimes)) for hosts, regimes in replays.items()]
        for model, batch in (batches := self._batches()).items():
            late = (f"balanced+{self.added_latency_ms:g}ms",) if model in self.with_latency else ()
            if networks := (*self.regimes, *late):
                jobs.append(Job(model, batch, 2, networks))
        jobs += [Job(model, batches[model], 4, ("balanced",)) for model in self.on_four_hosts]
        return jobs + [Job(model, batches[model], 2, (LOOPBACK,)) for model in self.over_loopback]

    def _batches(self) -> dict[str, int]:
        try:
            pairs = [text.split(":") for text in self.models]
            return {name: int(batch) for name, batch in pairs}
        except ValueError:
            raise UserError(f"models {self.models}: each is a name and a batch, bert:8") from None

    def _hosts_and_regime(self, text: str) -> tuple[int, str]:
        hosts, _, regime = text.partition(":")
        if not hosts.isdecimal() or int(hosts) < 2:
            raise UserError(f"replays {self.replays}: hosts and regime, 4:balanced")
        return int(hosts), regime


SETTINGS = AccuracyStudy


def run_study(study: AccuracyStudy, output_dir: str, progress: StageProgress) -> Path:
    """Measures all cases and returns the run directory.

    Raises UserError: this machine cannot emulate hosts.
    """
    if reason := why_no_hosts():
        raise UserError(reason)
    require_same_settings("accuracy", study, FREE)
    earlier = earlier_tables(study.continues, TABLES, ["case"])
    measured = set(earlier["cases.csv"]["case"])
    complete = [job for job in study.jobs() if measured.issuperset(job.cases)]
    kept = {case for job in complete for case in job.cases}
    earlier = {name: table[table["case"].isin(kept)] for name, table in earlier.items()}
    environment = describe_environment("gloo", "cpu", 2)
    with study_run("accuracy", study, output_dir, progress, environment) as run:
        scratch = (run.path / "runs").absolute()  # ranks start in another folder
        scratch.mkdir()
        streams = open_tables(run, earlier)
        for job in study.jobs():
            if job in complete:
                continue
            minutes = study.minutes_per_case
            if job.model == REPLAY:
                minutes = study.minutes_per_replay
            budget_s = 60 * minutes * len(job.networks) - SETUP_S * job.hosts
            with progress.stage(job.name) as update:
                _launch(study, job, max(1.0, budget_s), scratch, update)
            for case in job.cases:
                join_case(streams, scratch / case)
    run.write_table(ERRORS, open_study(run.path).errors_by_regime())
    return run.path


def _launch(study: AccuracyStudy, job: Job, budget_s: float, scratch: Path, update) -> None:
    replayed = job.model == REPLAY
    settings = {
        "model": job.model,
        "batch_size": job.batch_size,
        "networks": job.networks,
        "replay_factor": study.replay_factor_per_host * job.hosts if replayed else 1.0,
        "replay_time_factor": study.replay_time_factor if replayed else 1.0,
        "max_buckets": REPLAY_MAX_BUCKETS if replayed else MAX_BUCKETS,
        "calibration_rounds": study.calibration_rounds,
        "rounds": study.rounds,
        "max_rounds": study.max_rounds,
        "budget_s": budget_s,
        "output_dir": scratch,
        "run_id": job.name,
    }
    cluster = None
    if job.networks != (LOOPBACK,):
        cluster = EmulatedCluster.of(job.hosts, [f"{FASTEST_MBIT:g}mbit"])
    log = scratch / f"{job.name}.log"
    launch(RANKS, as_flags(settings), job.hosts, log, hosts=cluster, on_output=update)
