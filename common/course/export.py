"""A student's tree: the project at a commit, without an assignment's solutions and later ones."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from common.course.faults import STUDY, public_set
from common.course.markers import student_source
from common.course.tasks import Task, read_course
from common.errors import UserError, unknown_name
from common.runtime.notebook_cells import without_answers
from common.runtime.paths import git

LINK = re.compile(r"\[(?P<words>[^\]]+)\]\((?P<path>[^):#]+)(?:#[^)]*)?\)")
"""A link of Markdown to a file of the project."""


def export(
    root: Path,
    out: Path,
    assignment: int,
    solved: Sequence[str] = (),
    overlay: Path | None = None,
) -> list[str]:
    """Writes the student's tree of an assignment to ``out``, whole or not at all.

    It has the files that git tracks at HEAD, but for those that ``course.yaml`` leaves out. The
    same commit gives the same bytes.

    Args:
        root: the project; nothing may be changed there and not committed.
        out: folder of the tree, which must not exist.
        assignment: number of the assignment; its tasks and those of later ones are stripped.
        solved: names of tasks that are solved all the same.
        overlay: folder of the staff's, with files that take the place of the project's.

    Returns:
        the names of the tasks that are solved.

    Raises:
        UserError: no such assignment or task, a task before its prerequisite, a folder that is
            there, changes that are not committed, or markers that do not pair.
    """
    course = read_course(root)
    names = solved_tasks(course.tasks, assignment, solved)
    if out.exists():
        raise UserError(f"{out} is there already; give a folder that is not")
    if overlay and not overlay.is_dir():
        raise UserError(f"--overlay {overlay}: no such folder")
    files = tracked_files(root)
    missing = {name for name in files if course.leaves_out(name)}
    beside = out.with_name(f".{out.name}.partial")
    shutil.rmtree(beside, ignore_errors=True)
    try:
        for name in files:
            if name not in missing:
                source = overlay / name if overlay and (overlay / name).is_file() else root / name
                content = student_file(source, name, names)
                if name.endswith(".md"):
                    page = student_page(content.decode(), name, missing, set(files) - missing)
                    content = page.encode()
                target = beside / name
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(content)
                target.chmod(0o755 if (root / name).stat().st_mode & 0o100 else 0o644)
        # Only students have recorded runs under names that do not say a cause.
        recorded = public_set(root) if (root / STUDY).is_dir() else {}
        for name, content in recorded.items():
            (beside / name).parent.mkdir(parents=True, exist_ok=True)
            (beside / name).write_bytes(content)
        beside.rename(out)
    except OSError as error:
        raise UserError(f"{out}: {error.strerror}") from None
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return names


def solved_tasks(tasks: Mapping[str, Task], assignment: int, solved: Collection[str]) -> list[str]:
    """Returns the tasks of earlier assignments and those in ``solved``, in the course's order.

    Raises:
        UserError: no such assignment or task, or a task whose prerequisite is not solved.
    """
    numbers = sorted({task.assignment for task in tasks.values()})
    if assignment not in numbers:
        choices = ", ".join(map(str, numbers))
        raise UserError(f"there is no assignment {assignment}; known: {choices}")
    for name in solved:
        if name not in tasks:
            raise UserError(unknown_name("task", name, tasks))
    names = [n for n, task in tasks.items() if task.assignment < assignment or n in solved]
    for name in names:
        for needed in tasks[name].needs:
            if needed not in names:
                raise UserError(f"task {name} needs {needed}, which would not be solved")
    return names


def tracked_files(root: Path) -> list[str]:
    """Returns the files that git tracks. Raises UserError where something is not committed."""
    changed = _git(root, "status", "--porcelain", "--untracked-files=no").splitlines()
    if changed:
        more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
        raise UserError(f"not committed: {changed[0][3:]}{more}")
    return sorted(filter(None, _git(root, "ls-files", "-z").split("\0")))


def student_file(path: Path, name: str, solved: Collection[str]) -> bytes:
    """Returns what a student gets of a file."""
    content = path.read_bytes()
    if path.suffix == ".py":
        return student_source(content.decode(), name, solved).encode()
    if path.suffix == ".ipynb":
        return without_answers(content.decode()).encode()
    return content


def student_page(text: str, name: str, missing: Collection[str], present: Collection[str]) -> str:
    """Returns a page of Markdown in which links to files that students do not get are plain text.

    Args:
        text: text of the page.
        name: path of the page from the root, to which its links are relative.
        missing, present: files that students do not get, and files that they get.
    """
    folder = Path(name).parent

    def kept(link: re.Match) -> str:
        target = os.path.normpath(folder / link["path"])
        holds = [
            any(f == target or f.startswith(f"{target}/") for f in s) for s in (missing, present)
        ]
        return link["words"] if holds == [True, False] else link[0]

    return LINK.sub(kept, text)


def _git(root: Path, *arguments: str) -> str:
    try:
        process = git(root, *arguments)
    except FileNotFoundError:
        raise UserError("git: not found; it says which files are the project's") from None
    if process.returncode:
        reason = " ".join(process.stderr.split()) or "failed"
        raise UserError(f"git {arguments[0]} in {root}: {reason}")
    return process.stdout
