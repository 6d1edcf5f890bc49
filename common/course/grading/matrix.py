"""The isolation matrix: a task that is not written loses its own points, and no other task's.

Each task of an assignment is left out by itself, and the references of the others are handed in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from common.course.grading.grade import Grader
from common.course.grading.marks import Grade, Mark
from common.course.markers import student_source
from common.course.submission import PARTS, HandedIn, pack
from common.course.tasks import Task, read_tasks


def parts_of(assignment: int, name: str) -> list[HandedIn]:
    """Returns what is handed in of an assignment, in parts or as a whole, under this name."""
    parts = range(1, len(PARTS[assignment]) + 1) if assignment in PARTS else (0,)
    return [HandedIn(name, assignment, part) for part in parts]


def reference_of(task: Task, root: Path) -> str:
    """Returns the text of a task's reference solution."""
    return (root / task.path).read_text()


def unwritten(task: Task, root: Path) -> str:
    """Returns the text that a student begins with."""
    return student_source(reference_of(task, root), task.file, ())


def grade_references(of: HandedIn, root: Path, changed: Mapping[str, str], variant: int) -> Grade:
    """Grades the references of what is handed in, without answers.

    Args:
        of: the assignment, and its part.
        root: the project.
        changed: files whose text is another one.
        variant: seed of the numbers in checks.
    """
    tasks = of.tasks(read_tasks(root)).values()
    texts = {task.file: changed.get(task.file, reference_of(task, root)) for task in tasks}
    with TemporaryDirectory() as scratch:
        path = Path(scratch) / f"{of.stem}.tar.gz"
        pack(path, of, {f"exercises/{name}": text.encode() for name, text in texts.items()})
        return Grader(root, variant).grade(path)


def is_isolated(left_out: str, marks: Sequence[Mark]) -> bool:
    """Returns True if all of a task's checks say that it is not written, and others pass.

    Tasks that build on it may fail, too, and say the same. What was not judged is nobody's loss.
    """
    reason = f"task {left_out} is not written yet"
    own_marks = [mark for mark in marks if mark.of == left_out]
    other_losses = [mark for mark in marks if mark.of != left_out and lost(mark)]
    judged = [mark for mark in own_marks if mark.score is not None]
    return (
        bool(judged)
        and all(mark.score == 0 and reason in mark.why for mark in judged)
        and all(reason in mark.why for mark in other_losses)
    )


def lost(mark: Mark) -> bool:
    """Returns True if a mark was judged, and is not full."""
    return mark.score is not None and mark.score != mark.points


def isolation_problems(
    root: Path, tasks: Sequence[str], say: Callable[[str], None] = lambda line: None
) -> list[str]:
    """Leaves each of these tasks out by itself; returns a line for each that is not isolated.

    Args:
        root: the project.
        tasks: names of tasks of one assignment.
        say: called with a line before each grading.
    """
    all_tasks = read_tasks(root)
    problems = []
    for of in parts_of(all_tasks[tasks[0]].assignment, "isolation-matrix"):
        part_tasks = of.tasks(all_tasks)
        for name in (name for name in tasks if name in part_tasks):
            say(f"grading the references without {name}")
            task = part_tasks[name]
            grade = grade_references(of, root, {task.file: unwritten(task, root)}, 0)
            marks = [mark for mark in grade.marks if mark.of in part_tasks]
            if not is_isolated(name, marks):
                losses = "; ".join(f"{m.of}: {m.name}" for m in marks if lost(m)) or "nothing"
                problems.append(f"without {name}, what loses points is {losses}")
    return problems
