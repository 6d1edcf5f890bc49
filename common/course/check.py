"""The proof that a student's tree leaks nothing and works."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from common.course.leaks import Solutions, find_leaks
from common.course.markers import EXCEPTION, solution_pieces
from common.course.tasks import read_tasks
from common.errors import UserError

TIME_LIMIT_S = 300.0
IMPORT_ALL = """
import importlib, pathlib, sys
for path in sorted(pathlib.Path("common").rglob("*.py")):
    name = ".".join(path.with_suffix("").parts).removesuffix(".__init__")
    try:
        importlib.import_module(name)
    except Exception as error:  # whatever it is, the module cannot be used
        print(f"{path}: {type(error).__name__}: {error}")
print("done", len(sys.modules))
"""


@dataclass(frozen=True)
class Checked:
    """Result of a tree's check: what was checked, and the problems found, a line each."""

    unwritten: tuple[str, ...]
    files: int
    modules: int
    problems: tuple[str, ...]


def check(root: Path, tree: Path) -> Checked:
    """Checks a student's tree against the solutions at ``root``.

    Raises:
        UserError: the folder is no student's tree.
    """
    if not (tree / "common" / "exercises").is_dir():
        raise UserError(f"{tree}: no student's tree; ddplab course export makes one")
    unwritten = unwritten_tasks(tree)
    if not unwritten:
        raise UserError(f"{tree}: every task is solved in it")
    tasks = read_tasks(root)
    # Solutions of earlier tasks stay, and may be like later ones.
    solved = {str(task.path) for task in tasks.values() if task.name not in unwritten}
    leaks = [
        leak
        for leak in find_leaks(tree, Solutions(solutions(root, unwritten)))
        if leak.path not in solved
        and not (leak.task in tasks and leak.path in tasks[leak.task].alike)
    ]
    problems = list(map(str, leaks))
    modules = sorted((tree / "common").rglob("*.py"))
    problems += _run(tree, "-c", IMPORT_ALL) + _run(tree, "-m", "common.cli.main", "--help")
    files = sum(path.is_file() for path in tree.rglob("*"))
    return Checked(unwritten, files, len(modules), tuple(problems))


def unwritten_tasks(tree: Path) -> tuple[str, ...]:
    """Returns the tasks that a student's tree leaves open, in their order."""
    wanted = re.compile(rf'raise {EXCEPTION}\("(A\d\.\d)"\)')
    tasks = {
        task
        for path in (tree / "common" / "exercises").glob("*.py")
        for task in wanted.findall(path.read_text())
    }
    return tuple(sorted(tasks))


def solutions(root: Path, tasks: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """Yields each piece of these tasks' solutions: those of exercises, and second copies."""
    course_tasks = read_tasks(root)
    for name in tasks:
        source = (root / course_tasks[name].path).read_text()
        for task, text in solution_pieces(source, course_tasks[name].file):
            if task == name:
                yield task, text


def _run(tree: Path, *arguments: str) -> list[str]:
    """Runs Python in the tree; returns a line for each complaint."""
    variables = os.environ | {"PYTHONPATH": str(tree.absolute()), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        process = subprocess.run(
            [sys.executable, *arguments],
            cwd=tree,
            env=variables,
            capture_output=True,
            text=True,
            timeout=TIME_LIMIT_S,
        )
    except subprocess.TimeoutExpired:
        return [f"python {arguments[0]} …: no end after {TIME_LIMIT_S:.0f} s"]
    lines = process.stdout.splitlines()
    if arguments[0] == "-c":
        complaints = [line for line in lines if not line.startswith("done")]
        return complaints if lines else [f"modules cannot be imported: {process.stderr.strip()}"]
    return [] if process.returncode == 0 else [f"ddplab --help: {process.stderr.strip()}"]
