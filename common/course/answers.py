"""Answers to a handout's questions: ``assignments/assignmentN/answers.yaml``.

The same file asks and is filled in. What a student changed besides the answers does not count: the
questions are read from the project.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import yaml
from yaml.composer import ComposerError

from common.errors import UserError, unknown_name

NUMBER, CHOICE, TEXT = "number", "choice", "text"
LEVELS = ("none", "half", "full")
"""Levels of a text: no, half and all of its points."""
LARGEST_BYTES = 2**20


class Loader(yaml.SafeLoader):
    """Reads YAML without aliases, by which a few lines can stand for more than memory holds."""

    def compose_node(self, parent: yaml.Node | None, index: object) -> yaml.Node | None:
        """Returns the next node. Raises ComposerError for an alias."""
        if self.check_event(yaml.AliasEvent):
            raise ComposerError(None, None, "aliases are not read", self.peek_event().start_mark)
        return super().compose_node(parent, index)


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
    for name, entries in load(path.read_bytes(), str(path)).items():
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
    if len(content) > LARGEST_BYTES:
        raise UserError(f"{where}: more than {LARGEST_BYTES / 2**20:.0f} MB")
    try:
        document = yaml.load(content, Loader)
    except yaml.YAMLError as error:
        line = getattr(getattr(error, "problem_mark", None), "line", None)
        position = f"{where}:{line + 1}" if line is not None else where
        raise UserError(f"{position}: {getattr(error, 'problem', None) or 'no YAML'}") from None
    except Exception:  # of a value that is not what its tag says, PyYAML raises anything
        raise UserError(f"{where}: no YAML") from None
    if not isinstance(document, dict) or not all(isinstance(e, dict) for e in document.values()):
        raise UserError(f"{where}: expected questions, each with an answer below it")
    return {name if isinstance(name, str) else short(name): e for name, e in document.items()}


def short(answer: object) -> str:
    """Returns an answer for a message, short."""
    kinds = {list: "a list", dict: "a mapping", bool: "yes or no"}
    try:
        return kinds.get(type(answer)) or repr(answer)[:40]
    except ValueError:  # Python writes no integer of more than 4,300 digits
        return "a number of very many digits"
