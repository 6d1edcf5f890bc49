"""A student's tree: the project at a commit, without an assignment's solutions and later ones."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from common.course.answers import questions_path, read_questions
from common.course.faults import STUDY, public_set
from common.course.markers import student_source
from common.course.overlay import require_solutions, staff_files, with_overlay
from common.course.tasks import Task, check_names, read_course, read_tasks
from common.errors import UserError
from common.runtime.notebook_cells import without_answers
from common.runtime.paths import git
from common.runtime.records.run_directory import written_beside

LINK = re.compile(r"\[(?P<words>[^\]]+)\]\((?P<path>[^):#]+)(?:#[^)]*)?\)")
"""A link of Markdown to a file of the project."""
AI_RULES, AGENTS = "assignments/AI-TOOLS.md", ("AGENTS.md", "CLAUDE.md")
"""Page of rules for AI tools, and the names under which such tools look for them."""
HANDOUT = re.compile(r"assignments/assignment(\d)/README\.md")
SECTION = re.compile(r"^### (A\d\.\d) [^\n]*\n(.*?)(?=^#{2,3} |\Z)", re.DOTALL | re.MULTILINE)
"""A task's section in a handout."""
ROW = re.compile(r"^\| (A\d\.\d) (?!to )([^\n]*\| )\d+ \|\n", re.MULTILINE)
SUM = re.compile(r"^(\| (?:\*\*sum\*\*|in all) [^\n]*\| \**)\d+(\** \|)$", re.MULTILINE)
"""A task's row, and the last one, in the table of points."""


def export(
    root: Path,
    out: Path,
    assignment: int,
    solved: Sequence[str] = (),
    *,
    overlay: Path | None = None,
    without: Sequence[str] = (),
) -> list[str]:
    """Writes the student's tree of an assignment to ``out``, whole or not at all.

    It has the files that git tracks at HEAD and those of the overlay, but for those that
    ``course.yaml`` leaves out, and the rules for AI tools where such tools look. The same commit
    gives the same bytes.

    Args:
        root: the project; nothing may be changed there and not committed.
        out: folder of the tree, which must not exist.
        assignment: number of the assignment; its tasks and those of later ones are stripped.
        solved: names of tasks that are solved all the same.
        overlay: folder of the staff's, with files that take the place of the project's.
        without: names of tasks that are left out, besides those of ``course.yaml``.

    Returns:
        the names of the tasks that are solved.

    Raises:
        UserError: no such assignment or task, a task before its prerequisite, a folder that is
            there, changes that are not committed, markers that do not pair, or a solution that is
            not there.
    """
    if out.exists():
        raise UserError(f"{out} is there already; give a folder that is not")
    files = tracked_files(root)
    with with_overlay(root, overlay, without, needed=()) as merged:
        files = sorted({*files, *(staff_files(root, overlay) if overlay else ())})
        tasks = read_course(merged).tasks
        names = solved_tasks(tasks, assignment, solved)
        require_solutions(merged, names, overlay)
        contents = student_files(merged, files, names)
        # Only students have recorded runs under names that do not say a cause.
        contents |= public_set(merged) if (merged / STUDY).is_dir() else {}
        executable = {name for name in files if (merged / name).stat().st_mode & 0o100}
    write_tree(out, contents, executable)
    return names


def student_files(root: Path, files: Sequence[str], solved: Collection[str]) -> dict[str, bytes]:
    """Returns what students get of a project's files, by their paths.

    Raises:
        UserError: markers that do not pair.
    """
    course = read_course(root)
    missing = {name for name in files if course.leaves_out(name)}
    present = set(files) - missing
    contents = {}
    for name in sorted(present):
        content = student_file(root / name, name, solved)
        if name.endswith(".md"):
            page = student_page(content.decode(), name, missing, present)
            if number := HANDOUT.fullmatch(name):
                page = handout(page, root, int(number[1]))
            content = page.encode()
        contents[name] = content
    if AI_RULES in contents:
        contents |= dict.fromkeys(AGENTS, contents[AI_RULES])
    return contents


def write_tree(out: Path, contents: Mapping[str, bytes], executable: Collection[str]) -> None:
    """Writes files to a new folder, whole or not at all. Raises UserError if it cannot."""
    with written_beside(out) as beside:
        for name, content in contents.items():
            target = beside / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)
            target.chmod(0o755 if name in executable else 0o644)


def solved_tasks(tasks: Mapping[str, Task], assignment: int, solved: Collection[str]) -> list[str]:
    """Returns the tasks of earlier assignments, those in ``solved``, and those left out, in order.

    Raises:
        UserError: no such assignment or task, or a task whose prerequisite is not solved.
    """
    numbers = sorted({task.assignment for task in tasks.values()})
    if assignment not in numbers:
        choices = ", ".join(map(str, numbers))
        raise UserError(f"there is no assignment {assignment}; known: {choices}")
    check_names(solved, tasks, "")
    names = [
        name
        for name, task in tasks.items()
        if task.assignment < assignment or name in solved or task.omitted
    ]
    for name in names:
        for needed in () if tasks[name].omitted else tasks[name].needs:
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


def handout(text: str, root: Path, assignment: int) -> str:
    """Returns a handout with the headings and points of ``course.yaml``, without omitted tasks."""
    tasks = read_tasks(root)

    def section(match: re.Match) -> str:
        task = tasks.get(match[1])
        if task is None:
            return match[0]
        return "" if task.omitted else f"{task.heading}\n{match[2]}"

    def row(match: re.Match) -> str:
        task = tasks.get(match[1])
        if task is None:
            return match[0]
        return "" if task.omitted else f"| {task.name} {match[2]}{task.points} |\n"

    points = sum(
        task.points
        for task in tasks.values()
        if task.assignment == assignment and not task.omitted and not task.bonus
    )
    if questions_path(root, assignment).is_file():
        points += sum(question.points for question in read_questions(root, assignment).values())
    text = ROW.sub(row, SECTION.sub(section, text))
    return SUM.sub(lambda match: f"{match[1]}{points}{match[2]}", text)


def _git(root: Path, *arguments: str) -> str:
    try:
        process = git(root, *arguments)
    except FileNotFoundError:
        raise UserError("git: not found; it says which files are the project's") from None
    if process.returncode:
        reason = " ".join(process.stderr.split()) or "failed"
        raise UserError(f"git {arguments[0]} in {root}: {reason}")
    return process.stdout
