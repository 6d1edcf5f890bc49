"""Asks a run directory the questions of its assignment."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from common.analysis.findings import buckets, scaling, training
from common.analysis.findings.finding import UNREADABLE, Finding, Question
from common.errors import UserError

QUESTIONS: dict[str, tuple[Question, ...]] = {
    "assignment0": training.ONE_DEVICE,
    "assignment1": training.DATA_PARALLEL,
    "assignment2": buckets.QUESTIONS,
    "assignment3": training.MICRO_BATCHES,
    "assignment4": scaling.QUESTIONS,
}
"""At most ten in all."""


def findings_of(
    assignment: str, folder: Path, earlier: Sequence[Finding] = ()
) -> tuple[Finding, ...]:
    """Returns a finding per question of the assignment, from one run directory.

    A question that the run cannot answer is a finding with the reason.

    Args:
        assignment: Name, such as ``assignment2``.
        folder: Run directory, which holds a folder per stage.
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


def _asked(assignment: str, question: Question, folder: Path) -> Finding:
    try:
        return Finding(assignment, question, question.find(folder))
    except UserError as missing:
        return Finding(assignment, question, None, str(missing))
    except UNREADABLE as error:
        reason = f"its tables cannot be read ({type(error).__name__}: {error})"
        return Finding(assignment, question, None, reason)
