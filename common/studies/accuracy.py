"""``ddplab study accuracy``: how well steps of DDP are predicted, on bucketings never seen before.

Models × networks, each case a job of its own (``accuracy_ranks``): every model over loopback first,
whose backward pass then decides at which rates its emulated hosts are joined, so that all
communication takes 2.2, 1.0 and 0.45 times as long as computation. Some models also run on four
hosts, some with latency added to every bucket, which makes a cap between the extremes the best; a
replay of published gpt2-large gradients, which sleeps instead of computing, runs on four and eight.

Cases share the time there is. One that is known well enough ends early and leaves its time to those
that come later, so the quietest come first.

The raw samples of all cases are joined in five tables (``accuracy_tables``), from which
``common.analysis.accuracy_study`` predicts and judges.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import pandas as pd

from common.cluster.emulated import EmulatedCluster, why_not
from common.cluster.launch import launch
from common.errors import UserError
from common.perfmodel.recorded import UMD_A100, load_recorded
from common.report.progress import StageProgress
from common.runtime.environment import describe_environment
from common.runtime.flags import as_flags
from common.runtime.paths import project_root
from common.runtime.run_directory import RunDirectory
from common.studies.accuracy_tables import TABLES, case_rows

RANKS = project_root() / "common" / "studies" / "accuracy_ranks.py"
REGIMES = {"communication-bound": 2.2, "balanced": 1.0, "compute-bound": 0.45}
"""All communication over all computation, in seconds of each alone."""
PAYLOAD = 0.94
"""What a TCP stream carries of a link's rate, headers taken off."""
FASTEST_MBIT = 4_000
MAX_BUCKETS = 48
STEPS, REPLAY_STEPS = 5, 3
"""Of each visit to a bucketing; sleeps differ by less than computations."""
SETUP_S = 6.0
"""What a case takes per host before its first round."""


@dataclass(frozen=True)
class Case:
    """What is trained where. ``rate_mbit`` 0 is loopback."""

    model: str
    batch_size: int
    hosts: int = 2
    regime: str = "loopback"
    rate_mbit: float = 0.0
    added_latency_ms: float = 0.0
    replay_factor: float = 1.0
    replay_time_factor: float = 1.0

    @property
    def name(self) -> str:
        """Such as ``bert-2-balanced``."""
        late = f"-{self.added_latency_ms:g}ms" if self.added_latency_ms else ""
        return f"{self.model}-{self.hosts}-{self.regime}{late}"


@dataclass(frozen=True)
class AccuracyStudy:
    """What is measured. A model is its name and the batch of each rank, as ``bert:8``."""

    models: tuple[str, ...] = ("gpt2-nano:4", "mlp:1024", "classifier:10", "bert:12", "convnext:16")
    regimes: tuple[str, ...] = tuple(REGIMES)
    on_four_hosts: tuple[str, ...] = ("mlp",)
    with_latency: tuple[str, ...] = ("gpt2-nano", "bert")
    added_latency_ms: float = 4.0
    replays: tuple[str, ...] = ("4:communication-bound", "4:balanced", "8:balanced")
    """Number of hosts and regime of each case of the replayed recording."""
    replay_factor: float = 384.0
    replay_time_factor: float = 4.0
    replay_max_buckets: int = 16
    """Small messages between four processes on two cores take as long as the cores let them."""
    rounds: int = 8
    max_rounds: int = 60
    minutes: float = 52.0
    """All cases together; a case begins no pair of rounds that would end after its share of what is
    left, beyond the first."""

    def __post_init__(self) -> None:
        replayed = {regime for _, regime in self.replay_cases()}
        if unknown := (set(self.regimes) | replayed) - set(REGIMES):
            raise UserError(f"regime {unknown.pop()!r}; there are {', '.join(REGIMES)}")
        names = [text.partition(":")[0] for text in self.models]
        for what in ("models", "regimes", "on_four_hosts", "with_latency", "replays"):
            given = names if what == "models" else getattr(self, what)
            if len(set(given)) < len(given):
                raise UserError(f"{what} {given}: each once")
        if strange := (set(self.on_four_hosts) | set(self.with_latency)) - set(self.batches()):
            raise UserError(f"model {strange.pop()!r} is not among models {names}")

    def batches(self) -> dict[str, int]:
        """Model → batch of each rank."""
        try:
            pairs = [text.split(":") for text in self.models]
            return {name: int(batch) for name, batch in pairs}
        except ValueError:
            raise UserError(f"models {self.models}: each is a name and a batch, bert:8") from None

    def replay_cases(self) -> list[tuple[int, str]]:
        """Hosts and regime of each case of the replayed recording."""
        try:
            pairs = [text.split(":") for text in self.replays]
            return [(int(hosts), regime) for hosts, regime in pairs]
        except ValueError:
            raise UserError(f"replays {self.replays}: hosts and regime, 4:balanced") from None


def run_study(study: AccuracyStudy, output_dir: str, progress: StageProgress) -> Path:
    """Measure all cases; returns the run directory.

    Raises:
        UserError: this machine cannot emulate hosts.
    """
    if reason := why_not():
        raise UserError(reason)
    run = RunDirectory.create(
        output_dir, "accuracy", asdict(study), describe_environment("gloo", "cpu", 2)
    )
    progress.say(f"accuracy study: {run.path}")
    with run:
        scratch = (run.path / "runs").absolute()  # ranks start in another folder
        scratch.mkdir()
        streams = {name: run.stream(name, columns) for name, columns in TABLES.items()}

        deadline = time.monotonic() + 60 * study.minutes
        left = len(study.batches()) + len(emulated_cases(study))

        def measured(case: Case) -> tuple[float, int]:
            nonlocal left
            budget_s = (deadline - time.monotonic()) / left - SETUP_S * case.hosts
            left -= 1
            with progress.stage(case.name) as update:
                _launch(study, case, max(1.0, budget_s), scratch, update)
            for name, rows in case_rows(case, scratch / case.name).items():
                streams[name].write(rows)
            found = computation(scratch / case.name)
            for table in (scratch / case.name).glob("*.csv"):
                table.unlink()  # its rows are in the joined tables
            return found

        found: dict[str, tuple[float, int]] = {}
        for model, batch in study.batches().items():
            found[model] = measured(Case(model, batch))
        for case in emulated_cases(study, found):
            measured(case)
    return run.path


def emulated_cases(
    study: AccuracyStudy, found: Mapping[str, tuple[float, int]] | None = None
) -> list[Case]:
    """The cases on emulated hosts, the quietest first.

    ``found`` is each model's (backward seconds, gradient bytes); without it links have no rate.
    """
    cases = []
    for model, batch in study.batches().items():
        cases += [Case(model, batch, 2, regime) for regime in study.regimes]
        if model in study.on_four_hosts:
            cases.append(Case(model, batch, 4, "balanced"))
        if model in study.with_latency:
            late = study.added_latency_ms
            cases.append(Case(model, batch, 2, "balanced", added_latency_ms=late))
    factors = {
        "replay_factor": study.replay_factor,
        "replay_time_factor": study.replay_time_factor,
    }
    cases += [Case("replay", 1, hosts, regime, **factors) for hosts, regime in study.replay_cases()]
    cases.sort(key=lambda case: (case.model != "replay", list(REGIMES).index(case.regime)))
    if found is None:
        return cases
    profile = load_recorded(UMD_A100).profile
    replayed = (
        profile.backward_s / study.replay_time_factor,
        int(profile.total_bytes / study.replay_factor),
    )
    return [_placed(case, *(found | {"replay": replayed})[case.model]) for case in cases]


def _placed(case: Case, backward_s: float, gradient_bytes: int) -> Case:
    """The case at the rate at which a ring takes the regime's share of the backward pass."""
    if case.hosts > 2 and case.model != "replay":
        backward_s *= 2  # four ranks on two cores compute at most half as fast
    wanted_s = REGIMES[case.regime] * backward_s
    ring_bits = 2 * (case.hosts - 1) / case.hosts * gradient_bytes * 8
    rate = min(FASTEST_MBIT, ring_bits / PAYLOAD / wanted_s / 1e6)
    return replace(case, rate_mbit=float(f"{rate:.2g}"))


def computation(folder: Path) -> tuple[float, int]:
    """(backward seconds without DDP, gradient bytes) of a case that was measured."""
    local = pd.read_csv(folder / "local-times.csv")
    slowest = local.groupby(["round", "iteration"])["backward_time_ms"].max()
    overlap = pd.read_csv(folder / "overlap-times.csv")
    return float(slowest.median()) / 1e3, int(overlap["gradient_bytes"].iloc[0])


def _launch(study: AccuracyStudy, case: Case, budget_s: float, scratch: Path, update) -> None:
    settings = {
        "model": case.model,
        "batch_size": case.batch_size,
        "replay_factor": case.replay_factor,
        "replay_time_factor": case.replay_time_factor,
        "added_latency_ms": case.added_latency_ms,
        "max_buckets": study.replay_max_buckets if case.model == "replay" else MAX_BUCKETS,
        "steps": REPLAY_STEPS if case.model == "replay" else STEPS,
        "rounds": study.rounds,
        "max_rounds": study.max_rounds,
        "budget_s": budget_s,
        "output_dir": scratch,
        "run_id": case.name,
    }
    cluster = (
        EmulatedCluster.of(case.hosts, [f"{case.rate_mbit:g}mbit"]) if case.rate_mbit else None
    )
    log = scratch / f"{case.name}.log"
    launch(RANKS, as_flags(settings), case.hosts, log, hosts=cluster, on_output=update)
