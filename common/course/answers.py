"""Answers to a handout's questions: ``assignments/assignmentN/answers.yaml``.

The same file asks and is filled in. What a student changed besides the answers does not count: the
questions are read from the project.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from common.course.limits import read_yaml
from common.errors import UserError, unknown_name

NUMBER, CHOICE, TEXT = "number", "choice", "text"
LEVELS = ("none", "half", "full")
"""Levels of a text: no, half and all of its points."""


@dataclass(frozen=True)
class Question:
    """A question.

    Attributes:
        name: such as Q2.1.
        about: the question in short.
        kind: number, choice or text.
        points: points of a right answer.
        unit: unit of a number.
        choices: letter → what may be chosen.
        levels: level of ``LEVELS`` → what a text must have for it.
    """

    name: str
    about: str
    kind: str
    points: int
    unit: str = ""
    choices: Mapping[str, str] = field(default_factory=dict)
    levels: Mapping[str, str] = field(default_factory=dict)


def questions_path(root: Path, assignment: int) -> Path:
    """Returns where the questions of an assignment stand."""
    return root / "assignments" / f"assignment{assignment}" / "answers.yaml"


def read_questions(root: Path, assignment: int) -> dict[str, Question]:
    """Reads an assignment's questions, in order. Raises UserError where the file is not right."""
    path = questions_path(root, assignment)
    questions = {}
    for name, entries in _listed(path.read_bytes(), str(path)).items():
        attributes = {key: value for key, value in entries.items() if key != "answer"}
        try:
            question = Question(name, **attributes)
        except TypeError as error:
            raise UserError(f"{path}: {name}: {error}") from None
        is_right = {
            NUMBER: bool(question.unit),
            CHOICE: len(question.choices) > 1,
            TEXT: tuple(question.levels) == LEVELS,
        }
        if not is_right.get(question.kind):
            raise UserError(f"{path}: {name}: no whole question of kind {question.kind!r}")
        questions[name] = question
    return questions


@functools.lru_cache(maxsize=8)
def _listed(content: bytes, where: str) -> dict[str, dict]:
    """Reads the project's own questions, which each hand-in needs several times."""
    return load(content, where)


def read_answers(
    content: bytes, questions: Mapping[str, Question], where: str = "answers.yaml"
) -> dict[str, float | str | None]:
    """Reads a student's answers.

    Returns:
        for each question a number, a letter or a text; None where there is no answer.

    Raises:
        UserError: no YAML, an unknown question, or an answer of another kind.
    """
    entries = load(content, where)
    for name in entries:
        if name not in questions:
            raise UserError(f"{where}: {unknown_name('question', str(name), questions)}")
    answers = {}
    for name, question in questions.items():
        answer = entries.get(name, {}).get("answer")
        answers[name] = None if answer in (None, "") else checked(answer, question, where)
    return answers


def checked(answer: object, question: Question, where: str) -> float | str:
    """Returns an answer as its question wants it. Raises UserError for one of another kind."""
    prefix = f"{where}: {question.name}: "
    if question.kind == NUMBER:
        if isinstance(answer, bool) or not isinstance(answer, int | float):
            raise UserError(f"{prefix}expected a number, in {question.unit}; got {short(answer)}")
        try:
            number = float(answer)
        except OverflowError:
            number = math.inf
        if not math.isfinite(number):
            raise UserError(f"{prefix}the number is not finite")
        return number
    if not isinstance(answer, str):
        raise UserError(
            f"{prefix}expected {'a letter' if question.choices else 'text'}; got {short(answer)}"
        )
    if question.kind == CHOICE and answer.strip() not in question.choices:
        letters = ", ".join(question.choices)
        raise UserError(f"{prefix}expected one of {letters}; got {short(answer)}")
    if any("\ud800" <= letter <= "\udfff" for letter in answer):  # half of a letter of UTF-16
        raise UserError(f"{prefix}the text has characters that are none")
    return answer.strip()


def load(content: bytes, where: str) -> dict[str, dict]:
    """Reads YAML of questions with entries; nothing in it is executed."""
    document = read_yaml(content, where)
    if not isinstance(document, dict) or not all(isinstance(e, dict) for e in document.values()):
        raise UserError(f"{where}: expected questions, each with an answer below it")
    return {name if isinstance(name, str) else short(name): e for name, e in document.items()}


def short(answer: object) -> str:
    """Returns an answer for a message, short."""
    kinds = {list: "a list", dict: "a mapping", bool: "yes or no"}
    return kinds.get(type(answer)) or repr(answer)[:40]
