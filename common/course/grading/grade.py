"""Grades a submission: its exercises in a sandbox, its answers against its own tables."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from common.course.answers import NUMBER, TEXT, read_questions
from common.course.grading.checks import (
    NO_TIME,
    TIME_S,
    Exercises,
    by_check,
    sha256_of,
    why_refused,
)
from common.course.grading.limited import limited_answers, limited_submission
from common.course.grading.marks import Grade, Mark, judge_answers, read_key
from common.course.grading.records import write_together
from common.course.hand_ins.tarball import printable
from common.course.outcomes import FAILED, PASSED, SKIPPED, Outcome
from common.course.progress import reason_of
from common.course.sandbox.isolation import strongest_isolation
from common.course.submission import HandedIn, Submission, named, of_file_name
from common.course.tasks import HIDDEN, Task, read_tasks
from common.errors import NotYetWritten, UserError, naming_os_errors, unwritten_task
from common.runtime.wording import counted


@dataclass(frozen=True)
class Grader:
    """Grades submissions.

    Attributes:
        root: the project, with references, hidden tests and keys.
        variant: seed of the numbers in checks.
        cache: folder in which the outcomes of checks are kept; None to run all of them.
    """

    root: Path
    variant: int = 0
    cache: Path | None = None

    def grade(self, path: Path, only: tuple[int, int] | None = None) -> Grade:
        """Grades one tarball; whatever is wrong with it, every check is in the result.

        Args:
            path: the tarball.
            only: the assignment and the part of which it has to be; None for any.

        Raises:
            UserError: it says not what it is of, is of something else, or this machine cannot
                grade.
            RunFailed: the sandbox does not start.
        """
        if not path.is_file():
            raise UserError(f"{path}: no such file")
        try:
            submission = limited_submission(path)
        except UserError as error:
            return self.without_checks(of_file_name(path), 0.0, str(error))
        of = (submission.of.assignment, submission.of.part)
        if only not in (None, of):
            raise UserError(f"{printable(path.name)}: it is of {named(*of)}, not {named(*only)}")
        return self.judge(submission, strongest_isolation())

    def judge(self, submission: Submission, isolation: str) -> Grade:
        """Grades what was read of a tarball, in a sandbox of this kind; raises as ``grade``."""
        began = time.monotonic()
        marks, texts = self.answers(submission)
        marks = [*self.checks(submission, isolation), *marks]
        seconds = time.monotonic() - began
        late = sum(mark.why.startswith(NO_TIME) for mark in marks)
        remark = f"{counted(late, 'check')} had not begun after {TIME_S} s" if late else ""
        stem = submission.of.stem
        return Grade(stem, marks, isolation, self.variant, remark, seconds=seconds, texts=texts)

    def prepare(self, submission: Submission, time_s: float = TIME_S) -> None:
        """Runs the checks that do not time anything, so that ``judge`` finds their outcomes."""
        exercises, _ = self.exercises(submission, strongest_isolation())
        exercises.outcomes(time_s, timed=False)

    def without_checks(self, of: HandedIn, score: float | None, remark: str) -> Grade:
        """Returns a grade in which every check and question has this score, and this reason."""
        marks = [*marks_of(self.tasks(of), [], {}), *self.answers(Submission(of, {}))[0]]
        marks = [Mark(mark.of, mark.name, mark.points, score, remark) for mark in marks]
        return Grade(of.stem, marks, "", self.variant, remark)

    def tasks(self, of: HandedIn) -> dict[str, Task]:
        """Returns the tasks of a submission. Raises UserError for an assignment without any."""
        tasks = of.tasks(read_tasks(self.root))
        if not tasks:
            raise UserError(f"{of.stem}: there is no assignment {of.assignment}")
        return tasks

    def course(self, of: HandedIn) -> str:
        """Returns the SHA-256 of what decides the points: tests, references, points and keys."""
        tasks = self.tasks(of)
        tests = {check.partition("::")[0] for task in tasks.values() for check in task.checks}
        files = [self.root / HIDDEN / name for name in tests]
        files += [self.root / task.path for task in tasks.values()]
        files += (self.root / HIDDEN / "probes").glob("*.py")
        files += (p for p in (self.root / HIDDEN).glob("*.py") if not p.name.startswith("test_"))
        points: list[object] = [{name: dict(task.checks) for name, task in tasks.items()}]
        if of.has_answers:
            questions = read_questions(self.root, of.assignment)
            key = read_key(self.root, of.assignment)
            points.append({name: [q.kind, q.points] for name, q in questions.items()})
            points.append({n: [str(k.get("number")), str(k.get("right"))] for n, k in key.items()})
        return sha256_of(self.root, files, json.dumps(points, sort_keys=True))

    def checks(self, submission: Submission, isolation: str) -> list[Mark]:
        """Runs the hidden tests of a submission's tasks; returns a mark for each check."""
        exercises, refused = self.exercises(submission, isolation)
        return marks_of(exercises.tasks, exercises.outcomes(), refused)

    def exercises(self, submission: Submission, isolation: str) -> tuple[Exercises, dict[str, str]]:
        """Returns the exercises that may be run, and for the other tasks why theirs may not."""
        tasks = self.tasks(submission.of)
        texts = submission.exercises()
        refused = why_refused(self.root, tasks, texts)
        # A refused file is left out: the others are judged without it.
        files = [task.file for name, task in tasks.items() if name not in refused]
        taken = {file: texts[file] for file in files}
        return Exercises(self.root, tasks, taken, self.variant, isolation, self.cache), refused

    def answers(self, submission: Submission) -> tuple[list[Mark], dict[str, str]]:
        """Returns a mark for each question, none for a part without questions; and the texts."""
        of = submission.of
        if not of.has_answers:
            return [], {}
        questions = read_questions(self.root, of.assignment)
        key = read_key(self.root, of.assignment)
        missing = sorted(set(questions) ^ set(key))
        if missing:
            raise UserError(f"key of assignment {of.assignment}: {missing[0]} is not in both files")
        functions = {
            name: str(key[name]["number"])
            for name, question in questions.items()
            if question.kind == NUMBER and "number" in key[name]
        }
        read = limited_answers(submission, self.root, functions)
        marks = judge_answers(questions, read.answers, key, read.numbers)
        if read.why:
            return [Mark(m.of, m.name, m.points, 0.0, read.why) for m in marks], {}
        texts = {
            name: str(read.answers[name])
            for name, question in questions.items()
            if question.kind == TEXT and read.answers.get(name)
        }
        return marks, texts


def marks_of(
    tasks: Mapping[str, Task], outcomes: Sequence[Outcome], refused: Mapping[str, str]
) -> list[Mark]:
    """Returns a mark for each check of these tasks: full points if all of its cases pass."""
    cases_of = by_check(outcomes)
    marks = []
    for name, task in tasks.items():
        for check, points in task.checks.items():
            cases = cases_of.get(check, [])
            failed = next((case for case in cases if case.outcome == FAILED), None)
            title = check.partition("::test_")[2].replace("_", " ")
            if name in refused:
                score, why = 0.0, refused[name]
            elif failed or not cases:
                score = 0.0
                open_task = unwritten_task(failed.message) if failed else ""
                why = reason_of(failed.message) if failed else "it was not reached"
                why = str(NotYetWritten(open_task)) if open_task else why
            elif all(case.outcome == PASSED for case in cases):
                score, why = float(points), ""
            else:
                skipped = next(case for case in cases if case.outcome == SKIPPED)
                score, why = None, reason_of(skipped.message)
            marks.append(Mark(name, title, points, score, why))
    return marks


def write_json(grade: Grade, path: Path) -> None:
    """Writes Gradescope's file, whole or not at all. Raises UserError where it cannot be."""
    with naming_os_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_together(path.parent, {path.name: grade.text()})
