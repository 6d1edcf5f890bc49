"""Right answers to the questions of assignment 3."""

from __future__ import annotations

import functools

import yaml

from common.course.answers import CHOICE, NUMBER, questions_path, read_questions
from common.course.grading.marks import read_key
from common.course.numbers import assignment3
from common.runtime.paths import project_root


@functools.cache
def right_answers() -> bytes:
    """Returns the numbers of the recorded run, the right choices, and a text for each text."""
    root = project_root()
    content, key = yaml.safe_load(questions_path(root, 3).read_text()), read_key(root, 3)
    for name, question in read_questions(root, 3).items():
        if question.kind == NUMBER:
            recorded = root / "data" / "epyc-2-cores" / "assignment3"
            answer = getattr(assignment3, key[name]["number"])(recorded)
        else:
            answer = key[name]["right"] if question.kind == CHOICE else "Because."
        content[name]["answer"] = answer
    return yaml.safe_dump(content).encode()
