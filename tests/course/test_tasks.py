"""The list of tasks against the exercises, their checks and the mistakes that checks find."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path

import pytest

from common.course.export import ROW, handout
from common.course.markers import solution_pieces
from common.course.tasks import COURSE, EXERCISES, read_tasks
from common.errors import UserError
from common.runtime.paths import project_root

ROOT = project_root()
TESTS = ROOT / "tests" / "exercises"
HIDDEN = TESTS / "hidden"
NAMED = re.compile(r"(?:test_a|\"A)(\d)[._](\d)")
GIVEN = {"__init__.py", "same_model.py"}


@pytest.fixture(autouse=True)
def _exercises_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(TESTS), str(HIDDEN), *sys.path])


def test_every_exercise_is_a_task_and_has_its_solution() -> None:
    tasks = read_tasks()
    files = {path.name for path in (ROOT / EXERCISES).glob("*.py")} - GIVEN
    assert {task.file for task in tasks.values()} == files
    for task in tasks.values():
        pieces = solution_pieces((ROOT / task.path).read_text(), task.file)
        assert {name for name, _ in pieces} == {task.name}


@pytest.mark.parametrize("assignment", range(5))
def test_a_handout_says_what_the_list_says(assignment: int) -> None:
    tasks = [task for task in read_tasks().values() if task.assignment == assignment]
    if any(task.omitted for task in tasks):
        pytest.skip("the handout that students get has other tasks than this one")
    path = ROOT / "assignments" / f"assignment{assignment}" / "README.md"
    text = path.read_text()
    pairs = zip(text.splitlines(), handout(text, ROOT, assignment).splitlines(), strict=True)
    wrong = [f"{path}: for {old!r} write {new!r}" for old, new in pairs if old != new]
    assert not wrong, "\n".join(wrong)  # what students get is right all the same
    missing = [task.name for task in tasks if task.heading not in text]
    assert not missing, f"{path}: no section of {', '.join(missing)}"
    rows = {name for name, _ in ROW.findall(text)}
    assert rows == {task.name for task in tasks}, f"{path}: the table of points"


def test_every_check_is_there() -> None:
    for task in read_tasks().values():
        for check in task.checks:
            file, _, name = check.partition("::")
            assert hasattr(importlib.import_module(file.removesuffix(".py")), name), check


def test_every_task_has_a_public_test() -> None:
    texts = [path.read_text() for path in (TESTS / "public").glob("*.py")]
    named = {f"A{one}.{two}" for text in texts for one, two in NAMED.findall(text)}
    assert named == set(read_tasks())


def test_every_task_has_three_mistakes_that_its_checks_find() -> None:
    mutants = [
        *importlib.import_module("mutants.ranks").RANKS,
        *importlib.import_module("mutants.numbers").NUMBERS,
    ]
    for task in read_tasks().values():
        own = [mutant for mutant in mutants if f"{mutant.exercise}.py" == task.file]
        assert len(own) >= 3, task.name
    assert len({mutant.name for mutant in mutants}) == len(mutants)


def write(folder: Path, text: str) -> Path:
    (folder / COURSE).parent.mkdir()
    (folder / COURSE).write_text(text)
    return folder


TASK = "{title: t, file: f.py, points: 2, hours: 1, checks: {a: 1, b: 1}"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("tasks: [", "no list of tasks"),
        ("other: 1", "no list of tasks"),
        (f"tasks: {{B1: {TASK}}}}}", "'B1' is no name of a task"),
        (f"tasks: {{A1.1: {TASK}, pionts: 3}}}}", "did you mean 'points'"),
        ("tasks: {A1.1: {title: t, points: 2}}", "no file, hours, checks"),
        (f"tasks: {{A1.1: {TASK.replace('b: 1', 'b: 2')}}}}}", "2 points, and its checks give 3"),
        (f"tasks: {{A1.1: {TASK}, needs: [A9.9]}}}}", "needs A9.9, which is no task"),
        (f"without: [A1.2]\ntasks: {{A1.1: {TASK}}}}}", "without: unknown task 'A1.2'"),
        (
            f"tasks: {{A1.1: {TASK}, needs: [A1.2]}}, A1.2: {TASK}}}}}",
            "needs A1.2, which comes after it",
        ),
    ],
)
def test_a_list_that_cannot_be_is_refused(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(UserError) as error:
        read_tasks(write(tmp_path, text))
    assert words in str(error.value)
    assert "course.yaml" in str(error.value)


def test_a_missing_list_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such file"):
        read_tasks(tmp_path)
