"""Marks of answers: numbers against the student's own tables, letters against the key."""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping
from pathlib import Path

import yaml

from common.course.answers import CHOICE, LEVELS, NUMBER, Question
from common.course.grading.marks import Mark
from common.errors import UserError

TOLERANCE = 0.005
"""Relative tolerance of a number."""
SHARES = dict(zip(LEVELS, (0.0, 0.5, 1.0), strict=True))


def read_key(root: Path, assignment: int) -> dict[str, dict]:
    """Reads the staff's key of an assignment. Raises UserError if there is none."""
    path = root / "assignments" / f"assignment{assignment}" / "key.yaml"
    if not path.is_file():
        raise UserError(f"{path}: no key; it may lie in an overlay: --overlay FOLDER")
    return yaml.safe_load(path.read_text()) or {}


def judge_answers(
    questions: Mapping[str, Question],
    answers: Mapping[str, float | str | None],
    key: Mapping[str, Mapping],
    run: Path,
    assignment: int,
    levels: Mapping[str, str],
) -> list[Mark]:
    """Returns a mark for each question.

    Args:
        questions, answers, key: question, answer and key by the question's name.
        run: folder of the tables that were handed in.
        assignment: number of the assignment, whose module recomputes numbers.
        levels: question → level that a reader gave its text: none, half or full.
    """
    marks = []
    for name, question in questions.items():
        answer = answers.get(name)
        if answer is None:
            score, why = 0.0, "no answer"
        elif question.kind == NUMBER:
            score, why = judge_number(answer, question, str(key[name]["number"]), run, assignment)
        elif question.kind == CHOICE:
            is_right = answer == str(key[name]["right"])
            score = question.points * is_right
            why = "" if is_right else f"{answer} is not right"
        elif name in levels:
            score, why = question.points * SHARES[levels[name]], question.levels[levels[name]]
        else:
            score, why = None, "somebody has to read it"
        marks.append(Mark(name, question.about, question.points, score, why))
    return marks


def judge_number(
    answer: float, question: Question, function: str, run: Path, assignment: int
) -> tuple[float, str]:
    """Returns the points of a number, and why it gets none."""
    module = importlib.import_module(f"common.course.numbers.assignment{assignment}")
    try:
        expected = float(getattr(module, function)(run))
    except UserError as error:
        return 0.0, f"your tables do not give it: {error}"
    except Exception as error:  # tables are the student's: anything may be in them
        return 0.0, f"your tables do not give it: {type(error).__name__}"
    if not math.isfinite(expected):
        return 0.0, "your tables do not give it"
    if math.isclose(answer, expected, rel_tol=TOLERANCE, abs_tol=1e-12):
        return float(question.points), ""
    return 0.0, f"{answer:.6g} {question.unit}; your tables say {expected:.6g}"
