"""Grades a class: a file of results for each submission, a table, and a sheet of texts to read."""

from __future__ import annotations

import csv
import io
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from common.course.answers import TEXT, read_answers, read_questions
from common.course.grading.grade import Grader, write_json
from common.course.grading.marks import Grade, read_key
from common.course.grading.reading import blank_levels, reading_sheet
from common.course.submission import ANSWERS, read_name, read_submission
from common.errors import RunFailed, UserError
from common.runtime.processes.bytecode import shared_bytecode
from common.runtime.records.run_directory import write_atomically
from common.runtime.script import is_full

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Class:
    """The submissions of a class, of one assignment.

    Attributes:
        grader: grades one submission.
        paths: the tarballs.
    """

    grader: Grader
    paths: Sequence[Path]

    def __post_init__(self) -> None:
        of = [read_name(path) for path in self.paths]
        counts = Counter(submission.stem for submission in of)
        for stem, count in counts.items():
            if count > 1:
                raise UserError(f"{count} submissions are called {stem}; grade one of them")
        if len({(submission.assignment, submission.part) for submission in of}) > 1:
            raise UserError("submissions of several assignments; grade one assignment at a time")

    def grade(self, folder: Path, say: Callable[[str], None]) -> list[Grade]:
        """Grades all; writes STEM.json for each, grades.csv, reading.html and levels.csv.

        A submission at which the grader breaks is not judged; its grade says so, and the log why.

        Raises:
            UserError: this machine cannot grade, a key is missing, or nothing can be written.
        """
        grades = []
        with shared_bytecode():
            for path in self.paths:
                grade = self.grade_one(path)
                write_json(grade, folder / f"{grade.stem}.json")
                say(line_of(grade))
                grades.append(grade)
        write_atomically(folder / "grades.csv", table_of(grades))
        self.write_sheet(folder)
        return grades

    def grade_one(self, path: Path) -> Grade:
        """Grades one; where the grader breaks, nothing is judged."""
        try:
            return self.grader.grade(path)
        except UserError:
            raise
        except Exception as error:
            if is_full(error):  # it would be for all submissions
                raise
            logger.exception("%s: the grader broke", path)
            why = str(error) if isinstance(error, RunFailed) else type(error).__name__
            return self.grader.without_checks(read_name(path), None, f"not graded: {why}")

    def write_sheet(self, folder: Path) -> None:
        """Writes the sheet of texts to read, and the table that a reader fills in."""
        of = read_name(self.paths[0])
        if not of.has_answers:
            return
        questions = read_questions(self.grader.root, of.assignment)
        answers = {}
        for path in self.paths:
            try:
                files = read_submission(path).files
                answers[read_name(path).stem] = read_answers(files.get(ANSWERS, b"{}"), questions)
            except Exception:  # its grade says what is wrong with it
                answers[read_name(path).stem] = {}
        if any(question.kind == TEXT for question in questions.values()):
            key = read_key(self.grader.root, of.assignment)
            title = f"Assignment {of.assignment}: texts to read"
            write_atomically(folder / "reading.html", reading_sheet(title, questions, key, answers))
            levels = folder / "levels.csv"
            if not levels.exists():  # a reader's work is not overwritten
                write_atomically(levels, blank_levels(list(answers), questions))


def line_of(grade: Grade) -> str:
    """Returns a submission's points in a line."""
    waiting = sum(mark.score is None for mark in grade.marks)
    more = f", {waiting} not judged" if waiting else ""
    remark = f": {grade.remark}" if grade.remark else ""
    return f"{grade.stem}: {grade.score:g} of {grade.maximum:g}{more}{remark}"


def table_of(grades: Sequence[Grade]) -> str:
    """Returns grades.csv: a row a submission; points by task and question, and their sum."""
    columns = list(dict.fromkeys(mark.of for grade in grades for mark in grade.marks))
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["submission", "score", "maximum", "not_judged", *columns])
    for grade in grades:
        by_task = {
            name: sum(mark.score or 0.0 for mark in grade.marks if mark.of == name)
            for name in columns
        }
        waiting = sum(mark.points for mark in grade.marks if mark.score is None)
        row = [grade.stem, grade.score, grade.maximum, waiting, *by_task.values()]
        writer.writerow([f"{cell:g}" if isinstance(cell, float) else cell for cell in row])
    return text.getvalue()
