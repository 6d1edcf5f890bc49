"""``ddplab study diagnosis``: faults planted from outside, and whether the diagnosis names them.

Every cause is planted at two sizes or in two programs, on two ranks of this machine or of two
emulated hosts; thresholds were set on one of them, the other was held out (column ``held_out``).
Healthy runs must give no verdict. ``planted_faults`` plants what no flag makes; slow hosts, which
the times of all pairs of ranks must name, are those of ``slow_hosts``. The diagnosis reads
the run directories and knows nothing of the table below.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from common.cluster.emulated import EmulatedCluster, why_no_hosts
from common.cluster.launch import launch_series
from common.diagnose.diagnosis import Diagnosis, diagnose_folder, lines_of
from common.diagnose.studies.planting import PLANTED
from common.diagnose.studies.script_cases import HEALTHY, RANKS
from common.diagnose.studies.slow_hosts import SLOW_HOST, run_slow_hosts
from common.errors import UserError
from common.runtime.machine.environment import describe_environment
from common.runtime.paths import project_root
from common.runtime.records.study import say_tables, study_run
from common.runtime.stage_progress import StageProgress

PROGRAMS = {
    name: project_root() / "assignments" / "assignment4" / script
    for name, script in (("benchmark", "benchmark.py"), ("text", "train_text.py"))
}
FLAGS = {
    "benchmark": {
        "input_dim": 256,
        "hidden_dim": 512,
        "num_layers": 3,
        "output_dim": 128,
        "batch_size": 1024,
        "epochs": 1,
        "steps_per_epoch": 20,
        "warmup_steps": 5,
        "timed_steps": 15,
    },
    "text": {
        "dataset": "synthetic",
        "max_train_samples": 1280,
        "eval_samples": 64,
        "epochs": 2,
        "d_model": 64,
        "n_layer": 2,
        "d_ff": 256,
        "vocab_size": 1000,
        "max_length": 64,
        "pad": "max_length",
        "batch_size": 32,
        "workers": 0,
        "discard_steps": 3,
        "precision": "fp32",
        "dropout": 0,
        "warmup_steps": 10,
    },
}
"""Program → flags of a run that is short and healthy on two cores: the exchange is a tenth of a
step."""


@dataclass(frozen=True)
class Case:
    """One run of the study.

    Attributes:
        name: name of the case's folder.
        cause: cause that must be named first; ``healthy`` for none.
        program: benchmark or text.
        fault: argument of ``planted_faults``.
        flags: flags beyond those of the program.
        rate: rate of the links of two emulated hosts; empty for ranks of this machine.
        held_out: whether it was not looked at when thresholds were set.
        baseline: the case, run on one rank, that it is compared with.
        ranks: 1 for a baseline, which is not diagnosed.
    """

    name: str
    cause: str
    program: str
    fault: str = HEALTHY
    flags: tuple[tuple[str, object], ...] = ()
    rate: str = ""
    held_out: bool = False
    baseline: str = ""
    ranks: int = RANKS

    def words(self, folder: Path) -> list[str]:
        """Returns the script to start and its arguments; its run goes below ``folder``."""
        flags = FLAGS[self.program] | dict(self.flags)
        flags |= {"device": "cpu", "backend": "gloo", "output_dir": folder, "run_id": self.name}
        arguments = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
        return [str(PLANTED), self.fault, str(PROGRAMS[self.program]), *arguments]


def _pair(
    cause: str, seen: tuple, held_out: tuple, *, rates: tuple[str, str] = ("", "")
) -> Iterator[Case]:
    """Yields the two cases of a cause; ``seen`` and ``held_out`` are program, fault and flags."""
    for (program, fault, flags), rate, held in zip(
        (seen, held_out), rates, (False, True), strict=True
    ):
        name = f"{cause}-{'held-out' if held else 'seen'}"
        yield Case(name, cause, program, fault, tuple(flags.items()), rate, held)


SMALL_MLP = {"input_dim": 128, "hidden_dim": 256, "output_dim": 64}
LARGE_MLP = {"input_dim": 512, "hidden_dim": 1024, "output_dim": 256}
TINY_MLP = {"input_dim": 16, "hidden_dim": 16, "output_dim": 8}
OTHER_TEXT = {"d_model": 96, "batch_size": 24, "max_train_samples": 960}
UNEQUAL = {
    "synthetic_like": "imdb",
    "pad": "longest",
    "max_length": 400,
    "max_train_samples": 240,
    "eval_samples": 16,
}
CASES = (
    *_pair(
        "wrong-sampler",
        ("text", "missing-sampler", {"max_train_samples": 640}),
        ("text", "overlapping-sampler", OTHER_TEXT),
    ),
    Case(
        name="baseline",
        cause=HEALTHY,
        program="benchmark",
        flags=(*SMALL_MLP.items(), ("batch_size", 256)),
        ranks=1,
    ),
    Case(
        name="mixed-configurations-seen",
        cause="mixed-configurations",
        program="benchmark",
        fault="other-precision",
        flags=(("batch_size", 256),),
    ),
    Case(
        name="mixed-configurations-held-out",
        cause="mixed-configurations",
        program="benchmark",
        flags=(("batch_size", 256),),
        held_out=True,
        baseline="baseline",
    ),
    *_pair(
        "warm-up-counted",
        ("benchmark", "slow-start=400", {"warmup_steps": 0}),
        ("benchmark", "slow-start=200", {"warmup_steps": 1, "batch_size": 768}),
    ),
    *_pair(
        "oversubscribed-cores",
        ("benchmark", "one-core", {}),
        ("text", "one-core", OTHER_TEXT),
    ),
    *_pair(
        "slow-rank",
        ("benchmark", "slow-rank=1.8", {}),
        ("text", "slow-compute=4", OTHER_TEXT),
    ),
    *_pair(
        "unequal-lengths",
        ("text", HEALTHY, UNEQUAL | {"batch_size": 2}),
        ("text", HEALTHY, UNEQUAL | {"batch_size": 3, "d_model": 96, "max_length": 640}),
    ),
    *_pair(
        "data-loading",
        ("text", "slow-data=20", {}),
        ("text", "slow-data=12", OTHER_TEXT),
    ),
    *_pair(
        "evaluation-or-logging",
        ("text", "slow-logging=25", {"log_every": 1}),
        ("text", "lone-evaluation=20", OTHER_TEXT | {"eval_samples": 128}),
    ),
    *_pair(
        "needless-synchronisation",
        ("benchmark", "always-synchronised", {"accumulation": 4, "batch_size": 64}),
        ("text", "always-synchronised", {"accumulation": 4, "batch_size": 6}),
        rates=("1gbit", "500mbit"),
    ),
    *_pair(
        "bucket-cap",
        ("benchmark", HEALTHY, {"batch_size": 1024, "num_layers": 6}),
        (
            "benchmark",
            HEALTHY,
            SMALL_MLP | {"bucket_cap_mb": 0.0001, "num_layers": 14, "batch_size": 192},
        ),
        rates=("1gbit", ""),
    ),
    *_pair(
        "model-too-small",
        ("benchmark", HEALTHY, TINY_MLP | {"batch_size": 256}),
        ("benchmark", HEALTHY, TINY_MLP | {"hidden_dim": 48, "num_layers": 2, "batch_size": 64}),
    ),
    *_pair(
        "batch-too-small",
        ("benchmark", HEALTHY, {"batch_size": 192}),
        ("text", HEALTHY, {"batch_size": 2, "max_train_samples": 240}),
        rates=("1gbit", "500mbit"),
    ),
    *_pair(
        "network-too-slow",
        ("benchmark", HEALTHY, SMALL_MLP | {"batch_size": 32}),
        ("text", HEALTHY, {"batch_size": 2, "max_train_samples": 120}),
        rates=("50mbit", "50mbit"),
    ),
    Case("healthy-benchmark", HEALTHY, "benchmark"),
    Case(
        name="healthy-large-benchmark",
        cause=HEALTHY,
        program="benchmark",
        flags=(*LARGE_MLP.items(), ("batch_size", 512)),
        held_out=True,
    ),
    Case("healthy-text", HEALTHY, "text"),
    Case("healthy-other-text", HEALTHY, "text", flags=tuple(OTHER_TEXT.items()), held_out=True),
    Case(
        name="healthy-accumulation",
        cause=HEALTHY,
        program="benchmark",
        flags=(("accumulation", 4), ("batch_size", 256)),
        held_out=True,
    ),
    Case("healthy-hosts", HEALTHY, "benchmark", flags=(("batch_size", 2048),), rate="5gbit"),
    Case("healthy-text-hosts", HEALTHY, "text", rate="5gbit", held_out=True),
)


@dataclass(frozen=True)
class DiagnosisStudy:
    """Settings of the study: the cases to run, by default all."""

    only: tuple[str, ...] = ()
    """Names of cases, or of causes."""

    def __post_init__(self) -> None:
        known = {case.name for case in CASES} | {case.cause for case in CASES} | {SLOW_HOST}
        for name in self.only:
            if name not in known:
                raise UserError(f"unknown case {name!r}; known: {', '.join(sorted(known))}")

    def cases(self) -> list[Case]:
        """Returns the cases asked for, and the baselines that they are compared with."""
        chosen = [c for c in CASES if not self.only or {c.name, c.cause} & set(self.only)]
        wanted = {case.baseline for case in chosen}
        return [case for case in CASES if case in chosen or case.name in wanted]


SETTINGS = DiagnosisStudy


def run_study(study: DiagnosisStudy, output_dir: str, progress: StageProgress) -> Path:
    """Runs every case, diagnoses it and writes faults.csv; returns the run directory.

    Slow hosts are written to slow-hosts.csv.
    """
    cases = study.cases()
    slow_hosts = not study.only or SLOW_HOST in study.only
    reason = why_no_hosts() if slow_hosts or any(case.rate for case in cases) else None
    if reason:
        progress.say(f"without the cases on emulated hosts: {reason}")
        cases = [case for case in cases if not case.rate]
    environment = describe_environment("gloo", "cpu", RANKS)
    with study_run("diagnosis", study, output_dir, progress, environment) as run:
        (run.path / "logs").mkdir()
        run_cases(cases, run.path, progress)
        diagnoses = {case: diagnose_case(case, run.path) for case in cases if case.ranks > 1}
        table = pd.DataFrame([row_of(case, diagnosis) for case, diagnosis in diagnoses.items()])
        run.write_table("faults.csv", table)
        for case, diagnosis in diagnoses.items():
            text = "\n".join(lines_of(diagnosis)) + "\n"
            (run.path / "logs" / f"{case.name}.diagnosis.txt").write_text(text)
        if slow_hosts and not reason:
            named = run_slow_hosts(run.path, progress)
            run.write_table("slow-hosts.csv", named)
            right = named.groupby(named["slowed"] > 0)["right"].agg(["sum", "size"])
            progress.say(
                f"slow host named: {right.loc[True].tolist()}; nobody in healthy runs: "
                f"{right.loc[False].tolist()} (right, of)"
            )
    say_tables(progress, table)
    return run.path


def run_cases(cases: Sequence[Case], folder: Path, progress: StageProgress) -> None:
    """Runs all cases; ranks start once per world size on this machine and once per link rate."""
    for rate, ranks in dict.fromkeys((case.rate, case.ranks) for case in cases):
        hosts = EmulatedCluster.of(ranks, [rate]) if rate else None
        with launch_series(ranks, hosts=hosts) as series:
            for case in cases:
                if (case.rate, case.ranks) == (rate, ranks):
                    series.add(*case.words(folder))
                    with progress.stage(case.name) as update:
                        series.wait(folder / "logs" / f"{case.name}.log", update)


def diagnose_case(case: Case, folder: Path) -> Diagnosis:
    """Diagnoses the run of a case, against its baseline where it has one."""
    return diagnose_folder(folder / case.name, folder / case.baseline if case.baseline else None)


def row_of(case: Case, diagnosis: Diagnosis) -> dict[str, object]:
    """Returns what was planted in a run, and what was found."""
    causes = [verdict.cause for verdict in diagnosis.verdicts]
    first = diagnosis.verdicts[0] if causes else None
    return {
        "case": case.name,
        "planted": case.cause,
        "program": case.program,
        "fault": case.fault,
        "links": case.rate or "loopback",
        "held_out": case.held_out,
        "first": causes[0] if causes else HEALTHY,
        "second": causes[1] if len(causes) > 1 else "",
        "confidence": first.confidence if first else "",
        "lost_share": first.lost_share if first else None,
        "right": (causes[0] if causes else HEALTHY) == case.cause,
        "speedup_now": first.speedup_now if first else None,
        "predicted_speedup": first.predicted_speedup if first else None,
    }
