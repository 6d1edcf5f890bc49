"""``ddplab study grading``: a grader gives the same points ten times, and mistakes lose their own.

For each assignment the references are handed in and graded ten times, an untouched tree once, the
references without one task's for each task, and each wrong solution (``tests/exercises/mutants``),
which may lose its own check and others of its task, or of one that needs it.
Then a class of 60 made hand-ins is graded as classes are (``grading/made_class.py``): ``--only
class`` does this by itself, and ``--only right hostile late`` with one student of each kind.
``--only reference`` grades the references alone, and so for the other kinds of gradings.
A cut study is continued: ``ddplab study grading --continues RUN_DIR`` takes over the gradings that
are there.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from common.course.grading.made_class import KINDS, grade_made_class
from common.course.grading.matrix import (
    grade_references,
    is_isolated,
    lost,
    parts_of,
    unwritten,
)
from common.course.submission import HandedIn
from common.course.tasks import read_tasks
from common.errors import UserError
from common.runtime.machine.environment import describe_environment
from common.runtime.paths import project_root
from common.runtime.records.run_directory import RunDirectory
from common.runtime.records.study import earlier_table, study_run
from common.runtime.stage_progress import StageProgress

RESULTS = "gradings.csv"
KEYS = ["assignment", "part", "kind", "name", "round"]
GRADED = REFERENCE, UNTOUCHED, WITHOUT, MISTAKE = "reference", "untouched", "without", "mistake"
"""Kinds of gradings."""
ASSIGNMENTS = (0, 1, 2, 3, 4)
GRADINGS, CLASS = "gradings", "class"
"""Halves of the study."""


@dataclass(frozen=True)
class GradingStudy:
    """Settings of the study."""

    assignments: tuple[int, ...] = ASSIGNMENTS
    """Assignments whose references and mutants are graded."""
    rounds: int = 10
    """Gradings of each."""
    variant: int = 2027
    """Seed of the numbers that checks draw."""
    continues: str = ""
    """Run directory of a study that was cut."""
    only: tuple[str, ...] = ()
    """gradings or kinds of them (reference, untouched, without, mistake); class, or kinds of a
    class's hand-ins, of which there is then one each; by default gradings and class."""

    def __post_init__(self) -> None:
        for number in self.assignments:
            if number not in ASSIGNMENTS:
                raise UserError(f"--assignments {number}: 0 to {ASSIGNMENTS[-1]}")
        for name in self.only:
            if name not in (legal := (GRADINGS, CLASS, *GRADED, *KINDS)):
                raise UserError(f"--only {name}: one or more of {', '.join(legal)}")
        if self.continues and not Path(self.continues).is_dir():
            raise UserError(f"--continues {self.continues}: no such run directory")

    @property
    def kinds(self) -> list[str]:
        """Returns the kinds of hand-ins that were named."""
        return [name for name in self.only if name in KINDS]

    @property
    def graded(self) -> list[str]:
        """Returns the kinds of gradings to make."""
        return [kind for kind in GRADED if not self.only or {kind, GRADINGS} & set(self.only)]


SETTINGS = GradingStudy


@dataclass(frozen=True)
class Case:
    """One grading.

    Attributes:
        of: student, assignment and part that are handed in.
        kind: reference, untouched, without or mistake.
        name: name of the mistake, or of the task that is left out.
        round: number of the round, from 0.
        changed: exercises whose text is not the reference's.
        check: check that a mistake is meant to lose.
    """

    of: HandedIn
    kind: str
    name: str
    round: int
    changed: Mapping[str, str]
    check: str = ""

    @property
    def key(self) -> tuple:
        """Returns what tells it from the others."""
        return (self.of.assignment, self.of.part, self.kind, self.name, self.round)


def run_study(study: GradingStudy, output_dir: str, progress: StageProgress) -> Path:
    """Grades all cases and a class; returns the run directory."""
    environment = describe_environment("gloo", "cpu", 4)
    with study_run("grading", study, output_dir, progress, environment) as run:
        if study.graded:
            grade_cases(study, run, progress)
        if not study.only or CLASS in study.only or study.kinds:
            steps = grade_made_class(
                study.kinds, mutants(), study.variant, study.continues, run, progress
            )
            progress.say(steps.to_string(index=False, float_format="%.3g"))
    return run.path


def grade_cases(study: GradingStudy, run: RunDirectory, progress: StageProgress) -> None:
    """Grades all cases that were not graded before; writes their tables."""
    earlier = earlier_table(study.continues, RESULTS, KEYS)
    keys = set(earlier[KEYS].itertuples(index=False, name=None)) if len(earlier) else set()
    of_kinds = [case for case in all_cases(study) if case.kind in study.graded]
    cases = [case for case in of_kinds if case.key not in keys]
    rows = earlier.to_dict("records")
    for case in cases:
        what = f"assignment {case.of.assignment}"
        what += f", part {case.of.part}" if case.of.part else ""
        with progress.stage(f"{what}: {case.kind} {case.name or case.round + 1}"):
            rows.append(graded(case, study.variant))
        run.write_table(RESULTS, pd.DataFrame(rows))  # whole after each
    run.write_table(RESULTS, pd.DataFrame(rows))  # also if none was left to grade
    table = summary(pd.DataFrame(rows))
    run.write_table("summary.csv", table)
    mistakes = losses_of_mistakes(pd.DataFrame(rows))
    run.write_table("mistakes.csv", mistakes)
    progress.say(table.to_string(index=False, float_format="%.3g"))


def all_cases(study: GradingStudy) -> Iterator[Case]:
    """Yields the gradings, assignment by assignment."""
    tasks = read_tasks()
    for assignment in study.assignments:
        for of in parts_of(assignment, "study-grading"):
            part_tasks = of.tasks(tasks)
            for number in range(study.rounds):
                yield Case(of, REFERENCE, "", number, {})
            stripped = {task.file: unwritten(task, project_root()) for task in part_tasks.values()}
            yield Case(of, UNTOUCHED, "", 0, stripped)
            for name, task in part_tasks.items():
                yield Case(of, WITHOUT, name, 0, {task.file: stripped[task.file]})
            for mutant in mutants():
                file = f"{mutant.exercise}.py"
                checks = [check for task in part_tasks.values() for check in task.checks]
                if mutant.check in checks and file in {task.file for task in part_tasks.values()}:
                    changed = {file: mutant.source()}
                    yield Case(of, MISTAKE, mutant.name, 0, changed, mutant.check)


def mutants() -> list:
    """Returns the wrong solutions of the tests."""
    folder = str(project_root() / "tests" / "exercises")
    if folder not in sys.path:
        sys.path.insert(0, folder)
    numbers = importlib.import_module("mutants.numbers").NUMBERS
    return [*numbers, *importlib.import_module("mutants.ranks").RANKS]


def graded(case: Case, variant: int) -> dict[str, object]:
    """Grades a case; returns a row. Answers are left out: their marks are arithmetic."""
    tasks = case.of.tasks(read_tasks())
    grade = grade_references(case.of, project_root(), case.changed, variant)
    marks = [mark for mark in grade.marks if mark.of in tasks]
    lost_marks = [mark for mark in marks if lost(mark)]
    return {
        **dict(zip(KEYS, case.key, strict=True)),
        "score": sum(mark.score or 0.0 for mark in marks),
        "maximum": sum(mark.points for mark in marks if mark.score is not None),
        "checks": len(marks),
        "lost": "; ".join(f"{mark.of}: {mark.name}" for mark in lost_marks),
        "reasons": "; ".join(mark.why.partition("\n")[0] for mark in lost_marks),
        "lost_what_it_should": is_isolated(case.name, marks) if case.kind == WITHOUT else "",
        "isolation": grade.isolation,
        "grading_time_s": grade.seconds,
    }


def losses_of_mistakes(rows: pd.DataFrame) -> pd.DataFrame:
    """Returns a row for each wrong solution: what it lost, and what it should not have.

    Columns: assignment, part, name, check (that it is meant for), found (whether that is lost),
    besides (other checks lost), elsewhere (those of them whose task does not need the exercise).
    """
    tasks = read_tasks()
    checks = {
        check: f"{task.name}: {words(check)}" for task in tasks.values() for check in task.checks
    }
    task_of = {task.file: name for name, task in tasks.items()}
    mistakes_by_name = {mutant.name: mutant for mutant in mutants()}
    mistakes = []
    for row in rows[rows["kind"] == MISTAKE].to_dict("records"):
        mutant = mistakes_by_name[row["name"]]
        changed = task_of[f"{mutant.exercise}.py"]
        losses = set(filter(None, row["lost"].split("; ")))
        besides = losses - {checks[mutant.check]}
        near = {name for name, task in tasks.items() if changed in (name, *task.needs)}
        elsewhere = {loss for loss in besides if loss.partition(":")[0] not in near}
        mistakes.append(
            {name: row[name] for name in ("assignment", "part", "name")}
            | {"check": mutant.check, "found": checks[mutant.check] in losses}
            | {"besides": "; ".join(sorted(besides))}
            | {"elsewhere": "; ".join(sorted(elsewhere))}
        )
    columns = ["assignment", "part", "name", "check", "found", "besides", "elsewhere"]
    return pd.DataFrame(mistakes, columns=columns)


def words(check: str) -> str:
    """Returns a check's name as marks have it."""
    return check.partition("::test_")[2].replace("_", " ")


def summary(rows: pd.DataFrame) -> pd.DataFrame:
    """Returns a row for each assignment: scores, whether they are the same, and the time."""
    assignments = []
    mistakes = losses_of_mistakes(rows)
    for (assignment, part), gradings in rows.groupby(["assignment", "part"]):
        best = gradings[gradings["kind"] == REFERENCE]
        wrong = mistakes[(mistakes["assignment"] == assignment) & (mistakes["part"] == part)]
        assignments.append(
            {
                "assignment": assignment,
                "part": part,
                "gradings": len(best),
                "lowest_score": best["score"].min(),
                "highest_score": best["score"].max(),
                "maximum": gradings["maximum"].max(),
                "untouched_score": gradings.loc[gradings["kind"] == UNTOUCHED, "score"].max(),
                "without_a_task": int((gradings["kind"] == WITHOUT).sum()),
                "isolated": int((gradings["lost_what_it_should"].astype(str) == "True").sum()),
                "mistakes": len(wrong),
                "mistakes_found": int(wrong["found"].sum()),
                "others_lost": int(wrong["besides"].str.count("A[0-9]").sum()),
                "others_elsewhere": int(wrong["elsewhere"].str.count("A[0-9]").sum()),
                "median_time_s": gradings["grading_time_s"].median(),
            }
        )
    return pd.DataFrame(assignments)
