"""Asks a run directory the questions of its assignment."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from common.analysis.findings import buckets, data_parallel, micro_batches, one_device, scaling
from common.analysis.findings.finding import UNREADABLE, Finding, Question
from common.errors import UserError

QUESTIONS: dict[str, tuple[Question, ...]] = {
    "assignment0": one_device.QUESTIONS,
    "assignment1": data_parallel.QUESTIONS,
    "assignment2": buckets.QUESTIONS,
    "assignment3": micro_batches.QUESTIONS,
    "assignment4": scaling.QUESTIONS,
}
"""At most ten in all."""


def findings_of(
    assignment: str, folder: Path, known: Sequence[Finding] = ()
) -> tuple[Finding, ...]:
    """Returns a finding per question of the assignment, from one run directory.

    A question that the run cannot answer is a finding with the reason.

    Args:
        assignment: such as ``assignment2``.
        folder: the run directory, which holds a folder per stage.
        known: of an earlier call while the run was still growing; what was found is not sought
            again.
    """
    found = {one.question.title: one for one in known if one.found is not None}
    return tuple(
        found.get(question.title) or _asked(assignment, question, folder)
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
