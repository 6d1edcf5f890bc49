"""Outcomes of checks are kept by what decides them, and nothing runs beside what is timed."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from common.course.grading import checks
from common.course.grading.checks import PART, TIMED, Exercises
from common.course.grading.classes import Class
from common.course.grading.grade import Grader
from common.course.outcomes import Outcome, run_tests
from common.course.sandbox.isolation import strongest_isolation
from common.course.studies.grading import GradingStudy, mutants, run_study
from common.course.submission import handed_in, pack
from common.course.tasks import read_tasks
from common.errors import RunFailed, UserError
from common.runtime.paths import project_root
from common.runtime.processes.child import run_child
from common.runtime.stage_progress import StageProgress

ROOT = project_root()
TASKS = {name: task for name, task in read_tasks().items() if task.assignment == 3}
CHECKS = {check for task in TASKS.values() for check in task.checks}

try:
    strongest_isolation()
except UserError as refusal:
    pytest.skip(str(refusal), allow_module_level=True)


class StandIn:
    """Stands in for pytest: notes what is run, and when."""

    def __init__(self) -> None:
        self.runs: list[set[str]] = []
        self.beside: list[tuple[set[str], int]] = []
        self.running, self.lock = 0, threading.Lock()

    def __call__(
        self, root: Path, arguments: Sequence[str], variables: Mapping, **_: object
    ) -> list[Outcome]:
        run = {a.rpartition("/")[2] for a in arguments if "::" in a}
        with self.lock:
            self.running += 1
            self.runs.append(run)
        time.sleep(0.2)
        with self.lock:
            self.beside.append((run, self.running))
            self.running -= 1
        return [Outcome(c.partition(".py")[0], c.partition("::")[2], "passed") for c in run]


@pytest.fixture
def tests(monkeypatch: pytest.MonkeyPatch, read_here: None) -> StandIn:
    stand_in = StandIn()
    monkeypatch.setattr(checks, "run_tests", stand_in)
    return stand_in


def reference(folder: Path, name: str, more: str = "") -> Path:
    of = handed_in(name, 3)
    path = folder / f"{of.stem}.tar.gz"
    texts = {f"exercises/{t.file}": (ROOT / t.path).read_text() + more for t in TASKS.values()}
    pack(path, of, {file: text.encode() for file, text in texts.items()})
    return path


def test_every_timed_check_is_a_check_of_the_course() -> None:
    assert set(TIMED) <= {check for task in read_tasks().values() for check in task.checks}


def test_what_did_not_change_is_not_run_again(tmp_path: Path, tests: StandIn) -> None:
    path = reference(tmp_path, "a")

    def grade(*paths: Path, variant: int = 0, folder: str = "grades") -> float:
        grader = Grader(ROOT, variant)
        [grade, *_] = Class(grader, paths).grade(tmp_path / folder, lambda _: None)
        return grade.score

    assert grade(path) == sum(task.points for task in TASKS.values())
    assert tests.runs == [CHECKS]
    assert grade(path) == grade(reference(tmp_path, "b"))  # another name, the same code
    assert tests.runs == [CHECKS]
    grade(reference(tmp_path, "c", "# changed\n"))
    assert tests.runs == [CHECKS] * 2
    grade(path, variant=1, folder="other")
    assert tests.runs == [CHECKS] * 3


def test_a_check_that_was_not_begun_is_run_again(
    tmp_path: Path, tests: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    late = "test_models.py::test_a_planted_cost_is_found_and_noise_makes_none_negative"

    def slow(*arguments: object, **_: object) -> list[Outcome]:
        said = 'failed on setup with "Failed: no time is left"'
        outcomes = {f"{o.file}.py::{o.name}": o for o in tests(*arguments)}
        return [
            replace(o, outcome="failed", message=said) if c == late else o
            for c, o in outcomes.items()
        ]

    path, folder = reference(tmp_path, "a"), tmp_path / "grades"
    monkeypatch.setattr(checks, "run_tests", slow)
    [grade] = Class(Grader(ROOT), [path]).grade(folder, lambda _: None)
    assert grade.remark == "1 check had not begun after 330 s"
    assert grade.remark in (folder / "grades.csv").read_text()
    monkeypatch.setattr(checks, "run_tests", tests)
    [grade] = Class(Grader(ROOT), [path]).grade(folder, lambda _: None)
    assert (grade.score, grade.remark) == (sum(task.points for task in TASKS.values()), "")
    assert tests.runs == [CHECKS, {late}]


def test_changed_tests_are_run_again(tmp_path: Path) -> None:
    root = tmp_path / "project"
    (root / "tests" / "exercises" / "hidden").mkdir(parents=True)
    files = set()
    for text in ("a", "b"):
        (root / "tests" / "exercises" / "hidden" / "test_x.py").write_text(text)
        checks.deciding_files.cache_clear()
        files.add(Exercises(root, TASKS, {}, 0, "namespaces", tmp_path).file())
    assert len(files) == 2


def test_a_damaged_cache_is_none(tmp_path: Path, tests: StandIn) -> None:
    path, folder = reference(tmp_path, "a"), tmp_path / "grades"
    Class(Grader(ROOT), [path]).grade(folder, lambda _: None)
    [kept] = (folder / ".checks").iterdir()
    for damaged in ("{", "[]", '{"x": [1]}'):
        kept.write_text(damaged)
        Class(Grader(ROOT), [path]).grade(folder, lambda _: None)
    assert tests.runs == [CHECKS] * 4


def test_nothing_runs_beside_a_timed_check(tmp_path: Path, tests: StandIn) -> None:
    paths = [reference(tmp_path, name, f"# {name}\n") for name in "abcd"]
    grades = Class(Grader(ROOT), paths, jobs=2).grade(tmp_path / "grades", lambda _: None)
    assert {grade.score for grade in grades} == {sum(task.points for task in TASKS.values())}
    assert sum(beside for run, beside in tests.beside if run & set(TIMED)) == len(paths)
    assert max(beside for _, beside in tests.beside) == 2
    assert sum(len(run) for run in tests.runs) == len(paths) * len(CHECKS)


def test_a_check_that_fails_beside_another_grading_is_run_again_alone(
    tmp_path: Path, tests: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    crowded = sorted(CHECKS - set(TIMED))[0]

    def busy(root: Path, arguments: Sequence[str], *more: object, **_: object) -> list[Outcome]:
        beside = not any(a.endswith(TIMED) for a in arguments)  # the first of the two gradings
        return [
            replace(o, outcome="failed", message="no answer after 20 s")
            if beside and f"{o.file}.py::{o.name}" == crowded
            else o
            for o in tests(root, arguments, *more)
        ]

    monkeypatch.setattr(checks, "run_tests", busy)
    paths = [reference(tmp_path, name, f"# {name}\n") for name in "ab"]
    grades = Class(Grader(ROOT), paths, jobs=2).grade(tmp_path / "grades", lambda _: None)
    assert {grade.score for grade in grades} == {sum(task.points for task in TASKS.values())}
    # On a busy machine one of the two has failed at once, once, and was then run alone only.
    assert len(paths) < sum(crowded in run for run in tests.runs) <= 2 * len(paths)


def test_a_check_that_pytest_does_not_reach_is_no_zero(
    tmp_path: Path, tests: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, folder = reference(tmp_path, "a"), tmp_path / "grades"
    fault = Outcome("", "tests.exercises.hidden.test_models", "failed", "collection failure\nE   x")

    def lost(*arguments: object, **_: object) -> list[Outcome]:
        return [fault, *(o for o in tests(*arguments) if o.file != "test_models")]

    monkeypatch.setattr(checks, "run_tests", lost)
    [grade] = Class(Grader(ROOT), [path]).grade(folder, lambda _: None)
    assert {mark.score for mark in grade.marks} == {None}
    assert grade.remark.startswith("not graded: tests/exercises/hidden/test_models.py::")
    assert not list((folder / ".checks").glob("*"))


def test_ctrl_c_ends_gradings_that_run_at_once(
    tmp_path: Path, tests: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = threading.Event()

    def endless(*_: object, **__: object) -> list[Outcome]:
        log = tmp_path / f"log-{threading.get_ident()}"
        lines = ["-n", "1", "-r", "1", "import time; print('asleep'); time.sleep(600)"]
        run_child("timeit", lines, log, lambda _: begun.set())
        raise RunFailed("it was ended")

    def interrupt() -> None:
        begun.wait()
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    monkeypatch.setattr(checks, "run_tests", endless)
    paths = [reference(tmp_path, name, f"# {name}\n") for name in "abc"]
    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        Class(Grader(ROOT), paths, jobs=2).grade(tmp_path / "grades", lambda _: None)
    assert not (tmp_path / "grades").exists()


def test_where_the_grader_breaks_an_earlier_result_stays(
    tmp_path: Path, tests: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, folder = reference(tmp_path, "a"), tmp_path / "grades"
    Class(Grader(ROOT), [path]).grade(folder, lambda _: None)
    before = (folder / "grades.csv").read_text().splitlines()[1]

    def broken(*_: object, **__: object) -> list[Outcome]:
        raise RunFailed("the sandbox does not start")

    monkeypatch.setattr(checks, "run_tests", broken)
    later = reference(tmp_path, "a", "# later\n")
    [grade] = Class(Grader(ROOT), [later]).grade(folder, lambda _: None)
    assert grade.remark == "not graded: the sandbox does not start"
    after = (folder / "grades.csv").read_text().splitlines()[1]
    assert after.replace("not graded: the sandbox does not start", "") == before


def test_a_study_that_goes_on_with_a_run_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such run directory"):
        GradingStudy(only=("class",), continues=str(tmp_path / "gone"))


def is_of(outcome: Outcome, checks: Collection[str]) -> bool:
    """Returns True for an outcome of one of the checks, given as file and name."""
    return f"{outcome.file}.py::{outcome.name}" in checks


@pytest.mark.grading
@pytest.mark.timeout(300)
def test_a_class_of_every_kind_loses_nothing(
    tmp_path: Path, tests: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All but the first wrong solution, which pytest itself runs, are judged by their texts."""
    real: list[list[Outcome]] = []

    def judged(
        root: Path, arguments: Sequence[str], variables: Mapping, **keywords: object
    ) -> list[Outcome]:
        code = Path(json.loads(variables["DDPLAB_GRADED"])["folder"], PART, "common", "exercises")
        texts = {path.stem: path.read_text() for path in code.glob("*.py")}
        lost = {m.check for m in mutants() if texts[m.exercise].startswith(m.source())}
        asked = {argument.rpartition("/")[2] for argument in arguments if "::" in argument}
        if lost & asked and not real:
            kept = [a for a in arguments if "::" not in a or a.rpartition("/")[2] in lost]
            real.append(run_tests(root, kept, variables, **keywords))
            failed = real[0]
        else:
            every = tests(root, arguments, variables)
            failed = [replace(o, outcome="failed") for o in every if is_of(o, lost)]
        others = [o for o in tests(root, arguments, variables) if not is_of(o, lost)]
        return [*failed, *others]

    monkeypatch.setattr(checks, "run_tests", judged)
    study = GradingStudy(only=("right", "wrong", "regraded", "hostile", "late"))
    path = run_study(study, str(tmp_path), StageProgress())
    assert any(o.outcome == "failed" for o in real[0])
    rows = pd.read_csv(path / "class.csv")
    assert rows["as_it_must_be"].all(), rows.to_string()
    steps = pd.read_csv(path / "class-steps.csv")
    assert steps["lost_rows"].sum() == steps["lost_levels"].sum() == 0
    assert steps["changed_rows"].tolist() == [0, 3, 0, 1, 0]  # three had texts to read
