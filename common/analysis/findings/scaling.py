"""Finds the main limit of scaling (assignment 4), and the change that would help most."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from common.analysis.findings.finding import MEASURED, Answer, Question, span
from common.analysis.runs import Run, complete_runs
from common.diagnose.changes import (
    CLOSE,
    SWEEP,
    TOLD,
    find_changes,
    open_changes,
    sweep_before,
    told_apart,
)
from common.diagnose.diagnosis import diagnose_folder
from common.errors import UserError
from common.runtime.wording import counted


def main_cause(folder: Path) -> Answer:
    """Finds the main cause that a sweep is diagnosed with: of changes that were made, the one
    before them, else the newest."""
    run, arm = _diagnosed_sweep(folder)
    diagnosis = diagnose_folder(run.folder, arm=arm)
    where = (Run(run.folder, folder),)
    if not diagnosis.verdicts:
        return Answer("no limiting cause found", diagnosis.summary, MEASURED, where)
    verdict = diagnosis.verdicts[0]
    takes = f"; it takes {verdict.lost_share:.0%} of the step" if verdict.lost_share else ""
    further = len(diagnosis.verdicts) - 1
    more = f"{counted(further, 'further cause')}; " if further else ""
    return Answer(
        value=f"{verdict.title}{takes}",
        spread=f"confidence {verdict.confidence}; {more}{run.environment['network']}",
        kind=MEASURED,
        runs=where,
        doubt="low confidence" if verdict.confidence == "low" else "",
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
    """Finds the proposed change with the greatest predicted speedup, and what it achieved."""
    made = find_changes(folder)
    if not made:
        raise UserError("no proposed change was run (no proposals.csv)")
    table = open_changes(made[-1]).table
    table = table.assign(told=told_apart(table))
    before, after = table.iloc[0], table.iloc[1:]
    if after.empty:
        raise UserError("no change was predicted to help by more than the noise")
    best = after.loc[after["predicted_speedup"].idxmax()]
    is_told = best["told"] == TOLD
    beside = f"off by {best['error']:+.0%}" if is_told else f"without it {_interval(before)}"
    batch = "; changes the global batch" if best["global_batch_changed"] else ""
    missed = is_told and abs(best["error"]) > CLOSE
    return Answer(
        value=(
            f"{best['change']}: {before['speedup']:.2f} → {best['speedup']:.2f} times as fast as "
            "one rank"
        ),
        spread=f"{_interval(best)}; predicted {best['predicted_speedup']:.2f}, {beside}{batch}",
        kind=MEASURED,
        runs=(Run(made[-1], folder),),
        hidden="" if is_told else f"what {best['change']} brings",
        doubt="the prediction missed by more than 10 %" if missed else "",
    )


def _interval(row: pd.Series) -> str:
    """Returns the interval of a change's speedup, in words."""
    if pd.isna(row["speedup_low"]):
        return "a single round, so no interval"
    return f"95 % interval {span(row['speedup_low'], row['speedup_high'])}"


QUESTIONS = (
    Question(
        title="What limits scaling",
        meaning="The cause that takes most of a step on several ranks, judged from what was timed.",
        anchor="assignment4_text_scaling-what-the-diagnosis-says",
        find=main_cause,
    ),
    Question(
        title="The change that helps most",
        meaning="The model chose it before it was run: the same training, changed on all ranks.",
        anchor="assignment4_text_scaling-changed-and-verified",
        find=best_change,
    ),
)
"""Questions of the first page to assignment 4."""
