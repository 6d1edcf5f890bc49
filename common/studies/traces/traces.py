"""``ddplab study traces``: changes predicted from a job's traces, then made.

A job of two emulated hosts is profiled in arms that differ in one thing each (``job.py``), over
links of several rates. From the traces of one arm it is predicted what a step would take with a
change, by what ``ddplab predict --from-traces`` predicts with; the arm that has the change was run
in the same round. ``arms.csv`` has each arm's step and the error of its replay, ``predictions.csv``
what was predicted, ``cases.csv`` both side by side. A study that was cut goes on with
``--continues RUN_DIR``: jobs that are complete stay.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Annotated

import numpy as np
import pandas as pd

from common.analysis.replay.job import Job, read_job
from common.analysis.replay.system import at_caps, checked_system
from common.cluster.emulated import EmulatedCluster, parse_rate, why_no_hosts
from common.cluster.launch import launch
from common.errors import UserError
from common.perfmodel.replay.changes import (
    Predicted,
    equal_work,
    in_bf16,
    loader_hidden,
    network_times,
    no_slow_rank,
    predicted,
)
from common.perfmodel.replay.engine import run
from common.perfmodel.replay.gate import LIMIT, Gate, gate_of
from common.runtime.machine.environment import describe_environment
from common.runtime.paths import project_root
from common.runtime.records.study import earlier_tables, study_run
from common.runtime.stage_progress import StageProgress
from common.samples import median
from common.settings import Positive, Settings
from common.studies.traces.job import BASE, BF16, CAP, EVEN, LOADER, SLOW, UNEVEN

SCRIPT = project_root() / "common" / "studies" / "traces" / "job.py"
HOSTS = 2
CAPS = ("0.3", "0.6", "100")
ARMS = (BASE, SLOW, LOADER, UNEVEN, EVEN, BF16, *(CAP + cap for cap in CAPS))
JOB = ["model", "rate"]
MOVES, NEAR = 0.1, 0.1
"""Share of the step by which a change counts, and share of the change within which it is near."""
JUDGED_ROUNDS, MOST_NOISE = 4, NEAR / 2
"""Fewest rounds of a case that is judged, and the largest standard error of its change, as a share
of the change: above it, what was measured tells not whether a prediction is near."""


@dataclass(frozen=True)
class TracesStudy(Settings):
    """Settings of the study."""

    models: tuple[str, ...] = ("equal", "mixed")
    """Models of the job: equal layers, or layers that differ."""
    rates: tuple[str, ...] = ("40mbit", "80mbit", "160mbit")
    """Rates of the links."""
    rounds: Annotated[int, Positive] = 4
    """Rounds of each job: every arm once in each."""
    steps: Annotated[int, Positive] = 10
    """Profiled steps of an arm."""
    continues: str = ""
    """Run directory of a study that was cut, whose complete jobs are taken over."""


SETTINGS = TracesStudy


def run_study(study: TracesStudy, output_dir: str, progress: StageProgress) -> Path:
    """Runs all jobs and holds predictions against what came out; returns the run directory.

    Raises UserError: this machine cannot emulate hosts, or there is no study to go on with.
    """
    if reason := why_no_hosts():
        raise UserError(reason)
    tables = earlier_tables(study.continues, TABLES, JOB)
    environment = describe_environment("gloo", "cpu", HOSTS)
    with study_run("traces", study, output_dir, progress, environment) as run_dir:
        for name, table in tables.items():
            run_dir.write_table(name, table)
        finished = set(map(tuple, tables["arms.csv"][JOB].to_numpy()))
        for model, rate in product(study.models, study.rates):
            if (model, rate) in finished:
                continue
            folder = (run_dir.path / "traces" / f"{model}-{rate}").absolute()
            folder.mkdir(parents=True)
            with progress.stage(f"{model} over {rate}") as update:
                flags = [folder, model, study.rounds, study.steps, *ARMS]
                launch(
                    SCRIPT,
                    list(map(str, flags)),
                    HOSTS,
                    folder / "job.log",
                    hosts=EmulatedCluster.of(HOSTS, [rate]),
                    on_output=update,
                )
            new = job_rows(folder, model, rate, study.rates)
            for (name, table), rows in zip(tables.items(), new, strict=True):
                columns = list(TABLES[name])
                tables[name] = pd.concat([table, pd.DataFrame(rows, columns=columns)])
                run_dir.write_table(name, tables[name])
        cases = cases_of(*tables.values())
        run_dir.write_table("cases.csv", cases)
    progress.say(summary(cases, tables["arms.csv"]))
    return run_dir.path


TABLES = {
    "arms.csv": (*JOB, "round", "arm", "step_ms", "replay_error"),
    "predictions.csv": (
        *(*JOB, "round", "arm", "kind", "to_rate", "to_arm"),
        *("step_ms", "low_ms", "high_ms", "not_judged"),
    ),
}


def job_rows(
    folder: Path, model: str, rate: str, rates: tuple[str, ...]
) -> tuple[list[dict], list[dict]]:
    """Returns rows of ``arms.csv`` and ``predictions.csv`` from the traces of one job."""
    measured, foretold = [], []
    for path in sorted(folder.glob("round-*/*")):
        if not path.is_dir():
            continue
        about = {
            "model": model,
            "rate": rate,
            "round": int(path.parent.name.removeprefix("round-")),
            "arm": path.name,
        }
        job = read_job(path)
        gate = gate_of(run(job.program))
        measured.append(about | {"step_ms": gate.measured_s * 1e3, "replay_error": gate.error})
        for kind, to_rate, to_arm, answer in answers(job, gate, path.name, rate, rates):
            times = {"step_ms": None, "low_ms": None, "high_ms": None}
            if answer.step_s is not None and gate.is_open:
                ends = (answer.step_s.estimate, answer.step_s.low, answer.step_s.high)
                times = dict(zip(times, (end * 1e3 for end in ends), strict=True))
            target = {"kind": kind, "to_rate": to_rate, "to_arm": to_arm}
            refusal = answer.not_judged if gate.is_open else gate.worst
            foretold.append(about | target | times | {"not_judged": refusal})
    return measured, foretold


def answers(
    job: Job, gate: Gate, variant: str, rate: str, rates: tuple[str, ...]
) -> Iterator[tuple[str, str, str, Predicted]]:
    """Yields what is predicted: kind of change, the rate and variant that have it, the step."""
    base = run(job.program)
    if variant == BASE:
        for other in rates:
            factor = parse_rate(other) / parse_rate(rate)
            if factor != 1:
                yield "network", other, BASE, predicted("network", network_times(factor), base)
        yield "bf16", rate, BF16, predicted("bf16", in_bf16, base)
        for cap in CAPS:
            yield "cap", rate, CAP + cap, at_cap(job, gate, float(cap))
    elif variant == SLOW:
        yield "slow rank", rate, BASE, predicted("no slow rank", no_slow_rank, base)
    elif variant == LOADER:
        yield "loader", rate, BASE, predicted("loader hidden", loader_hidden, base)
    elif variant == UNEVEN:
        yield "uneven work", rate, EVEN, predicted("equal work", equal_work, base)
    elif variant.startswith(CAP):
        yield "cap", rate, BASE, at_cap(job, gate, None)


def at_cap(job: Job, gate: Gate, cap: float | None) -> Predicted:
    """Predicts a step at another cap."""
    try:
        system = checked_system(job)
    except UserError as reason:
        return Predicted("cap", not_judged=str(reason))
    return Predicted("cap", at_caps(system, gate.steps["measured_s"], [cap])["step"].iloc[0])


def cases_of(arms: pd.DataFrame, predictions: pd.DataFrame) -> pd.DataFrame:
    """Returns a row per case, means over its rounds: before, after, predicted, in ms.

    ``error`` is that of the predicted change, as a share of the change that came out, infinite
    where a round was not predicted, ``noise`` the standard error of the latter over rounds;
    ``inside`` the share of rounds in which what came out lay inside the interval.
    """
    after = arms.rename(columns={"rate": "to_rate", "arm": "to_arm", "step_ms": "after_ms"})
    before = arms.rename(columns={"step_ms": "before_ms"})
    numbers = ["round", "step_ms", "low_ms", "high_ms"]  # empty cells come back as text
    rows = predictions.assign(**{name: pd.to_numeric(predictions[name]) for name in numbers})
    rows["step_ms"] = rows["step_ms"].fillna(np.inf)
    rows = rows.merge(before, on=[*JOB, "round", "arm"])
    rows = rows.merge(
        after.drop(columns="replay_error"), on=["model", "to_rate", "round", "to_arm"]
    )
    rows["inside"] = rows["after_ms"].between(rows["low_ms"], rows["high_ms"])
    keys = ["kind", *JOB, "arm", "to_rate", "to_arm"]
    times = ["before_ms", "after_ms", "step_ms", "inside"]
    rows["change_ms"] = rows["after_ms"] - rows["before_ms"]
    grouped = rows.groupby(keys)
    cases = grouped[[*times, "change_ms"]].mean()
    cases = cases.assign(rounds=grouped.size(), noise=grouped["change_ms"].sem()).reset_index()
    change = cases.pop("change_ms")
    foretold = cases["step_ms"] - cases["before_ms"]
    return cases.assign(
        moved=change / cases["before_ms"],
        error=(foretold - change) / change,
        noise=cases["noise"] / change.abs(),
        step_error=cases["step_ms"] / cases["after_ms"] - 1,
    )


def summary(cases: pd.DataFrame, arms: pd.DataFrame) -> str:
    """Returns how many replays and predictions came out."""
    replayed = (arms["replay_error"].abs() <= LIMIT).sum()
    lines = [f"Replays within {LIMIT:.0%} of the step: {replayed} of {len(arms)}."]
    large = cases[cases["moved"].abs() >= MOVES]
    judged = large[(large["rounds"] >= JUDGED_ROUNDS) & (large["noise"] <= MOST_NOISE)]
    groups = [("all", large), ("judged, as their noise allows it", judged)]
    groups += [(f"judged, {kind}", rows) for kind, rows in judged.groupby("kind")]
    for name, rows in groups:
        near = (rows["error"].abs() <= NEAR).sum()
        change, step = (_median_text(rows[name]) for name in ("error", "step_error"))
        lines.append(
            f"{name}: {len(rows)} changes that move the step by {MOVES:.0%}: predicted within "
            f"{NEAR:.0%} of the change in {near}; median error of the change {change}, of the step "
            f"{step}; "
            f"inside the interval in {rows['inside'].mean():.0%} of rounds."
        )
    return "\n".join(lines)


def _median_text(errors: pd.Series) -> str:
    """Returns the median size of errors with its interval over cases."""
    if errors.empty:
        return "not there"
    middle = median(errors.abs())
    ends = middle.text("{:.1%}", unit="case")
    return f"{middle.estimate:.1%} ({ends})"
