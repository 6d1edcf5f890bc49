"""Answers to the questions of an assignment."""

from __future__ import annotations

import functools

import yaml

from common.course.answers import CHOICE, TEXT, questions_path, read_questions
from common.course.grading.marks import read_key
from common.course.numbers import assignment3
from common.runtime.paths import project_root


@functools.cache
def answers(text: str = "Because.", assignment: int = 3, *, right: bool = True) -> bytes:
    """Returns answers: right or wrong letters, and a text for each question that wants one."""
    root = project_root()
    content = yaml.safe_load(questions_path(root, assignment).read_text())
    key = read_key(root, assignment)
    for name, question in read_questions(root, assignment).items():
        if question.kind == TEXT:
            content[name]["answer"] = text
        elif question.kind == CHOICE:
            wrong = next(c for c in question.choices if c != key[name]["right"])
            content[name]["answer"] = key[name]["right"] if right else wrong
    return yaml.safe_dump(content).encode()


@functools.cache
def right_answers() -> bytes:
    """Returns those of assignment 3 with the numbers of its recorded run."""
    root = project_root()
    content, key = yaml.safe_load(answers()), read_key(root, 3)
    recorded = root / "data" / "epyc-2-cores" / "assignment3"
    for name, entries in key.items():
        if "number" in entries:
            content[name]["answer"] = getattr(assignment3, entries["number"])(recorded)
    return yaml.safe_dump(content).encode()
