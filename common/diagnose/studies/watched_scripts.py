"""``ddplab study scripts``: what ``ddplab diagnose`` says of other people's scripts.

Scripts in many styles, whose faults are their own (``script_cases``), run watched on two ranks,
with each fault and without. The fault is then removed, in rounds with it and without, as the
machine's speed changes from run to run. The speedup that this brings is held against the predicted
one, and against that of the best change that the watch tried itself (``verify``). Healthy runs must
give no verdict of more than low confidence. Where TraceML is installed, each case is run once more
under it (``traceml_ranks``), and its primary diagnosis stands beside ours as it prints it.

``ddplab study scripts --continues RUN_DIR`` goes on with a study that was cut. Cases that are there
are not run again but for rounds that are missing, and are diagnosed anew from their bundles: as the
diagnosis is today.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import median

import ddplab_watch
import pandas as pd

from common.analysis.step_parts import STEP
from common.cluster.launch import launch
from common.diagnose.causes.trials import tried_against
from common.diagnose.evidence.evidence import SAMPLES
from common.diagnose.opened import Opened, open_diagnosis
from common.diagnose.studies.script_cases import CASES, ELEVENTH, HEALTHY, RANKS, Case
from common.errors import RunFailed, UserError
from common.runtime.machine.environment import describe_environment
from common.runtime.paths import project_root
from common.runtime.records.study import earlier_table, say_tables, study_run, with_verdicts
from common.runtime.stage_progress import StageProgress
from common.samples import slowest_rank

WATCH = Path(ddplab_watch.__file__).parent / "__main__.py"
TRACEML = project_root() / "common" / "diagnose" / "studies" / "traceml_ranks.py"
RUNS, RESULTS = "runs", "cases.csv"
TRACEML_ENDS = "-traceml"
"""Ends the names of what a run under TraceML has left."""
NAMED_SHARE, CLOSE, CLOSE_SHARE = 0.95, 0.10, 0.80
"""Promises: the share of causes named first; the tolerance of predicted gains, the share within."""


LEAST_GAINS = 3
"""Rounds from which one can be held against the others."""


@dataclass(frozen=True)
class ScriptsStudy:
    """Settings of the study: the cases to run, by default all."""

    only: tuple[str, ...] = ()
    """Names of cases, causes, scripts or sets; by default the newest set."""
    rounds: int = 3
    """Runs with the fault and without, of each case that has one."""
    continues: str = ""
    """Run directory of a study that was cut."""

    def __post_init__(self) -> None:
        if self.rounds < 1:
            raise UserError(f"rounds is {self.rounds}; it must be at least 1")
        known = {word for case in CASES for word in case.labels}
        for name in self.only:
            if name not in known:
                shared = sorted(known - {case.name for case in CASES})
                raise UserError(
                    f"unknown case {name!r}; a case's name, or one of {', '.join(shared)}"
                )

    def cases(self) -> list[Case]:
        """Returns the cases asked for."""
        wanted = set(self.only) or {ELEVENTH}
        return [case for case in CASES if case.labels & wanted]


SETTINGS = ScriptsStudy


def run_study(study: ScriptsStudy, output_dir: str, progress: StageProgress) -> Path:
    """Runs every case watched, with its fault and without, and diagnoses it.

    Returns:
        the run directory: ``cases.csv``, ``verdicts.csv``, and in ``runs/`` each bundle and log.
    """
    cases = study.cases()
    recorded = set(earlier_table(study.continues, RESULTS, ["case", "planted", "first"])["case"])
    earlier = [case for case in cases if case.name in recorded]
    for case in earlier:
        require_bundles(case, Path(study.continues) / RUNS)
    environment = describe_environment("gloo", "cpu", RANKS)
    with study_run("scripts", study, output_dir, progress, environment) as run:
        folder = (run.path / RUNS).absolute()  # ranks start in another folder
        folder.mkdir()
        rows = []
        for case in cases:
            if case in earlier:
                copy_case(case, Path(study.continues) / RUNS, folder)
            with progress.stage(case.name) as update:
                run_case(case, folder, study.rounds, update)
            rows.append(diagnose_case(case, folder, study.rounds))
            run.write_table(RESULTS, pd.DataFrame(rows))  # whole after each
        table = pd.DataFrame(rows)
        verdicts = judge(table)
        run.write_table("verdicts.csv", verdicts)
    say_tables(progress, table, verdicts)
    return run.path


def run_case(case: Case, folder: Path, rounds: int, update: Callable[[str], None]) -> None:
    """Runs a case watched, with its fault and, where that is possible, without; then under TraceML.

    Bundles and logs are left in ``folder``, under the case's name. What is there is not run again.
    """
    run_watched(case, folder, update)
    for number in range(rounds) if len(case.variants) > 1 else ():
        for removed in case.variants if number % 2 == 0 else case.variants[::-1]:
            run_watched(case, folder, update, removed=removed, number=number)
    if find_spec("traceml_ai") is not None and not traceml_log(case, folder).exists():
        run_under_traceml(case, folder, update)


def run_watched(
    case: Case,
    folder: Path,
    update: Callable[[str], None],
    *,
    removed: bool = False,
    number: int = 0,
) -> None:
    """Runs a case watched, if its bundle is not there.

    Probes are the first round's, and trials that of the run with the fault.
    """
    name = case.bundle(removed, number)
    if (folder / name).exists():
        return
    options = [f"probe={int(number == 0)}", f"verify={int(number == 0 and not removed)}"]
    words = [f"folder={folder / name}", *options, *case.words(removed)]
    launch(WATCH, words, RANKS, folder / f"{name}.log", on_output=update)


def require_bundles(case: Case, earlier: Path) -> None:
    """Raises UserError where the folder of an earlier study lacks a bundle of a case."""
    for removed in case.variants:
        if not (earlier / case.bundle(removed)).is_dir():
            raise UserError(f"--continues: {case.bundle(removed)} is missing in {earlier}")


def copy_case(case: Case, earlier: Path, folder: Path) -> None:
    """Copies what ``run_case`` has left in the folder of an earlier study."""
    for removed in case.variants:
        name = case.bundle(removed)
        later = (path for path in earlier.glob(f"{name}-round-*") if path.is_dir())
        for bundle in (earlier / name, *later):
            shutil.copytree(bundle, folder / bundle.name)
            shutil.copy(earlier / f"{bundle.name}.log", folder)
    log = traceml_log(case, earlier)
    for path in (log, log.with_suffix(".json")):
        if path.exists():
            shutil.copy(path, folder)


def diagnose_case(case: Case, folder: Path, rounds: int) -> dict[str, object]:
    """Diagnoses a case from its bundles; writes each diagnosis beside them and returns its row."""
    opened = {}
    for removed in case.variants:
        name = case.bundle(removed)
        opened[removed] = open_diagnosis(folder / name)
        (folder / f"{name}.txt").write_text("\n".join(opened[removed].lines()) + "\n")
    gains = []
    for number in range(rounds) if len(case.variants) > 1 else ():
        runs = [open_diagnosis(folder / case.bundle(removed, number)) for removed in (False, True)]
        faulty, healthy = (different_samples_per_s(run) for run in runs)
        gains.append(healthy / faulty)
    return row_of(case, opened[False], gains) | {"traceml": traceml_verdict(case, folder)}


def different_samples_per_s(opened: Opened) -> float:
    """Computes the samples per second of a run's plain steps, each sample of an epoch once.

    Steps are counted where the watch saw no samples: of a script without a loader and a wrapper.
    Steps end with their slowest rank. What lies between them counts, and so does a step that is
    long now and then: means, where the diagnosis itself has medians.
    """
    run = opened.case.run
    steps = run.unwatched
    whole_ms = steps["step_time_ms"] + steps["between_time_ms"].fillna(0.0)
    slowest_ms = slowest_rank(steps.assign(whole_ms=whole_ms), "whole_ms", by=STEP)
    samples = run.tables.get(SAMPLES)
    different = 1.0
    if samples is not None:
        epochs = samples.groupby("epoch").agg({"processed": "sum", "distinct_all_ranks": "first"})
        different = epochs["distinct_all_ranks"].sum() / epochs["processed"].sum()
    processed = steps["samples"].sum() or len(slowest_ms)
    return float(different * processed / slowest_ms.sum() * 1e3)


def traceml_log(case: Case, folder: Path) -> Path:
    """Returns the path of the log of a case's run under TraceML."""
    return folder / f"{case.name}{TRACEML_ENDS}.log"


def run_under_traceml(case: Case, folder: Path, update: Callable[[str], None]) -> None:
    """Runs a case with its fault under TraceML, and keeps its log and its summary."""
    log = traceml_log(case, folder)
    logs = log.with_suffix("")
    words = [str(logs), *case.words(removed=False)]
    try:
        launch(TRACEML, words, RANKS, log, on_output=update)
        shutil.copy(logs / "traceml" / "final_summary.json", log.with_suffix(".json"))
    except (RunFailed, OSError) as error:
        update(f"{logs.name}: {error}")
    finally:
        shutil.rmtree(logs, ignore_errors=True)  # what it samples is much


def traceml_verdict(case: Case, folder: Path) -> str:
    """Returns the kind of TraceML's primary diagnosis of a case.

    It is empty where the case was not run under TraceML, and ``failed`` where that left no summary.
    """
    log = traceml_log(case, folder)
    if not log.exists():
        return ""
    summary = log.with_suffix(".json")
    if not summary.exists():
        return "failed"
    return str(json.loads(summary.read_text())["primary_diagnosis"]["kind"])


def row_of(case: Case, faulty: Opened, gains: Sequence[float]) -> dict[str, object]:
    """Returns what was planted, what was found, and what removing it brought.

    ``gains`` are speeds without the fault over those with it, by round.
    """
    verdicts = faulty.diagnosis.verdicts
    first = verdicts[0] if verdicts else None
    predicted = low = high = tried_gain = None
    if first is not None and (tried := tried_against(first, faulty.diagnosis.tried)):
        tried_gain = 1 / (1 - tried.gain.estimate * tried.share)
    if gains and first is not None:
        predicted, low, high = first.gain, first.gain_low, first.gain_high
    return {
        "case": case.name,
        "planted": case.cause,
        "script": case.script,
        "fault": case.fault,
        "first": first.cause if first else HEALTHY,
        "second": verdicts[1].cause if len(verdicts) > 1 else "",
        "confidence": first.confidence if first else "",
        "is_sure": any(verdict.confidence != "low" for verdict in verdicts),
        "named": (first.cause if first else HEALTHY) == case.cause,
        "predicted_gain": predicted,
        "gain_low": low,
        "gain_high": high,
        "tried_gain": tried_gain,
        "achieved_gain": median(gains) if gains else None,
        "achieved_least": min(gains, default=None),
        "achieved_most": max(gains, default=None),
        "rounds_agree": rounds_that_agree(gains),
        "step_ms": faulty.case.run.step_ms,
        "notes": " ".join(faulty.notes),
    }


def rounds_that_agree(gains: Sequence[float]) -> float | None:
    """Returns the share of rounds whose gain is within a tenth of the other rounds' median.

    A prediction cannot agree more often than a second measurement does. None below three rounds.
    """
    if len(gains) < LEAST_GAINS:
        return None
    medians = (median([*gains[:at], *gains[at + 1 :]]) for at in range(len(gains)))
    close = [abs(gain / usual - 1) <= CLOSE for gain, usual in zip(gains, medians, strict=True)]
    return sum(close) / len(close)


def judge(cases: pd.DataFrame) -> pd.DataFrame:
    """Compares what was found with what is promised; returns a row per promise."""
    planted = cases[cases["planted"] != HEALTHY]
    healthy = cases[cases["planted"] == HEALTHY]
    numbers = ["predicted_gain", "achieved_gain", "gain_low", "gain_high"]
    gains = planted[numbers].apply(pd.to_numeric, errors="coerce")
    compared = gains.dropna(subset=numbers[:2])
    error = (compared["predicted_gain"] / compared["achieved_gain"] - 1).abs()
    within = compared["achieved_gain"].between(compared["gain_low"], compared["gain_high"])
    agree = pd.to_numeric(planted.get("rounds_agree", pd.Series(dtype=float)), errors="coerce")
    of_first = (healthy["first"] != HEALTHY) & (healthy["confidence"] != "low")  # of older tables
    alarms = healthy[healthy["is_sure"].astype(bool) if "is_sure" in healthy else of_first]
    promises = [
        ("share of planted causes named first", NAMED_SHARE, None, planted["named"].mean()),
        ("healthy runs with a verdict of more than low confidence", None, 0.0, len(alarms)),
        ("share of predicted gains within a tenth", CLOSE_SHARE, None, (error <= CLOSE).mean()),
        ("share of gains within their interval", 0.9, None, within.mean()),
        ("share of single rounds within a tenth of the others", None, None, agree.mean()),
    ]
    return with_verdicts(promises)
