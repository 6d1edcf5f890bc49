"""Finds the main limit of scaling (assignment 4), and the change that would help most."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pandas as pd

from common.analysis.findings.finding import (
    MEASURED,
    Answer,
    Question,
    repeated,
    span,
    with_interval,
)
from common.analysis.runs import Run, complete_runs
from common.analysis.sweep_speedups import NO_CHANGE
from common.diagnose.changes import (
    CLOSE,
    SWEEP,
    best_or_tied,
    find_changes,
    open_changes,
    sweep_before,
)
from common.diagnose.diagnosis import case_of, examine_case, lost_by_round
from common.diagnose.evidence.case import Case, Verdict
from common.errors import UserError
from common.judged import DISTURBED, FIRST_PAGE_ROUNDS, Judged
from common.runtime.wording import counted
from common.samples import student


def main_cause(folder: Path) -> Answer:
    """Finds the main cause that a sweep is diagnosed with: of changes that were made, the one
    before them, else the newest."""
    run, arm = _diagnosed_sweep(folder)
    case = case_of(run.folder, arm=arm)
    diagnosis = examine_case(case)
    where = (Run(run.folder, folder),)
    if not diagnosis.verdicts:
        return Answer("no limiting cause found", diagnosis.summary, MEASURED, where)
    verdict = diagnosis.verdicts[0]
    judged = _judged_share(case, verdict)
    takes = f"; it takes {verdict.lost_share:.0%} of the step" if judged else ""
    ends = f", {with_interval(judged, '{:.0%}')}" if judged else ""
    doubts = ["low confidence"] if verdict.confidence == "low" else []
    is_disturbed = run.machine_state == DISTURBED
    doubts += ["the machine was disturbed"] if is_disturbed else []
    further = len(diagnosis.verdicts) - 1
    more = f"{counted(further, 'further cause')}; " if further else ""
    return Answer(
        value=f"{verdict.title}{takes}",
        spread=f"confidence {verdict.confidence}{ends}; {more}{run.environment['network']}",
        kind=MEASURED,
        runs=where,
        judged=judged,
        hidden="what limits scaling" if judged or is_disturbed else "",
        doubt=", ".join(doubts),
        settle=repeated(where[0]),
    )


def _judged_share(case: Case, verdict: Verdict) -> Judged | None:
    """Judges the share of a step that the main cause takes, round by round; None without a share.

    The share is that of all steps, as the diagnosis has it; its interval is one over rounds.
    """
    if not verdict.lost_share:
        return None
    rounds = student(lost_by_round(case, verdict.cause))
    return Judged(
        replace(rounds, estimate=verdict.lost_share),
        null=0.0,
        population="all steps; its interval round by round",
        machine=case.run.opened.machine_state,
        least_rounds=FIRST_PAGE_ROUNDS,
    )


def _diagnosed_sweep(folder: Path) -> tuple[Run, int | None]:
    """Returns the sweep that is diagnosed and its arm; None leaves the choice to the diagnosis."""
    for made in reversed(find_changes(folder)):
        if sweep := sweep_before(made, open_changes(made)):
            return sweep
    sweeps = [
        run
        for run in complete_runs(folder, "arms.csv", places=("", "*/", "*/*/"))
        if run.environment.get("label") == SWEEP
    ]
    if not sweeps:
        raise UserError("no sweep over ranks was measured (no arms.csv)")
    return sweeps[-1], None


def best_change(folder: Path) -> Answer:
    """Finds the change that helps most of those that were proposed and run.

    One is named only where it is faster than every other one and than no change; the number that
    is judged is its lead over whichever of them is told from it the least.
    """
    made = find_changes(folder)
    if not made:
        raise UserError("no proposed change was run (no proposals.csv)")
    changes = open_changes(made[-1])
    if len(changes.table) < 2:
        raise UserError("no change was predicted to help by more than the noise")
    if changes.best is None:
        raise UserError("no step of the changes was measured on several ranks and on one")
    run = Run(made[-1], folder)
    rows = changes.table.set_index("change")
    before, name = rows.loc[NO_CHANGE], changes.best.arm
    best = rows.loc[name]
    lead = changes.lead
    helps = name != NO_CHANGE
    value = (
        f"{name}: {before['speedup']:.2f} → {best['speedup']:.2f} times as fast as one rank"
        if helps
        else f"none: no change is faster than the step as it was, {before['speedup']:.2f} times"
    )
    batch = "; changes the global batch" if best["global_batch_changed"] else ""
    settled = lead.is_settled and helps
    beside = f", off by {best['error']:+.0%}" if settled else f"; {best_or_tied(changes)}"
    missed = settled and abs(best["error"]) > CLOSE
    return Answer(
        value=value,
        spread=(
            f"{name if helps else 'without a change'}: {_interval(best)}; without it "
            f"{_interval(before)}; predicted {best['predicted_speedup']:.2f}{beside}{batch}; "
            f"{lead.scope}"
        ),
        kind=MEASURED,
        runs=(run,),
        judged=lead,
        hidden="which change helps most, or whether any does",
        doubt="the prediction missed by more than 10 %" if missed else "",
        settle=repeated(run),
    )


def _interval(row: pd.Series) -> str:
    """Returns a speedup with its interval, in words."""
    if pd.isna(row["speedup_low"]):
        return f"{row['speedup']:.2f} in a single round"
    return f"{row['speedup']:.2f} ({span(row['speedup_low'], row['speedup_high'])})"


QUESTIONS = (
    Question(
        title="What limits scaling",
        priority=2,
        meaning="The cause that takes most of a step on several ranks, judged from what was timed.",
        anchor="assignment4_text_scaling-what-the-diagnosis-says",
        find=main_cause,
    ),
    Question(
        title="The change that helps most",
        priority=3,
        meaning="The model chose it before it was run: the same training, changed on all ranks.",
        anchor="assignment4_text_scaling-changes-predicted-and-verified",
        find=best_change,
    ),
)
"""Questions of the first page to assignment 4."""
