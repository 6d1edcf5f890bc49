"""Finds the main limit of scaling (assignment 4), and the change that would help most."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pandas as pd

from common.analysis.findings.finding import Answer, Question, with_interval
from common.analysis.runs import Run
from common.analysis.scaling.sweep_run import find_sweeps
from common.analysis.show import ends_format
from common.analysis.sweep_speedups import NO_CHANGE, step_times_by_round
from common.diagnose.changes import CLOSE, best_or_tied, find_changes, open_changes, sweep_before
from common.diagnose.diagnosis import LIMITS, MISTAKES, case_of, examine_case, lost_by_round
from common.diagnose.evidence.case import Case, Verdict
from common.errors import UserError
from common.judged import FIRST_PAGE_ROUNDS, Judged
from common.runtime.wording import counted
from common.samples import paired_difference, student


def main_cause(folder: Path) -> Answer:
    """Finds the main cause that a sweep is diagnosed with: of changes that were made, the one
    before them, else the newest."""
    sweep, arm = _diagnosed_sweep(folder)
    case = case_of(sweep.folder, arm=arm)
    diagnosis = examine_case(case)
    run, verdict = Run(sweep.folder, folder), next(iter(diagnosis.verdicts), None)
    judged, hidden = _judged(case, verdict), "what limits scaling"
    value, spread, doubt = "no limiting cause found", diagnosis.summary, ""
    if verdict is None and not diagnosis.healthy:
        value = "scaling falls short, and no cause was found for it"
        doubt = diagnosis.unexplained.said() if diagnosis.much_unexplained else diagnosis.lost
    if verdict is not None:
        has_share, further = bool(verdict.lost_share), len(diagnosis.verdicts) - 1
        takes = f"; it takes {verdict.lost_share:.0%} of the step" if has_share else ""
        ends = f", {with_interval(judged, '{:.0%}')}" if has_share else ""
        more = f"{counted(further, 'further cause')}; " if further else ""
        value = f"{verdict.title}{takes}"
        spread = f"confidence {verdict.confidence}{ends}; {more}{sweep.environment['network']}"
        doubt = "low confidence" if verdict.confidence == "low" else ""
        rival, lead = _closest(case, diagnosis.verdicts)
        if rival is not None and judged.is_settled and not lead.is_settled:
            judged, hidden = lead, f"which limits scaling most: {verdict.title}, or {rival.title}"
    return Answer(
        value=value,
        spread=spread,
        run=run,
        judged=judged,
        hidden=hidden,
        doubt=doubt,
    )


def _judged(case: Case, verdict: Verdict | None) -> Judged:
    """Judges the share of a step that the main cause takes, round by round.

    The share is that of all steps, as the diagnosis has it; its interval is one over rounds. Where
    no cause has a share, the step itself is judged, in which none was found.
    """
    if verdict is not None and verdict.lost_share:
        shares = student(lost_by_round(case, verdict.cause))
        interval, null = replace(shares, estimate=verdict.lost_share), 0.0
    else:
        steps_ms = step_times_by_round(case.run.measured)[case.run.arm["arm"]]
        interval, null = student(steps_ms), None
    return Judged(interval, null, **_conditions(case))


def _conditions(case: Case) -> dict[str, object]:
    """Returns scope, state of the machine and least rounds, as ``Judged`` takes them."""
    return {
        "scope": str(case.run.opened.environment.get("network", "")),
        "machine": case.run.opened.machine_state,
        "least_rounds": FIRST_PAGE_ROUNDS,
    }


def _closest(case: Case, verdicts: Sequence[Verdict]) -> tuple[Verdict | None, Judged | None]:
    """Returns the cause that the first of several is told from the least, and its lead over it.

    Asked are those that take a share of the step, as the first does. One that is a mistake comes
    before the limit that is left without it, whichever takes more.
    """
    first, *further = verdicts
    rivals = [
        verdict
        for verdict in further
        if verdict.lost_share
        and verdict.group == first.group
        and not (first.cause in MISTAKES and verdict.cause in LIMITS)
    ]
    if not (first.lost_share and rivals):
        return None, None
    shares = lost_by_round(case, first.cause)
    leads = [paired_difference(shares, lost_by_round(case, v.cause)) for v in rivals]
    rival, lead = min(zip(rivals, leads, strict=True), key=lambda pair: pair[1].low)
    return rival, Judged(lead, null=0.0, **_conditions(case))


def _diagnosed_sweep(folder: Path) -> tuple[Run, int | None]:
    """Returns the sweep that is diagnosed and its arm; None leaves the choice to the diagnosis."""
    for made in reversed(find_changes(folder)):
        if sweep := sweep_before(made, open_changes(made)):
            return sweep
    sweeps = find_sweeps(folder)
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
            f"{name if helps else 'without a change'}: {_speedup(best)}; without it "
            f"{_speedup(before)}; predicted {best['predicted_speedup']:.2f}{beside}{batch}; "
            f"{lead.scope}"
        ),
        run=run,
        judged=lead,
        hidden="which change helps most, or whether any does",
        doubt="the prediction missed by more than 10 %" if missed else "",
    )


def _speedup(row: pd.Series) -> str:
    """Returns a speedup with its interval, in words; the rounds stand behind it."""
    return f"{row['speedup']:.2f} ({ends_format(row['judged'].interval)})"


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
