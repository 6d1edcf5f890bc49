"""The proof that a student's tree works, and shows no solution: in code, notebooks or data.

A text is a row of tokens: names, numbers, and every other character by itself. Two rows are alike
if one becomes the other by renaming variables; attributes (behind a dot), words in quotes, names of
classes, Python's keywords and its built-in functions stay as they are. A solution leaks where a
file has ``WINDOW`` of its tokens in a row, or all of it if it is shorter.
"""

from __future__ import annotations

import builtins
import json
import keyword
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from common.course.markers import EXCEPTION, solution_pieces
from common.course.tasks import read_course, read_tasks
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
WINDOW = 25
SHORTEST = 12
"""A solution of fewer tokens is no secret: ``return a / b`` may stand anywhere."""
TOKEN = re.compile(r"[^\W\d]\w*|\d+(?:\.\d+)?|[^\w\s]")
COMMENT = re.compile(r"#[^\n]*")
DOCSTRING = re.compile(r'""".*?"""', re.DOTALL)
MARKER = re.compile(r"(BEGIN|END) SOLUTION")
KEPT = frozenset(keyword.kwlist) | frozenset(dir(builtins))
NAMES_FOLLOW = (".", '"', "'")
"""Tokens that an attribute or a column stands behind, which is no variable."""
VARIABLE, UNKNOWN = "v", "?"
A_MARKER = "a marker"


@dataclass(frozen=True)
class Checked:
    """Result of a tree's check: what was checked, and the problems found, a line each."""

    unwritten: tuple[str, ...]
    files: int
    modules: int
    problems: tuple[str, ...]


def check(root: Path, tree: Path) -> Checked:
    """Checks a student's tree, or a public project, against the solutions at ``root``.

    Raises:
        UserError: the folder is no student's tree.
    """
    if not (tree / "common" / "exercises").is_dir():
        raise UserError(f"{tree}: no student's tree; ddplab course export makes one")
    unwritten = unwritten_tasks(tree)
    if not unwritten:
        raise UserError(f"{tree}: every task is solved in it")
    course = read_course(root)
    tasks = course.tasks
    # Solutions of earlier tasks stay, and may be like later ones.
    solved = {str(task.path) for task in tasks.values() if task.name not in unwritten}
    leaks = [
        leak
        for leak in find_leaks(tree, Solutions(solutions(root, unwritten)))
        if leak.path not in solved
        and not (leak.task in tasks and leak.path in tasks[leak.task].alike)
        # A public project has the staff's programs, which speak of markers.
        and not (leak.what == A_MARKER and course.leaves_out(leak.path))
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


@dataclass(frozen=True)
class Leak:
    """A piece of a file that should not be there.

    Attributes:
        path: path from the tree's root.
        line: number of its first line, from 1.
        task: task that it solves; empty for what is no solution.
        what: the piece in words.
    """

    path: str
    line: int
    task: str
    what: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.what}"


@dataclass(frozen=True)
class Token:
    """A token, its line from 1, and whether it is a name that anybody may change."""

    text: str
    line: int
    is_variable: bool


class Solutions:
    """The solutions of a course, by what is left of them when variables are renamed.

    A token of a solution is a character: one for all variables, else its own. So a window is a
    string, in which strings of a file are looked up; where one is found, it remains to compare
    which of its variables are equal.
    """

    def __init__(self, solutions: Iterable[tuple[str, str]]) -> None:
        """Takes pairs of a task and the text of one of its solutions."""
        self.codes: dict[str, str] = {}
        self.windows: dict[int, dict[str, dict[tuple[int, ...], str]]] = {}
        for task, text in solutions:
            tokens = list(tokens_of(COMMENT.sub("", DOCSTRING.sub("", text))))
            for token in tokens:
                if not token.is_variable:
                    self.codes.setdefault(token.text, chr(0x100 + len(self.codes)))
            size = min(WINDOW, len(tokens))
            if size < SHORTEST:
                continue
            coded = self.coded([token.text for token in tokens])
            for start in range(len(tokens) - size + 1):
                patterns = self.windows.setdefault(size, {}).setdefault(
                    coded[start : start + size], {}
                )
                patterns.setdefault(pattern(tokens[start : start + size]), task)

    def coded(self, words: Sequence[str]) -> str:
        """Returns a character for each token."""
        by_itself = {
            word: VARIABLE if is_variable(word, "") else self.codes.get(word, UNKNOWN)
            for word in set(words)
        }
        return "".join(
            self.codes.get(word, UNKNOWN) if before in NAMES_FOLLOW else by_itself[word]
            for before, word in zip(("", *words), words, strict=False)
        )

    def found_in(self, text: str) -> Iterator[tuple[int, str]]:
        """Yields the line and the task of each piece of a solution in a text."""
        coded = self.coded(TOKEN.findall(text))
        # Nearly every text ends here: no window has a token that no solution has.
        starts = [
            (size, start)
            for size, windows in self.windows.items()
            for known in re.finditer(f"[^{UNKNOWN}]{{{size},}}", coded)
            for start in range(known.start(), known.end() - size + 1)
            if coded[start : start + size] in windows
        ]
        tokens = list(tokens_of(text)) if starts else []
        for size, start in starts:
            patterns = self.windows[size][coded[start : start + size]]
            if task := patterns.get(pattern(tokens[start : start + size])):
                yield tokens[start].line, task


def pattern(tokens: Sequence[Token]) -> tuple[int, ...]:
    """Returns for each variable which one it is, numbered as they come."""
    numbers: dict[str, int] = {}
    return tuple(
        numbers.setdefault(token.text, len(numbers)) for token in tokens if token.is_variable
    )


def tokens_of(text: str) -> Iterator[Token]:
    """Yields the tokens of any text."""
    line, position, before = 1, 0, ""
    for match in TOKEN.finditer(text):
        line += text.count("\n", position, match.start())
        position, word = match.start(), match[0]
        yield Token(word, line, is_variable(word, before))
        before = word


def is_variable(word: str, before: str) -> bool:
    """Returns True for a name that anybody may change; ``before`` is the token before it."""
    if word in KEPT or not (word[0].islower() or word[0] == "_" or word.isupper()):
        return False
    return before not in NAMES_FOLLOW


def find_leaks(tree: Path, solutions: Solutions) -> list[Leak]:
    """Looks through all files of a student's tree; returns one leak for each task and file."""
    leaks = []
    for path in sorted(tree.rglob("*")):
        if not path.is_file():
            continue
        name = str(path.relative_to(tree))
        if path.suffix in (".pyc", ".pyo"):
            leaks.append(Leak(name, 1, "", "compiled code"))
            continue
        text = readable(path)
        if marker := MARKER.search(text):
            leaks.append(Leak(name, text.count("\n", 0, marker.start()) + 1, "", A_MARKER))
        # A copy may have comments of its own, or stand in one.
        first: dict[str, int] = {}
        for variant in {text.replace("#", " "), COMMENT.sub("", text)}:
            for line, task in solutions.found_in(variant):
                first[task] = min(line, first.get(task, line))
        leaks += [
            Leak(name, line, task, f"a piece of {task}") for task, line in sorted(first.items())
        ]
    return leaks


def readable(path: Path) -> str:
    """Returns the text of a file; of a notebook that of its cells."""
    text = path.read_text(encoding="utf-8", errors="replace")
    if path.suffix == ".ipynb":
        return "\n".join("".join(cell["source"]) for cell in json.loads(text)["cells"])
    return text.replace("\\n", " ").replace('\\"', '"').replace("\\t", " ")
