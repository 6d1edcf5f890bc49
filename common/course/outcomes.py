"""Outcomes of tests: pytest runs in a process of its own, and its JUnit file is read."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from xml.etree import ElementTree

from common.errors import RunFailed, UserError
from common.runtime.processes.child import run_child

PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"
OUTCOMES = {"failure": FAILED, "error": FAILED, "skipped": SKIPPED}


@dataclass(frozen=True)
class Outcome:
    """The outcome of a test.

    Attributes:
        file: the test's file, without its folders and ``.py``.
        name: name of the test, with its parameters in brackets.
        outcome: passed, failed or skipped.
        message: message of the test's error; empty where it passed.
    """

    file: str
    name: str
    outcome: str
    message: str = ""


def run_tests(
    folder: Path,
    arguments: Sequence[str],
    variables: Mapping[str, str] | None = None,
    *,
    log: Path | None = None,
    on_output: Callable[[str], None] = lambda line: None,
    timeout_s: float | None = None,
) -> list[Outcome]:
    """Runs pytest in ``folder`` with these arguments, and variables of its environment.

    What it prints goes line by line to ``on_output``, its standard error to ``log``. After
    ``timeout_s`` it is ended, and comes to no result.

    Raises:
        UserError: pytest is not installed.
        RunFailed: it did not come to a result.
    """
    if importlib.util.find_spec("pytest") is None:
        raise UserError("pytest is not installed; uv sync installs it")
    output = []

    def note(line: str) -> None:
        output.append(line)
        on_output(line)

    with TemporaryDirectory() as scratch:
        results, errors = Path(scratch) / "results.xml", log or Path(scratch) / "log"
        flags = ["-p", "no:cacheprovider", "-n", "0", f"--junitxml={results}"]
        ended = run_child(
            "pytest",
            [*flags, *arguments],
            errors,
            note,
            folder=folder,
            environment=own_variables()
            | {"PYTHONPATH": str(folder.absolute())}
            | dict(variables or {}),
            timeout_s=timeout_s,
        )
        if ended.timeout_s is not None:
            raise RunFailed(f"pytest in {folder}: {ended.reason}")
        if not results.is_file():
            lines = (
                errors.read_text(errors="replace") or "\n".join(output)
            ).strip().splitlines() or ["no word"]
            # Of a wrong option it says the root and the settings' file last.
            reason = next((line for line in lines if " error: " in line), lines[-1])
            raise RunFailed(f"pytest in {folder}: {reason.strip()}")
        return read_outcomes(results)


def own_variables() -> dict[str, str]:
    """Returns this process's variables without those of a pytest that it may be running in."""
    prefixes = ("PYTEST_", "GUARD_", "TEST_DURATIONS")
    return {name: value for name, value in os.environ.items() if not name.startswith(prefixes)}


def read_outcomes(path: Path) -> list[Outcome]:
    """Reads a JUnit file, in the order of the tests."""
    outcomes = []
    for case in ElementTree.parse(path).iter("testcase"):
        problem = next((child for child in case if child.tag in OUTCOMES), None)
        file = case.get("classname", "").rpartition(".")[2]
        if problem is None:
            outcomes.append(Outcome(file, case.get("name", ""), PASSED))
        else:
            text = f"{problem.get('message') or ''}\n{problem.text or ''}"
            outcomes.append(
                Outcome(file, case.get("name", ""), OUTCOMES[problem.tag], text.strip())
            )
    return outcomes
