"""The tasks of the course, as ``assignments/course.yaml`` lists them."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

import yaml

from common.errors import UserError, unknown_name
from common.runtime.paths import project_root

COURSE = Path("assignments") / "course.yaml"
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""Reads the project's own YAML; the one in C, where PyYAML has it, takes a tenth of the time."""
EXERCISES = Path("common") / "exercises"
HIDDEN = Path("tests") / "exercises" / "hidden"
WITHOUT = re.compile(r"^without:[^\n]*\n(?: *- [^\n]*\n)*", re.MULTILINE)


@dataclass(frozen=True)
class Task:
    """A task.

    Attributes:
        name: such as A2.1.
        title: the task in words.
        file: file name below ``common/exercises``.
        points: sum of its checks' points.
        hours: hours that it takes a student.
        checks: the task's checks, each with its points.
        needs: tasks whose files its own may import.
        bonus: whether its points come on top.
        alike: files with pieces that are like its solution, each with the reason why they stay.
        omitted: whether this course leaves it out. Then it has no points, nobody hands it in, and
            tasks that need it get its solution.
    """

    name: str
    title: str
    file: str
    points: int
    hours: float
    checks: Mapping[str, int]
    needs: tuple[str, ...] = ()
    bonus: bool = False
    alike: Mapping[str, str] = field(default_factory=dict)
    omitted: bool = False

    @property
    def assignment(self) -> int:
        """Returns the number of its assignment."""
        return int(self.name[1])

    @property
    def path(self) -> Path:
        """Returns its file, from the project's root."""
        return EXERCISES / self.file

    @property
    def heading(self) -> str:
        """Returns the heading of its section in the handout."""
        kind = "bonus, " if self.bonus else ""
        return f"### {self.name} {self.title} ({kind}{self.points} points, {self.hours:g} h)"


@dataclass(frozen=True)
class Course:
    """The course.

    Attributes:
        tasks: task by its name, in their order.
        left_out: patterns of files that students do not get, and that show no answer.
        private: patterns of files that show answers; they go to the overlay of a course whose
            project is public.
        kept: patterns of files among these that students do get.
    """

    tasks: Mapping[str, Task]
    left_out: tuple[str, ...] = ()
    private: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()

    def leaves_out(self, name: str) -> bool:
        """Returns True if students do not get this file, a path from the root."""
        return _matches(name, self.left_out + self.private) and not _matches(name, self.kept)

    def is_private(self, name: str) -> bool:
        """Returns True if this file, a path from the root, shows answers."""
        return _matches(name, self.private) and not _matches(name, self.kept)


def read_course(root: Path | None = None) -> Course:
    """Reads the course of the project at ``root``, by default of this one.

    Raises:
        UserError: the list is missing, or says what cannot be.
    """
    path = (root or project_root()) / COURSE
    try:
        content = yaml.load(path.read_text(), LOADER)
        listed = content["tasks"].items()
    except FileNotFoundError:
        raise UserError(f"{COURSE}: no such file in {path.parents[1]}") from None
    except (yaml.YAMLError, AttributeError, KeyError, TypeError) as error:
        raise UserError(f"{COURSE}: no list of tasks: {error}") from None
    tasks = {name: _task(name, entries) for name, entries in listed}
    for task in tasks.values():
        for needed in task.needs:
            if needed not in tasks:
                raise UserError(f"{COURSE}: {task.name} needs {needed}, which is no task")
            if needed >= task.name:
                raise UserError(f"{COURSE}: {task.name} needs {needed}, which comes after it")
    for name in check_names(content.get("without") or (), tasks, f"{COURSE}: without: "):
        tasks[name] = replace(tasks[name], omitted=True)
    patterns = {name: tuple(content.get(name, ())) for name in ("left_out", "private", "kept")}
    return Course(tasks, **patterns)


def read_tasks(root: Path | None = None) -> Mapping[str, Task]:
    """Reads the tasks; see ``read_course``."""
    return read_course(root).tasks


def check_names(names: Collection[str], tasks: Mapping[str, Task], where: str) -> list[str]:
    """Returns the names of tasks. Raises UserError for one that there is not, said with where."""
    for name in names:
        if name not in tasks:
            raise UserError(where + unknown_name("task", str(name), tasks))
    return list(names)


def course_without(text: str, names: Collection[str]) -> str:
    """Returns the text of ``course.yaml`` in which these tasks are left out, and no others."""
    line = f"without: [{', '.join(names)}]\n"
    if WITHOUT.search(text):
        return WITHOUT.sub(line, text, count=1)
    return line + text


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _task(name: str, entries: Mapping) -> Task:
    if not re.fullmatch(r"A\d\.\d", str(name)):
        raise UserError(f"{COURSE}: {name!r} is no name of a task; such as A2.1")
    allowed = [field.name for field in fields(Task) if field.name not in ("name", "omitted")]
    for entry in entries:
        if entry not in allowed:
            raise UserError(f"{COURSE}: {name}: {unknown_name('entry', str(entry), allowed)}")
    try:
        task = Task(name, **{**entries, "needs": tuple(entries.get("needs", ()))})
    except TypeError as error:
        missing = [entry for entry in allowed[:5] if entry not in entries]
        reason = f"no {', '.join(missing)}" if missing else str(error)
        raise UserError(f"{COURSE}: {name}: {reason}") from None
    if sum(task.checks.values()) != task.points:
        raise UserError(
            f"{COURSE}: {name}: {task.points} points, and its checks give "
            f"{sum(task.checks.values())}"
        )
    return task
