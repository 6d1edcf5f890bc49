"""Marks of one submission: what was judged, and Gradescope's file of results.

Numbers are judged by what the student's own tables give, letters by the key.

The format is that of https://gradescope-autograders.readthedocs.io/en/latest/specs/#output-format.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import yaml

from common.course.answers import LEVELS, NUMBER, TEXT, Question
from common.course.tasks import LOADER
from common.errors import UserError

TOLERANCE = 0.005
"""Relative tolerance of a number."""
NO_ANSWER, UNREAD = "no answer", "somebody has to read it"
SHARES = dict(zip(LEVELS, (0.0, 0.5, 1.0), strict=True))


def with_level(mark: Mark, question: Question, level: str | None, *, is_read: bool) -> Mark:
    """Returns the mark of a text with a reader's level.

    Args:
        mark: the mark without, or with an earlier level.
        level: none, half or full; None where nobody gave one.
        is_read: whether texts of this question have been read: then no answer is nothing.
    """
    if mark.why == NO_ANSWER:
        return replace(mark, score=0.0 if is_read else None)
    if level is None:
        return replace(mark, score=None, why=UNREAD)
    return replace(mark, score=question.points * SHARES[level], why=question.levels[level])


@dataclass(frozen=True)
class Mark:
    """The mark of a check or an answer.

    Attributes:
        of: task or question.
        name: the check or answer in words.
        points: points of a right check or answer.
        score: points that were given; None where it was not judged.
        why: reason why it gets no more, or was not judged.
    """

    of: str
    name: str
    points: float
    score: float | None
    why: str = ""


@dataclass(frozen=True)
class Grade:
    """The marks of a submission.

    Attributes:
        stem: student and assignment, as in the tarball's name.
        marks: mark of each check and question, whatever happened.
        isolation: kind of sandbox that the code ran in; empty if it was not run.
        variant: seed of the numbers in checks.
        remark: sentence on the submission, such as why it could not be read.
        seconds: duration of the grading.
        texts: question → text that somebody has to read.
    """

    stem: str
    marks: Sequence[Mark]
    isolation: str
    variant: int
    remark: str = ""
    seconds: float = 0.0
    texts: Mapping[str, str] = field(default_factory=dict)

    @property
    def score(self) -> float:
        """Returns the points that it gets."""
        return sum(mark.score or 0.0 for mark in self.marks)

    @property
    def maximum(self) -> float:
        """Returns the points that could be had; what was not judged is not among them."""
        return sum(mark.points for mark in self.marks if mark.score is not None)

    def results(self) -> dict:
        """Returns Gradescope's results."""
        isolation = f"Student code ran in: {self.isolation}." if self.isolation else ""
        return {
            "score": self.score,
            "execution_time": round(self.seconds, 1),
            "output": " ".join(filter(None, (self.remark, isolation))),
            "tests": [entry(mark, number) for number, mark in enumerate(self.marks, start=1)],
            "extra_data": {
                "submission": self.stem,
                "maximum": self.maximum,
                "isolation": self.isolation,
                "variant": self.variant,
                "not_judged": [mark.name for mark in self.marks if mark.score is None],
            },
        }

    def line(self) -> str:
        """Returns the submission's points in a line."""
        waiting = sum(mark.score is None for mark in self.marks)
        more = f", {waiting} not judged" if waiting else ""
        remark = f": {self.remark}" if self.remark else ""
        return f"{self.stem}: {self.score:g} of {self.maximum:g}{more}{remark}"

    def text(self) -> str:
        """Returns the text of Gradescope's file."""
        return json.dumps(self.results(), indent=1, ensure_ascii=False) + "\n"


def entry(mark: Mark, number: int) -> dict:
    """Returns one of Gradescope's tests."""
    judged = mark.score is not None
    full = judged and mark.score >= mark.points
    return {
        "number": str(number),
        "name": f"{mark.of}: {mark.name}" + ("" if judged else " (not judged)"),
        "score": mark.score if judged else 0.0,
        "max_score": float(mark.points) if judged else 0.0,
        "status": "passed" if full or not judged else "failed",
        "output": mark.why,
        "tags": [mark.of],
    }


def read_key(root: Path, assignment: int) -> dict[str, dict]:
    """Reads the staff's key of an assignment. Raises UserError if there is none."""
    path = root / "assignments" / f"assignment{assignment}" / "key.yaml"
    if not path.is_file():
        raise UserError(f"{path}: no key; it may lie in an overlay: --overlay FOLDER")
    return yaml.load(path.read_text(), LOADER) or {}


def judge_answers(
    questions: Mapping[str, Question],
    answers: Mapping[str, float | str | None],
    key: Mapping[str, Mapping],
    expected_or_reason: Mapping[str, float | str],
) -> list[Mark]:
    """Returns a mark for each question; of texts, which somebody reads, without a score.

    A text without an answer waits as the others do, so that before the reading everybody has the
    same maximum.

    Args:
        questions, answers, key: question, answer and key by the question's name.
        expected_or_reason: question → the number that the student's tables give, or why they do
            not.
    """
    marks = []
    for name, question in questions.items():
        answer = answers.get(name)
        if question.kind == TEXT:
            score, why = None, NO_ANSWER if answer is None else UNREAD
        elif answer is None:
            score, why = 0.0, NO_ANSWER
        elif question.kind == NUMBER:
            score, why = judge_number(answer, question, expected_or_reason[name])
        else:
            is_right = answer == str(key[name]["right"])
            score = question.points * is_right
            why = "" if is_right else f"{answer} is not right"
        marks.append(Mark(name, question.about, question.points, score, why))
    return marks


def judge_number(
    answer: float, question: Question, expected_or_reason: float | str
) -> tuple[float, str]:
    """Returns the points of a number, and why it gets none."""
    if isinstance(expected_or_reason, str):
        reason = expected_or_reason and f": {expected_or_reason}"
        return 0.0, f"your tables do not give it{reason}"
    if math.isclose(answer, expected_or_reason, rel_tol=TOLERANCE, abs_tol=1e-12):
        return float(question.points), ""
    return 0.0, f"{answer:.6g} {question.unit}; your tables say {expected_or_reason:.6g}"
