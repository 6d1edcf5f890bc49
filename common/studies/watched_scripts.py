"""``ddplab study scripts``: what ``ddplab diagnose`` says of other people's scripts.

Six scripts in six styles (``assignments/assignment4/scripts``) run watched on two ranks, with a
fault planted from outside (``planted_faults``) or by a setting, and without one. Each cause is
planted in two scripts; thresholds were set on the first, and the second was held out. The fault is
then removed, and the speedup that this brings is held against the predicted one, and against that
of the best change that the watch tried itself (``verify``). Healthy runs must give no verdict of
more than low confidence. Where TraceML is installed, each case is run once more under it
(``traceml_ranks``), and its primary diagnosis stands beside ours as it prints it.

``ddplab study scripts --continues RUN_DIR`` goes on with a study that was cut. Cases that are there
are not run again, and diagnosed anew from their bundles: as the diagnosis is today.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import ddplab_watch
import pandas as pd

from common.analysis.diagnosis.opened import Opened, open_diagnosis
from common.analysis.diagnosis.tried import TRIED_BY, pass_share, tried_against
from common.cluster.emulated import EmulatedCluster, why_not
from common.cluster.launch import launch
from common.errors import RunFailed, UserError
from common.report.progress import StageProgress
from common.runtime.paths import project_root
from common.studies.study import earlier_table, study_run, with_verdicts

RANKS = 2
HEALTHY = "healthy"
WATCH = Path(ddplab_watch.__file__).parent / "__main__.py"
PLANTED = project_root() / "common" / "studies" / "planted_faults.py"
TRACEML = project_root() / "common" / "studies" / "traceml_ranks.py"
SCRIPTS = project_root() / "assignments" / "assignment4" / "scripts"
RUNS, RESULTS = "runs", "cases.csv"
TRACEML_ENDS = "-traceml"
"""Ends the names of what a run under TraceML has left."""
NAMED_SHARE, CLOSE, CLOSE_SHARE = 0.95, 0.10, 0.80
"""Promises: the share of causes named first; the tolerance of predicted gains, the share within."""


@dataclass(frozen=True)
class Case:
    """One script with one fault.

    Attributes:
        name: of its folder.
        cause: what must be named first; ``healthy`` for none.
        script: of ``SCRIPTS``.
        fault: for ``planted_faults``.
        flags: of the script.
        rate: of the links of two emulated hosts; empty for ranks of this machine.
        held_out: whether it was not looked at when thresholds were set.
        remedy: flags of the run without the fault, where it is no planted one.
    """

    name: str
    cause: str
    script: str
    fault: str = HEALTHY
    flags: tuple[tuple[str, object], ...] = ()
    rate: str = ""
    held_out: bool = False
    remedy: tuple[tuple[str, object], ...] = ()

    @property
    def is_removed(self) -> bool:
        """Returns True if there is a run without the fault to compare with."""
        return self.fault != HEALTHY or bool(self.remedy)

    @property
    def hosts(self) -> EmulatedCluster | None:
        """Returns the hosts that it runs on; None for ranks of this machine."""
        return EmulatedCluster.of(RANKS, [self.rate]) if self.rate else None

    @property
    def planted_or_not(self) -> tuple[bool, ...]:
        """Returns whether the fault is removed, for each of the watched runs."""
        return (False, True) if self.is_removed else (False,)

    def bundle(self, removed: bool) -> str:
        """Returns the name of a watched run's folder."""
        return f"{self.name}-removed" if removed else self.name

    def words(self, removed: bool) -> list[str]:
        """Returns the program that is watched: the planting, the fault, the script."""
        flags = dict(self.flags) | (dict(self.remedy) if removed else {})
        given = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
        fault = HEALTHY if removed else self.fault
        script = str(SCRIPTS / f"{self.script}.py")
        return [str(PLANTED), fault, script, *given]


def _pair(cause: str, *two: tuple, rates: tuple[str, str] = ("", "")) -> Iterator[Case]:
    """Yields the cases of a cause: (script, fault, flags, remedy), the second held out."""
    for (script, fault, *settings), rate, held in zip(two, rates, (False, True), strict=True):
        flags, remedy = (tuple(each.items()) for each in (*settings, {}, {})[:2])
        name = f"{cause}-{script}{'-held-out' if held else ''}"
        if fault != HEALTHY:
            name = f"{cause}-{fault.partition('=')[0]}-{script}"
        yield Case(name, cause, script, fault, flags, rate, held, remedy)


CASES = (
    *_pair("wrong-sampler", ("plain", "missing-sampler"), ("accumulating", "overlapping-sampler")),
    *_pair("slow-rank", ("plain", "slow-forward=25"), ("trainer", "slow-forward=40")),
    *_pair("slow-rank", ("accumulating", "slow-backward=20"), ("streaming", "slow-backward=40")),
    *_pair("data-loading", ("plain", "slow-loader=25"), ("accelerated", "slow-loader=20")),
    *_pair("data-loading", ("accumulating", "slow-data=15"), ("accelerated", "slow-data=25")),
    *_pair("slow-update", ("plain", "slow-update=20"), ("trainer", "slow-update=40")),
    *_pair(
        "evaluation-or-logging",
        ("plain", "lone-checkpoint=60"),
        ("accelerated", "lone-checkpoint=80"),
    ),
    *_pair(
        "needless-synchronisation",
        ("accumulating", "always-synchronised", {"accumulation": 4, "channels": 48}),
        ("accelerated", "always-synchronised", {"accumulation": 4, "width": 192}),
        rates=("500mbit", "500mbit"),
    ),
    *_pair(
        "bucket-cap",
        ("plain", "bucket-cap=1000", {"width": 768}),
        ("streaming", "bucket-cap=0.001", {"width": 64, "batch_size": 4}),
        rates=("1gbit", ""),
    ),
    *_pair("needless-search", ("plain", "unused-search"), ("streaming", "unused-search")),
    *_pair("garbage-collection", ("plain", "garbage=500"), ("streaming", "garbage=800")),
    *_pair("growing-memory", ("plain", "growing-memory=30"), ("accelerated", "growing-memory=20")),
    *_pair("oversubscribed-cores", ("plain", "one-core"), ("trainer", "many-threads=4")),
    *_pair(
        "unequal-lengths",
        ("trainer", HEALTHY, {"uneven": 1, "batch_size": 4}),
        ("trainer", HEALTHY, {"uneven": 1, "batch_size": 3, "tokens": 96}),
    ),
    *_pair(
        "batch-too-small",
        ("plain", HEALTHY, {"batch_size": 96}, {"batch_size": 384}),
        ("streaming", HEALTHY, {"batch_size": 4}, {"batch_size": 16}),
        rates=("1gbit", "1gbit"),
    ),
    *_pair(
        "model-too-small",
        ("plain", HEALTHY, {"width": 8, "batch_size": 32}, {"width": 8, "batch_size": 512}),
        ("accelerated", HEALTHY, {"width": 4, "batch_size": 2}, {"width": 4, "batch_size": 32}),
    ),
    *_pair(
        "network-too-slow",
        ("plain", HEALTHY, {"batch_size": 32}),
        ("streaming", HEALTHY, {"batch_size": 2}),
        rates=("50mbit", "50mbit"),
    ),
    Case("healthy-plain", HEALTHY, "plain"),
    Case("healthy-plain-wide", HEALTHY, "plain", flags=(("width", 1024),), held_out=True),
    Case("healthy-plain-hosts", HEALTHY, "plain", flags=(("batch_size", 1024),), rate="5gbit"),
    Case("healthy-accumulating", HEALTHY, "accumulating"),
    Case(
        name="healthy-accumulating-one",
        cause=HEALTHY,
        script="accumulating",
        flags=(("accumulation", 1), ("batch_size", 96)),
        held_out=True,
    ),
    Case("healthy-trainer", HEALTHY, "trainer"),
    Case("healthy-trainer-long", HEALTHY, "trainer", flags=(("tokens", 128),), held_out=True),
    Case("healthy-accelerated", HEALTHY, "accelerated"),
    Case(
        "healthy-accelerated-wide", HEALTHY, "accelerated", flags=(("width", 192),), held_out=True
    ),
    Case("healthy-streaming", HEALTHY, "streaming"),
    Case("healthy-streaming-long", HEALTHY, "streaming", flags=(("tokens", 96),), held_out=True),
    Case("healthy-sharded", HEALTHY, "sharded"),
    Case("healthy-sharded-wide", HEALTHY, "sharded", flags=(("width", 512),), held_out=True),
)


@dataclass(frozen=True)
class ScriptsStudy:
    """Settings of the study: the cases to run, by default all."""

    only: tuple[str, ...] = ()
    """Names of cases, of causes or of scripts."""
    continues: str = ""
    """Run directory of a study that was cut."""

    def __post_init__(self) -> None:
        known = {name for case in CASES for name in (case.name, case.cause, case.script)}
        for name in self.only:
            if name not in known:
                raise UserError(f"unknown case {name!r}; known: {', '.join(sorted(known))}")

    def cases(self) -> list[Case]:
        """Returns the cases asked for."""
        wanted = set(self.only)
        return [c for c in CASES if not wanted or {c.name, c.cause, c.script} & wanted]


def run_study(study: ScriptsStudy, output_dir: str, progress: StageProgress) -> Path:
    """Runs every case watched, with its fault and without, and diagnoses it.

    Returns:
        the run directory: ``cases.csv``, ``verdicts.csv``, and in ``runs/`` each bundle and log.
    """
    cases = study.cases()
    if (reason := why_not()) and any(case.rate for case in cases):
        progress.say(f"without the cases on emulated hosts: {reason}")
        cases = [case for case in cases if not case.rate]
    done = set(earlier_table(study.continues, RESULTS, ["case", "planted", "first"])["case"])
    with study_run("scripts", study, output_dir, progress, backend="gloo", ranks=RANKS) as run:
        folder = (run.path / RUNS).absolute()  # ranks start in another folder
        folder.mkdir()
        rows = []
        for case in cases:
            if case.name in done:
                copy_case(case, Path(study.continues) / RUNS, folder)
            else:
                with progress.stage(case.name) as update:
                    run_case(case, folder, update)
            rows.append(diagnose_case(case, folder))
            run.write_table(RESULTS, pd.DataFrame(rows))  # whole after each
        table = pd.DataFrame(rows)
        verdicts = judge(table)
        run.write_table("verdicts.csv", verdicts)
    progress.say(table.to_string(index=False, float_format="%.3g"))
    progress.say(verdicts.to_string(index=False, float_format="%.3g"))
    return run.path


def run_case(case: Case, folder: Path, update: Callable[[str], None]) -> None:
    """Runs a case watched, with its fault and, where that is possible, without; then under TraceML.

    Bundles and logs are left in ``folder``, under the case's name.
    """
    for removed in case.planted_or_not:
        name = case.bundle(removed)
        verify = not removed and case.cause in TRIED_BY
        words = [f"folder={folder / name}", f"verify={int(verify)}", *case.words(removed)]
        launch(WATCH, words, RANKS, folder / f"{name}.log", hosts=case.hosts, on_output=update)
    if find_spec("traceml_ai") is not None:
        run_under_traceml(case, folder, update)


def copy_case(case: Case, earlier: Path, folder: Path) -> None:
    """Copies what ``run_case`` has left in the folder of an earlier study.

    Raises:
        UserError: a bundle is missing.
    """
    for removed in case.planted_or_not:
        bundle = earlier / case.bundle(removed)
        if not bundle.is_dir():
            raise UserError(f"--continues: {bundle.name} is missing in {earlier}")
        shutil.copytree(bundle, folder / bundle.name)
        shutil.copy(earlier / f"{bundle.name}.log", folder)
    for path in earlier.glob(f"{case.name}{TRACEML_ENDS}.*"):
        shutil.copy(path, folder)


def diagnose_case(case: Case, folder: Path) -> dict[str, object]:
    """Diagnoses a case from its bundles; writes each diagnosis beside them and returns its row."""
    opened = []
    for removed in case.planted_or_not:
        name = case.bundle(removed)
        opened.append(open_diagnosis(folder / name))
        (folder / f"{name}.txt").write_text("\n".join(opened[-1].lines()) + "\n")
    return row_of(case, *opened) | {"traceml": traceml_verdict(case, folder)}


def run_under_traceml(case: Case, folder: Path, update: Callable[[str], None]) -> None:
    """Runs a case with its fault under TraceML, and keeps its log and its summary."""
    name = f"{case.name}{TRACEML_ENDS}"
    logs = folder / name
    words = [str(logs), *case.words(removed=False)]
    try:
        launch(TRACEML, words, RANKS, folder / f"{name}.log", hosts=case.hosts, on_output=update)
        summary = (logs / "traceml" / "final_summary.json").read_text()
        (folder / f"{name}.json").write_text(summary)
    except (RunFailed, OSError) as error:
        update(f"{name}: {error}")
    finally:
        shutil.rmtree(logs, ignore_errors=True)  # what it samples is much


def traceml_verdict(case: Case, folder: Path) -> str:
    """Returns the kind of TraceML's primary diagnosis of a case.

    It is empty where the case was not run under TraceML, and ``failed`` where that left no summary.
    """
    log = folder / f"{case.name}{TRACEML_ENDS}.log"
    if not log.exists():
        return ""
    summary = log.with_suffix(".json")
    if not summary.exists():
        return "failed"
    return str(json.loads(summary.read_text())["primary_diagnosis"]["kind"])


def row_of(case: Case, faulty: Opened, healthy: Opened | None = None) -> dict[str, object]:
    """Returns what was planted, what was found, and what removing it brought."""
    verdicts = faulty.found.verdicts
    first = verdicts[0] if verdicts else None
    achieved = predicted = low = high = tried_gain = None
    if first is not None and (tried := tried_against(first, faulty.found.tried)):
        tried_gain = 1 / (1 - tried.gain.estimate * pass_share(faulty.case))
    if healthy is not None:
        achieved = healthy.case.run.throughput / faulty.case.run.throughput
        if first is not None and first.predicted_speedup and first.speedup_now:
            predicted = first.predicted_speedup / first.speedup_now
            if first.speedup_low is not None and first.speedup_high is not None:
                low, high = (s / first.speedup_now for s in (first.speedup_low, first.speedup_high))
    return {
        "case": case.name,
        "planted": case.cause,
        "script": case.script,
        "fault": case.fault,
        "links": case.rate or "loopback",
        "held_out": case.held_out,
        "first": first.cause if first else HEALTHY,
        "second": verdicts[1].cause if len(verdicts) > 1 else "",
        "confidence": first.confidence if first else "",
        "named": (first.cause if first else HEALTHY) == case.cause,
        "predicted_gain": predicted,
        "gain_low": low,
        "gain_high": high,
        "tried_gain": tried_gain,
        "achieved_gain": achieved,
        "step_ms": faulty.case.run.step_ms,
        "notes": " ".join(faulty.notes),
    }


def judge(cases: pd.DataFrame) -> pd.DataFrame:
    """Compares what was found with what is promised; returns a row per promise."""
    planted = cases[cases["planted"] != HEALTHY]
    healthy = cases[cases["planted"] == HEALTHY]
    numbers = ["predicted_gain", "achieved_gain", "gain_low", "gain_high"]
    gains = planted[numbers].apply(pd.to_numeric, errors="coerce")
    both = gains.dropna(subset=numbers[:2])
    error = (both["predicted_gain"] / both["achieved_gain"] - 1).abs()
    within = both["achieved_gain"].between(both["gain_low"], both["gain_high"])
    alarms = healthy[(healthy["first"] != HEALTHY) & (healthy["confidence"] != "low")]
    held_out = planted[planted["held_out"].astype(bool)]
    found = [
        ("share of planted causes named first", NAMED_SHARE, None, planted["named"].mean()),
        ("the same where held out", NAMED_SHARE, None, held_out["named"].mean()),
        ("healthy runs with a verdict of more than low confidence", None, 0.0, len(alarms)),
        ("share of predicted gains within a tenth", CLOSE_SHARE, None, (error <= CLOSE).mean()),
        ("share of gains within their interval", 0.9, None, within.mean()),
    ]
    columns = ["promise", "at_least", "at_most", "found"]
    return with_verdicts(pd.DataFrame(found, columns=columns))
