"""The staff's private files beside a public project: references, hidden tests, keys, fault sets.

An overlay is a folder whose files stand at the same paths as in the project, and come first.
``ddplab course split`` makes one. What else lies there, such as its own README and history, is not
read.
"""

from __future__ import annotations

import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from common.course.markers import solution_pieces
from common.course.tasks import (
    COURSE,
    HIDDEN,
    check_names,
    course_without,
    read_course,
    read_tasks,
)
from common.errors import UserError

COPIED = ("common", "tests", "assignments")
FOLDERS = (*COPIED, "data")
CACHES = ("__pycache__", ".pytest_cache", ".git")


@contextmanager
def with_overlay(
    root: Path,
    overlay: Path | None,
    without: Collection[str] = (),
    needed: Collection[str] | None = None,
) -> Iterator[Path]:
    """Gives a project in which the overlay's files have taken their places; goes at the end.

    Args:
        root: the project.
        overlay: folder of the overlay; None for the project as it is.
        without: names of tasks that are left out, besides those of ``course.yaml``.
        needed: names of tasks whose solutions have to be there; by default all.

    Raises:
        UserError: the overlay is no folder, has a file that takes no place, or a task is unknown or
            lacks its solution.
    """
    names = staff_files(root, overlay) if overlay else []
    if not names and not without:
        require_solutions(root, needed)
        yield root
        return
    with TemporaryDirectory(prefix="ddplab-overlay-") as scratch:
        merged = Path(scratch)
        merged.chmod(0o755)
        folders = {*COPIED, *(Path(name).parts[0] for name in names)}
        for path in root.iterdir():
            if path.name in folders and path.is_dir():
                ignored = shutil.ignore_patterns(*CACHES)
                shutil.copytree(path, merged / path.name, ignore=ignored)
            elif path.name not in (*folders, *CACHES, ".venv"):
                (merged / path.name).symlink_to(path.absolute())
        for name in names:
            (merged / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(overlay / name, merged / name)
        if without:
            tasks = read_tasks(merged)
            omitted = [name for name, task in tasks.items() if task.omitted]
            omitted += check_names(without, tasks, "--without: ")
            text = course_without((merged / COURSE).read_text(), dict.fromkeys(omitted))
            (merged / COURSE).write_text(text)
        require_solutions(merged, needed, overlay)
        yield merged


def staff_files(root: Path, overlay: Path) -> list[str]:
    """Returns the files of an overlay that take a place in the project, by their paths there.

    Raises:
        UserError: it is no folder or has no such files, or one of them is neither the project's,
            private, nor a task's.
    """
    paths = [path.relative_to(overlay) for path in overlay.rglob("*") if path.is_file()]
    paths = sorted(path for path in paths if not set(path.parts) & set(CACHES))
    course = read_course(overlay if COURSE in paths else root)
    exercises = {task.path for task in course.tasks.values()}
    names = [
        str(path) for path in paths if path.parts[0] in FOLDERS or course.is_private(str(path))
    ]
    if not names:
        raise UserError(f"--overlay {overlay}: expected a folder with {', '.join(FOLDERS)}")
    for name in names:
        is_new = course.is_private(name) or Path(name) in exercises
        if not is_new and not (root / name).is_file():
            raise UserError(
                f"--overlay {overlay}: {name} takes no place: the project has no such file, and "
                f"{COURSE} has it neither among the private ones nor as a task's"
            )
    return names


def require_solutions(
    root: Path, needed: Collection[str] | None = None, overlay: Path | None = None
) -> None:
    """Raises UserError unless a project has the solutions of these tasks.

    By default it has to have those of all, and the hidden tests.
    """
    tasks = read_tasks(root)
    where = f"--overlay {overlay}" if overlay else "this project; an --overlay may have it"
    for name in tasks if needed is None else needed:
        task = tasks[name]
        path = root / task.path
        pieces = solution_pieces(path.read_text(), task.file) if path.is_file() else []
        if name not in dict(pieces):
            raise UserError(f"{task.path}: the solution of {name} is not in {where}")
    checks = [check for task in tasks.values() for check in task.checks] if needed is None else []
    for file in dict.fromkeys(HIDDEN / check.partition("::")[0] for check in checks):
        if not (root / file).is_file():
            raise UserError(f"{file}: these hidden tests are not in {where}")
