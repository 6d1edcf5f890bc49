"""Grades a submission: its exercises in a sandbox, its answers against its own tables.

Student code never shares a process with a check. The hidden tests run here, beside the expected
values, and call the student's functions in a sandbox, which has neither.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from common.course.answers import read_answers, read_questions
from common.course.grading.marks import Grade, Mark, judge_answers, read_key
from common.course.markers import student_source
from common.course.outcomes import FAILED, PASSED, SKIPPED, Outcome, run_tests
from common.course.progress import reason_of
from common.course.sandbox.imports import violations
from common.course.sandbox.isolation import strongest_isolation
from common.course.sandbox.sandbox import NOT_STARTED
from common.course.sandbox.student import lay_out, lay_out_student
from common.course.submission import ANSWERS, HandedIn, Submission, read_name, read_submission
from common.course.tasks import HIDDEN, Task, read_tasks
from common.errors import NotYetWritten, RunFailed, UserError, unwritten_task

TIME_S = 330
"""For the checks of a submission; what has not begun by then fails."""
LONGEST_S = TIME_S + 180
"""For pytest: the last check may take its 120 s, and what is left has to be ended."""
FAULT = re.compile(rf'(failed on setup with ")?common\.errors\.RunFailed: {NOT_STARTED}')
"""Beginning of a failure's message that is the grader's fault. What a student's code raises begins
otherwise, whatever it says."""
PART = "own"


@dataclass(frozen=True)
class Grader:
    """Grades submissions.

    Attributes:
        root: the project, with references, hidden tests and keys.
        variant: seed of the numbers in checks.
        levels: submission → question → level of its text, as somebody found.
    """

    root: Path
    variant: int = 0
    levels: Mapping[str, Mapping[str, str]] | None = None

    def grade(self, path: Path) -> Grade:
        """Grades one tarball; whatever is wrong with it, every check is in the result.

        Raises:
            UserError: its name does not say what it is of, or this machine cannot grade.
            RunFailed: the sandbox does not start.
        """
        began = time.monotonic()
        isolation = strongest_isolation()
        of = read_name(path)
        if not of.tasks(read_tasks(self.root)):
            raise UserError(f"{path.name}: there is no assignment {of.assignment}")
        try:
            submission = read_submission(path)
        except UserError as error:
            return self.without_checks(of, 0.0, str(error))
        marks = [*self.checks(submission, isolation), *self.answers(submission)]
        seconds = time.monotonic() - began
        return Grade(of.stem, marks, isolation, self.variant, seconds=seconds)

    def without_checks(self, of: HandedIn, score: float | None, remark: str) -> Grade:
        """Returns a grade in which every check and question has this score, and this reason."""
        tasks = of.tasks(read_tasks(self.root))
        marks = [*marks_of(tasks, [], {}), *self.answers(Submission(of, {}))]
        marks = [Mark(mark.of, mark.name, mark.points, score, remark) for mark in marks]
        return Grade(of.stem, marks, "", self.variant, remark)

    def checks(self, submission: Submission, isolation: str) -> list[Mark]:
        """Runs the hidden tests of a submission's tasks; returns a mark for each check."""
        tasks = submission.of.tasks(read_tasks(self.root))
        exercises = {
            name: text.decode(errors="replace") for name, text in submission.exercises().items()
        }
        refused = self.refused(tasks, exercises)
        # A refused file is left out: the others are judged without it.
        taken = {
            task.file: exercises[task.file]
            for name, task in tasks.items()
            if task.file in exercises and name not in refused
        }
        if not taken:
            return marks_of(tasks, [], refused)
        with tempfile.TemporaryDirectory(prefix="ddplab-grading-") as scratch:
            folder = Path(scratch)
            folder.chmod(0o755)
            lay_out(folder, self.root)
            lay_out_student(
                folder, self.root, PART, self.root / HIDDEN / "probes", self.text_of(tasks, taken)
            )
            graded = {
                "folder": str(folder),
                "isolation": isolation,
                "variant": self.variant,
                "until": time.time() + TIME_S,
            }
            arguments = [f"{HIDDEN}/{check}" for task in tasks.values() for check in task.checks]
            arguments += [f"--hypothesis-seed={self.variant}", "-p", "no:randomly", "-q"]
            arguments += ["-m", "not slow"]  # those marked ``grading``, too
            variables = {"DDPLAB_GRADED": json.dumps(graded), "OMP_NUM_THREADS": "1"}
            outcomes = run_tests(self.root, arguments, variables, timeout_s=LONGEST_S)
        for outcome in outcomes:  # the grader's fault is no student's
            if FAULT.match(outcome.message):
                raise RunFailed(reason_of(outcome.message))
        return marks_of(tasks, outcomes, refused)

    def refused(self, tasks: Mapping[str, Task], exercises: Mapping[str, str]) -> dict[str, str]:
        """Returns why tasks get nothing whose file is missing, or uses what it may not."""
        all_tasks = read_tasks(self.root)
        support = [path.stem for path in (self.root / "common" / "exercises").glob("*.py")]
        support = [
            name for name in support if f"{name}.py" not in {t.file for t in all_tasks.values()}
        ]
        reasons = {}
        for name, task in tasks.items():
            if task.file not in exercises:
                reasons[name] = f"{task.file} was not handed in"
                continue
            allowed = support + [
                all_tasks[needed].file.removesuffix(".py") for needed in task.needs
            ]
            reference = (self.root / task.path).read_text()
            if wrong := violations(exercises[task.file], reference, allowed):
                reasons[name] = f"{task.file}, {wrong[0]}"
        return reasons

    def text_of(self, tasks: Mapping[str, Task], taken: Mapping[str, str]):
        """Returns the function that gives each exercise's text: theirs, solved, or stripped."""
        all_tasks = read_tasks(self.root)
        first = min(tasks)
        solved = [name for name, task in all_tasks.items() if name < first or task.omitted]

        def text(path: Path) -> str:
            if path.name in taken:
                return taken[path.name]
            return student_source(path.read_text(), path.name, solved)

        return text

    def answers(self, submission: Submission) -> list[Mark]:
        """Returns a mark for each question; none for a part without questions."""
        of = submission.of
        if not of.has_answers:
            return []
        questions, key = (
            read_questions(self.root, of.assignment),
            read_key(self.root, of.assignment),
        )
        missing = sorted(set(questions) ^ set(key))
        if missing:
            raise UserError(f"key of assignment {of.assignment}: {missing[0]} is not in both files")
        levels = (self.levels or {}).get(of.stem, {})
        why = ""
        try:
            answers = read_answers(submission.files.get(ANSWERS, b"{}"), questions)
        except UserError as error:
            answers, why = {}, str(error)
        with tempfile.TemporaryDirectory() as scratch:
            run = Path(scratch)
            try:
                submission.write_run(run)
            except UserError as error:
                why = why or str(error)
            marks = judge_answers(questions, answers, key, run, of.assignment, levels)
        return [Mark(m.of, m.name, m.points, 0.0, why) for m in marks] if why else marks


def marks_of(
    tasks: Mapping[str, Task], outcomes: Sequence[Outcome], refused: Mapping[str, str]
) -> list[Mark]:
    """Returns a mark for each check of these tasks: full points if all of its cases pass."""
    by_check: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        by_check.setdefault(f"{outcome.file}.py::{outcome.name.partition('[')[0]}", []).append(
            outcome
        )
    marks = []
    for name, task in tasks.items():
        for check, points in task.checks.items():
            cases = by_check.get(check, [])
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
    """Writes Gradescope's file, whole or not at all."""
    beside = path.with_name(f".{path.name}.partial")
    text = json.dumps(grade.results(), indent=1, ensure_ascii=False) + "\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # A character that UTF-8 has not becomes JSON's escape of it.
        beside.write_bytes(text.encode(errors="backslashreplace"))
        os.replace(beside, path)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None
    finally:
        beside.unlink(missing_ok=True)
