"""Asks a run directory the questions of its assignment, and in what state the machine was."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from common.analysis.findings import buckets, scaling, training
from common.analysis.findings.finding import UNREADABLE, Finding, Question, unreadable
from common.analysis.runs import AGAIN, Run
from common.errors import UserError
from common.judged import DISTURBED, DRIFTING, NOT_WITNESSED, QUIET
from common.runtime.wording import counted

QUESTIONS: dict[str, tuple[Question, ...]] = {
    "assignment0": training.ONE_DEVICE,
    "assignment1": training.DATA_PARALLEL,
    "assignment2": buckets.QUESTIONS,
    "assignment3": training.MICRO_BATCHES,
    "assignment4": scaling.QUESTIONS,
}
"""At most ten in all."""
MOST_REASONS = 3
"""Disturbed stages whose reasons the first page gives."""


def findings_of(
    assignment: str, folder: Path, earlier: Sequence[Finding] = ()
) -> tuple[Finding, ...]:
    """Returns a finding per question of the assignment, from one run directory.

    A question that the run cannot answer is a finding with the reason.

    Args:
        earlier: Findings of an earlier call while the run was still growing; a question that has
            its answer is not asked again.
    """
    answered = {
        finding.question.title: finding for finding in earlier if finding.answer is not None
    }
    return tuple(
        answered.get(question.title) or _asked(assignment, question, folder)
        for question in QUESTIONS.get(assignment, ())
    )


def machine_states(folder: Path, *, with_copies: bool = True) -> dict[str, tuple[str, str]]:
    """Returns the state of the machine during each stage below a run directory, and its reason.

    Keys are the stages' folders. Left out are stages that are not complete, or that are measured
    once more: of these one is kept in the end.

    ``with_copies`` is False to leave out stages that were copied from another assignment, where
    both are asked.
    """
    states = {}
    for record in sorted(folder.rglob("environment.json")):
        run = Run(record.parent, folder)
        is_kept = with_copies or "copied_from" not in run.environment
        if record.parent != folder and is_kept and _counts(run):
            stage = record.parent.relative_to(folder).as_posix()
            try:
                states[stage] = (run.machine.state, run.machine.reason)
            except UNREADABLE as error:  # a witness's table that was cut
                states[stage] = (NOT_WITNESSED, unreadable(error))
    return states


def _counts(run: Run) -> bool:
    """Returns True if a stage's machine is that of the run's numbers."""
    is_whole = run.environment.get("status") == "complete"
    return is_whole and not run.folder.name.endswith(AGAIN)


def machine_line(states: Mapping[str, tuple[str, str]]) -> str:
    """Returns whether the machine was quiet during a run's stages, in a sentence; empty of none."""
    stages = {
        state: [stage for stage, (its_state, _) in states.items() if its_state == state]
        for state in (DISTURBED, DRIFTING, QUIET, NOT_WITNESSED)
    }
    if len(stages[NOT_WITNESSED]) == len(states):
        return "Nothing watched the machine meanwhile: judged by rounds alone." if states else ""
    counts = [f"{state} in {len(names)}" for state, names in stages.items() if names]
    line = f"Of {counted(len(states), 'stage')} the machine was {', '.join(counts)}."
    for stage in stages[DISTURBED][:MOST_REASONS]:
        line += f" {stage}: {states[stage][1] or DISTURBED}."
    if (further := len(stages[DISTURBED]) - MOST_REASONS) > 0:
        line += f" Why in {counted(further, 'more stage')}: witness.csv beside their tables."
    return line


def _asked(assignment: str, question: Question, folder: Path) -> Finding:
    try:
        return Finding(assignment, question, question.find(folder))
    except UserError as missing:
        return Finding(assignment, question, None, str(missing))
    except UNREADABLE as error:
        return Finding(assignment, question, None, unreadable(error))
