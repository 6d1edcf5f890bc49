"""Every wrong solution fails the check that it is meant for; those that take long, in a sandbox.

All but the first of each exercise are marked ``slow``. Forgeries are tried as they are graded.
"""

from __future__ import annotations

import importlib
import inspect
import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from mutants.mutant import Mutant
from mutants.numbers import NUMBERS
from mutants.ranks import RANKS
from own_processes import OwnProcesses

from common.course.grading.checks import TIMED
from common.course.sandbox import exchange
from common.course.sandbox.sandbox import Sandbox
from common.course.sandbox.student import Student, lay_out_student
from common.runtime.paths import project_root

HIDDEN = Path(__file__).with_name("hidden")
PROBES = HIDDEN / "probes"
MUTANTS = (*NUMBERS, *RANKS)
ANSWER_S = 4.0
"""Longest time to a wrong solution's answer; right ones take a hundredth of it."""


def marked_cases() -> Iterator:
    """Yields the mutants; those beyond the first of their exercise are marked ``slow``.

    What is timed has a network with a limit, which a sandbox alone has.
    """
    known: set[str] = set()
    for mutant in MUTANTS:
        mark = pytest.mark.grading if mutant.check in TIMED else pytest.mark.slow
        marks = [mark] if mutant.exercise in known else []
        known.add(mutant.exercise)
        yield pytest.param(mutant, id=mutant.name, marks=marks)


@pytest.fixture
def processes(
    processes: Sandbox | OwnProcesses, monkeypatch: pytest.MonkeyPatch
) -> Sandbox | OwnProcesses:
    """Returns where a student's processes are started; nobody waits as long for them as usual."""
    monkeypatch.setattr(processes, "answer_s", ANSWER_S, raising=False)
    monkeypatch.setattr(exchange, "LONGEST_S", ANSWER_S / 2)
    return processes


@pytest.fixture
def below(processes: Sandbox | OwnProcesses, mutant: Mutant) -> str:
    """Lays out a part of the processes' folder that has the mistake."""
    part = f"mutant-{MUTANTS.index(mutant)}"

    def text(path: Path) -> str:
        return mutant.source() if path.stem == mutant.exercise else path.read_text()

    lay_out_student(processes.folder, project_root(), part, PROBES, text)
    return part


@pytest.mark.two_ranks
@pytest.mark.parametrize("mutant", [*marked_cases()])
def test_a_mistake_is_found(
    mutant: Mutant,
    student: Student,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    monkeypatch.setattr(sys, "path", [str(HIDDEN), *sys.path])
    found = failure_of(mutant.check, student, request, monkeypatch)
    for not_found in ("SyntaxError", "NameError", "ImportError"):  # by Python, not by the check
        assert not_found not in found


def failure_of(
    check: str, student: Student, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> str:
    """Returns what a check says of the first of its cases that fails; raises if all pass."""
    file, _, name = check.partition("::")
    function = getattr(importlib.import_module(file.removesuffix(".py")), name)
    times = 4 if hasattr(function, "hypothesis") else 1  # as many examples as students get
    for case in [*cases_of(function)] * times:
        student.afresh()
        try:
            function(**case, **fixtures(function, student, request, monkeypatch, case))
        except (Exception, pytest.fail.Exception) as error:
            return str(error)
    raise AssertionError("it passes")


def cases_of(check: Callable) -> Iterator[dict]:
    """Yields the arguments of each case of a parametrized check."""
    axes = []
    for mark in getattr(check, "pytestmark", []):
        if mark.name == "parametrize":
            names = [name.strip() for name in mark.args[0].split(",")]
            values = [getattr(value, "values", (value,))[0] for value in mark.args[1]]
            axes.append([{names[0]: value} for value in values])
    for chosen in itertools.product(*axes):
        yield {name: value for one in chosen for name, value in one.items()}


def fixtures(
    check: Callable, student: Student, request: pytest.FixtureRequest, monkeypatch, case: dict
) -> dict:
    """Makes what the check asks for besides its case."""
    scratch = f"{student.sandbox.scratch_inside}/checkpoints"
    makers = {
        "student": lambda: student,
        "reference": lambda: request.getfixturevalue("reference"),
        "on_ranks": lambda: student.on_ranks,
        "variant": lambda: 0,
        "every": lambda: 1,
        "generator": lambda: np.random.default_rng(0),
        "monkeypatch": lambda: monkeypatch,
        "folder": lambda: scratch,
        "theirs": lambda: student.probe("checkpoints"),
        "ours": lambda: student.onlooker().module("probe checkpoints"),
    }
    drawn = getattr(getattr(check, "hypothesis", None), "inner_test", check)
    wanted = [name for name in inspect.signature(drawn).parameters if name in makers]
    return {name: makers[name]() for name in wanted if name not in case}
