"""``ddplab course test``: how far a student has come, by the public tests.

A test that names what is not written yet is not run, and nothing is imported to learn that.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from common.course.outcomes import FAILED, PASSED, SKIPPED, Outcome, run_tests
from common.course.tasks import Task, read_tasks
from common.errors import NotYetWritten, UserError, unknown_name, unwritten_task

PUBLIC = Path("tests") / "exercises" / "public"
WORKER, ON_RANKS = "ranks_worker", "test_on_ranks"
"""The script that has checks on ranks, by their names in ``CHECKS``, and the test of each."""
PRELOADED = ("torch._dynamo", "torch.distributed", "common.runtime.group.process_group")
"""What the checks on ranks import, of what other tests' ranks take many seconds for."""
TASK = re.compile(r"(?:test_a(\d)_(\d)_|\[A(\d)\.(\d))")
"""A test says in its name, or as its parameter, which task it is of."""
WORDS = 160
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
    def checks(self) -> int:
        """Returns the number of all checks, public and hidden."""
        return len(self.outcomes) + len(self.task.checks)

    @property
    def unwritten(self) -> str:
        """Returns the task whose solution is missing, its own or one it builds on; or nothing."""
        return next(
            filter(None, (unwritten_task(outcome.message) for outcome in self.outcomes)), ""
        )

    @property
    def first_failure(self) -> str:
        """Returns why its first failing test fails, in a line; empty if none of what is written."""
        for outcome in self.outcomes:
            if outcome.outcome != PASSED and not unwritten_task(outcome.message):
                return f"{outcome.name}: {reason_of(outcome.message)}"
        return ""


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
    tests = list(public_tests(root))
    # Where no test is seen, pytest has to say why.
    files = {path.stem for path in (root / PUBLIC).glob("test_*.py")} - {t.file for t in tests}
    tests = [test for test in tests if wanted in ("", test.task)]
    unwritten = {test: why for test in tests if (why := missing_in(root, tasks, test))}
    outcomes = [Outcome(test.file, test.name, FAILED, why) for test, why in unwritten.items()]
    if files := sorted(files | {test.file for test in tests if test not in unwritten}):
        arguments = [f"{PUBLIC}/{file}.py" for file in files]
        arguments += [f"--deselect={PUBLIC}/{test.file}.py::{test.name}" for test in unwritten]
        arguments.append("--continue-on-collection-errors")
        if wanted:
            number = wanted[1:].replace(".", "_")
            arguments += ["-k", f"test_a{number} or {wanted}"]
        outcomes += run_tests(root, arguments, {"RANKS_PRELOADED": " ".join(PRELOADED)})
    rows = by_task(tasks, outcomes, wanted)
    failed = [outcome for outcome in outcomes if outcome.outcome == FAILED]
    not_loaded = next((outcome for outcome in failed if not TASK.search(outcome.name)), None)
    if not_loaded and not (wanted and rows[0].outcomes):
        where = not_loaded.name.rpartition(".")[2]
        raise UserError(f"{where} cannot be loaded: {reason_of(not_loaded.message)}")
    return rows


@dataclass(frozen=True)
class PublicTest:
    """A public test, by its text.

    Attributes:
        file: name of the test's file, without ``.py``.
        name: name of the test, as pytest has it.
        words: identifiers in it, and in the functions of its file that it uses.
    """

    file: str
    name: str
    words: frozenset[str]

    @property
    def task(self) -> str:
        """Returns the task that its name says; empty where it says none."""
        match = TASK.search(self.name)
        return "A{}.{}".format(*filter(None, match.groups())) if match else ""


def public_tests(root: Path) -> Iterator[PublicTest]:
    """Yields the public tests of a tree; of a file that is no Python none."""
    for path in sorted((root / PUBLIC).glob("*.py")):
        tree = parsed(path)
        parts = {node.name: node for node in tree.body if isinstance(node, DEFINITIONS)}
        for name, node in parts.items():
            if name.startswith("test_") and name != ON_RANKS:
                yield PublicTest(path.stem, name, identifiers_used(node, parts))
        for node in tree.body if path.stem == WORKER else ():
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
                for key, value in zip(node.value.keys, node.value.values, strict=True):
                    name = f"{ON_RANKS}[{key.value}]"
                    yield PublicTest("test_public_ranks", name, identifiers_used(value, parts))


DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def parsed(path: Path) -> ast.Module:
    """Returns the syntax tree of a file; an empty one for what is no Python, which pytest tells."""
    try:
        return ast.parse(path.read_text())
    except (OSError, SyntaxError, ValueError):
        return ast.Module([], [])


def identifiers_used(node: ast.AST, parts: Mapping[str, ast.AST]) -> frozenset[str]:
    """Returns the identifiers in a piece of a file, and in those of its ``parts`` that it names."""
    words: set[str] = set()
    waiting = [node]
    while waiting:
        more = set()
        for inner in ast.walk(waiting.pop()):
            more |= {
                getattr(inner, name)
                for name in ("id", "attr", "name")
                if isinstance(getattr(inner, name, None), str)
            }
        waiting += [parts[word] for word in more - words if word in parts]
        words |= more
    return frozenset(words)


def missing_in(root: Path, tasks: Mapping[str, Task], test: PublicTest) -> str:
    """Returns what is not written yet of what a test names, as its exception says it; or nothing.

    Its task's file may take something of another task's, which has to be written, too.
    """
    if test.task not in tasks:
        return ""
    task = tasks[test.task]
    taken = {
        alias.name
        for node in ast.walk(parsed(root / task.path))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("common.exercises")
        for alias in node.names
    }
    for name, words in ((task.name, test.words), *((needed, taken) for needed in task.needs)):
        for part in unwritten_parts(parsed(root / tasks[name].path)):
            if set(part) <= words:
                return f"{NotYetWritten(name)}: {'.'.join(part)}"
    return ""


def unwritten_parts(tree: ast.Module) -> Iterator[tuple[str, ...]]:
    """Yields the functions that raise ``NotYetWritten``: by name, a method behind its class.

    Of a class whose constructor or ``forward`` does, the class alone: it is of no use without.
    """
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            for method in node.body:
                if isinstance(method, DEFINITIONS) and is_unwritten(method):
                    is_all = method.name in ("__init__", "forward")
                    yield (node.name,) if is_all else (node.name, method.name)
        elif isinstance(node, DEFINITIONS) and is_unwritten(node):
            yield (node.name,)


def is_unwritten(node: ast.AST) -> bool:
    """Returns True for a function with ``raise NotYetWritten(…)`` in it."""
    return any(
        isinstance(inner, ast.Raise)
        and isinstance(inner.exc, ast.Call)
        and getattr(inner.exc.func, "id", "") == NotYetWritten.__name__
        for inner in ast.walk(node)
    )


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
    """Returns the line of a failure's message that says most: the last error, else the first.

    What an exercise raised in another process is told as if it had been raised here.
    """
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    kinds = "Error|Written|Raised|Ended"
    before = r"(E\s+)?(\|\s*)?"  # by pytest, and of one of several
    errors = [line for line in lines if re.match(rf"{before}(\w+\.)*\w*({kinds})\b", line)]
    reason = (errors or lines or ["no reason"])[-1 if errors else 0]
    reason = re.sub(rf"^{before}([a-z_]+\.)*(Raised: )?", "", reason)  # no module of the class
    return reason if len(reason) <= WORDS else f"{reason[: WORDS - 1]}…"


def lines_of(rows: Sequence[Progress]) -> list[str]:
    """Returns the table that a student reads, below it the first failure, and what is hidden."""
    width = max(len(row.task.title) for row in rows)
    lines = [f"{'task':<5} {'':<{width}} {'passed':>8} {'points':>9}"]
    for row in rows:
        tests, points = f"{row.passed} of {len(row.outcomes)}", f"up to {row.task.points}"
        state = ""
        if row.unwritten:
            state = "to be written" if row.unwritten == row.task.name else f"needs {row.unwritten}"
        lines.append(
            f"{row.task.name:<5} {row.task.title:<{width}} {tests:>8} {points:>9}  {state}".rstrip()
        )
    failing = next((row for row in rows if row.first_failure), None)
    if failing:
        lines += ["", f"{failing.task.path}", f"  {failing.first_failure}"]
    elif unwritten := [row for row in rows if row.unwritten == row.task.name]:
        lines += ["", f"Next: {unwritten[0].task.name}, in {unwritten[0].task.path}"]
    passed, public = sum(row.passed for row in rows), sum(len(row.outcomes) for row in rows)
    checks = sum(row.checks for row in rows)
    return [
        *lines,
        "",
        f"passed {passed} public check{'s' * (passed != 1)}; {public} of {checks} checks are here, "
        "the others are hidden, so no points are shown as earned",
    ]
