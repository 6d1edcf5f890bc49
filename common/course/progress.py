"""``ddplab course test``: how far a student has come, by the public tests."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from common.course.outcomes import FAILED, PASSED, SKIPPED, Outcome, run_tests
from common.course.tasks import Task, read_tasks
from common.errors import UserError, unknown_name, unwritten_task

PUBLIC = Path("tests") / "exercises" / "public"
TASK = re.compile(r"(?:test_a(\d)_(\d)_|\[A(\d)\.(\d))")
"""A test says in its name, or as its parameter, which task it is of."""
WORDS = 100
"""Characters of a failure's reason."""


@dataclass(frozen=True)
class Progress:
    """A task, and the outcomes of its public tests."""

    task: Task
    outcomes: tuple[Outcome, ...]

    @property
    def passed(self) -> int:
        """Returns the number of tests that pass."""
        return sum(outcome.outcome == PASSED for outcome in self.outcomes)

    @property
    def unwritten(self) -> str:
        """Returns the task whose solution is missing, its own or one it builds on; or nothing."""
        return next(
            filter(None, (unwritten_task(outcome.message) for outcome in self.outcomes)), ""
        )

    @property
    def first_failure(self) -> str:
        """Returns why its first failing test fails, in a line; empty if none does."""
        for outcome in self.outcomes:
            if outcome.outcome != PASSED:
                return f"{outcome.name}: {reason_of(outcome.message)}"
        return ""

    @property
    def points(self) -> float:
        """Returns the points, if hidden tests passed as the public ones do."""
        return self.task.points * self.passed / len(self.outcomes) if self.outcomes else 0.0


def progress(root: Path, wanted: str = "") -> list[Progress]:
    """Runs the public tests in the tree at ``root``.

    Args:
        root: student's tree, or the project.
        wanted: name of a task; empty for all.

    Raises:
        UserError: no such task, a tree without public tests, or a file that cannot be imported,
            so that no test of it runs.
    """
    tasks = read_tasks(root)
    if wanted and wanted not in tasks:
        raise UserError(unknown_name("task", wanted, tasks))
    if not (root / PUBLIC).is_dir():
        raise UserError(f"{root}: there is no {PUBLIC} in it")
    arguments = [str(PUBLIC), "--continue-on-collection-errors"]
    if wanted:
        number = wanted[1:].replace(".", "_")
        arguments += ["-k", f"test_a{number} or {wanted}"]
    outcomes = run_tests(root, arguments)
    rows = by_task(tasks, outcomes, wanted)
    failed = [outcome for outcome in outcomes if outcome.outcome == FAILED]
    not_loaded = next((outcome for outcome in failed if not TASK.search(outcome.name)), None)
    if not_loaded and not (wanted and rows[0].outcomes):
        where = not_loaded.name.rpartition(".")[2]
        raise UserError(f"{where} cannot be loaded: {reason_of(not_loaded.message)}")
    return rows


def by_task(
    tasks: Mapping[str, Task], outcomes: Sequence[Outcome], wanted: str = ""
) -> list[Progress]:
    """Returns the tasks with their outcomes; those without any only if they are asked for."""
    by_name: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        match = TASK.search(outcome.name)
        if match and outcome.outcome != SKIPPED:
            assignment, number = filter(None, match.groups())
            by_name.setdefault(f"A{assignment}.{number}", []).append(outcome)
    graded = [name for name, task in tasks.items() if name in by_name and not task.omitted]
    names = [wanted] if wanted else graded
    return [Progress(tasks[name], tuple(by_name.get(name, ()))) for name in names]


def reason_of(message: str) -> str:
    """Returns the line of a failure's message that says most: the last error, else the first."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    kinds = "Error|Written|Raised|Ended"
    errors = [line for line in lines if re.match(rf"(E\s+)?(\w+\.)*\w*({kinds})\b", line)]
    reason = (errors or lines or ["no reason"])[-1 if errors else 0]
    reason = re.sub(r"^(E\s+)?([a-z_]+\.)*", "", reason)  # the class without its module
    return reason if len(reason) <= WORDS else f"{reason[: WORDS - 1]}…"


def lines_of(rows: Sequence[Progress]) -> list[str]:
    """Returns the table that a student reads, and below it the first failure."""
    width = max(len(row.task.title) for row in rows)
    lines = [f"{'task':<5} {'':<{width}} {'tests':>8} {'points':>9}"]
    for row in rows:
        tests = f"{row.passed} of {len(row.outcomes)}"
        points = f"{row.points:g} of {row.task.points}"
        state = ""
        if row.unwritten:
            is_own = row.unwritten == row.task.name
            state = "  to be written" if is_own else f"  needs {row.unwritten}"
        lines.append(f"{row.task.name:<5} {row.task.title:<{width}} {tests:>8} {points:>9}{state}")
    failing = next((row for row in rows if not row.unwritten and row.first_failure), None)
    if failing:
        lines += ["", f"{failing.task.path}", f"  {failing.first_failure}"]
    elif unwritten := [row for row in rows if row.unwritten == row.task.name]:
        lines += ["", f"Next: {unwritten[0].task.name}, in {unwritten[0].task.path}"]
    return lines
