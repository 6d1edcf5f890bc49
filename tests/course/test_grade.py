"""Gradings of assignment 3, the shortest: reference, untouched exercises, and what goes wrong."""

from __future__ import annotations

import json
import logging
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
from right_answers import right_answers

from common.course import autograder
from common.course.answers import NUMBER, questions_path, read_questions
from common.course.grading.checks import FAULT, Exercises, why_refused
from common.course.grading.classes import Class
from common.course.grading.grade import Grader, marks_of, write_json
from common.course.grading.marks import Grade, Mark, read_key
from common.course.markers import student_source
from common.course.outcomes import Outcome, run_tests
from common.course.overlay import with_overlay
from common.course.sandbox.imports import violations
from common.course.sandbox.isolation import strongest_isolation
from common.course.submission import handed_in, pack
from common.course.tasks import read_tasks
from common.errors import UserError
from common.runtime.paths import project_root

ROOT = project_root()
RECORDED = ROOT / "data" / "epyc-2-cores" / "assignment3"
EVERY_TASK = read_tasks()
TASKS = {name: task for name, task in EVERY_TASK.items() if task.assignment == 3}

try:
    ISOLATION = strongest_isolation()
except UserError as refusal:
    pytest.skip(str(refusal), allow_module_level=True)


def submission(folder: Path, name: str, exercises: dict[str, str], answers: bytes) -> Path:
    of = handed_in(name, 3)
    files = {f"exercises/{file}": text.encode() for file, text in exercises.items()}
    for path in RECORDED.rglob("*.csv"):
        files[f"run/{path.relative_to(RECORDED)}"] = path.read_bytes()
    files["answers.yaml"] = answers
    path = folder / f"{of.stem}.tar.gz"
    pack(path, of, files)
    return path


def reference() -> dict[str, str]:
    return {task.file: (ROOT / task.path).read_text() for task in TASKS.values()}


def untouched() -> dict[str, str]:
    return {file: student_source(text, file, ()) for file, text in reference().items()}


@dataclass(frozen=True)
class GradedClass:
    """Two grades, and the folder of their files."""

    best: Grade
    other: Grade
    folder: Path

    def marks(self, task: str) -> list[Mark]:
        """Returns the second submission's marks of a task."""
        return [mark for mark in self.other.marks if mark.of == task]


SAID = "common.errors.RunFailed: the sandbox does not start"
CRASHES = f"""
    import os
    if mean == "samples":
        os._exit(0)
    raise RuntimeError({SAID!r})
"""


@pytest.fixture(scope="module")
def graded(tmp_path_factory: pytest.TempPathFactory) -> GradedClass:
    """Grades the references, and a tree in which A3.1 is as it was given, and A3.2 crashes."""
    folder = tmp_path_factory.mktemp("class")
    begin = "    # BEGIN SOLUTION A3.2\n"
    unwritten = TASKS["A3.1"].file
    files = reference() | {unwritten: untouched()[unwritten]}
    files["loss_scale.py"] = files["loss_scale.py"].replace(begin, f"{CRASHES}{begin}")
    paths = [
        submission(folder, "right-all", reference(), right_answers()),
        submission(folder, "wrong-twice", files, questions_path(ROOT, 3).read_bytes()),
    ]
    grades = Class(Grader(ROOT, variant=7), paths).grade(folder / "grades", lambda _: None)
    return GradedClass(*grades, folder / "grades")


@pytest.mark.slow
def test_the_reference_gets_all(graded: GradedClass) -> None:
    best = graded.best
    assert best.score == best.maximum, [mark for mark in best.marks if mark.score == 0]
    results = json.loads((graded.folder / "right-all-assign3.json").read_text())
    assert results["score"] == best.score
    assert results["extra_data"]["isolation"] == ISOLATION
    assert all(test["status"] == "passed" for test in results["tests"])


@pytest.mark.slow
def test_a_class_has_a_table_and_a_sheet_of_texts(graded: GradedClass) -> None:
    table = (graded.folder / "grades.csv").read_text().splitlines()
    assert "score,maximum,percent,not_judged,remark,A3.1,A3.2,A3.3,Q3.1" in table[0]
    assert len(table) == 3
    assert "Because." in (graded.folder / "reading.html").read_text()


@pytest.mark.slow
def test_what_is_not_written_gets_nothing(graded: GradedClass) -> None:
    assert len(graded.best.marks) == len(graded.other.marks)
    assert graded.other.maximum == graded.best.maximum  # before texts are read
    others = {mark.score for mark in graded.other.marks if mark.of not in ("A3.2", "A3.3")}
    assert others == {0, None}
    # What times an exercise is not judged everywhere.
    judged = [mark for mark in graded.marks("A3.1") if mark.score is not None]
    assert len(judged) >= len(TASKS["A3.1"].checks) - 1
    assert all("task A3.1 is not written yet" in mark.why for mark in judged)


@pytest.mark.slow
def test_a_crash_costs_the_points_of_its_task_alone(graded: GradedClass) -> None:
    assert all(mark.score == mark.points for mark in graded.marks("A3.3"))
    ended, _ = graded.marks("A3.2")
    assert (ended.score, ended.why) == (0.0, "Ended: its process has ended")


@pytest.mark.slow
def test_what_a_student_says_is_no_fault_of_the_grader(graded: GradedClass) -> None:
    _, said = graded.marks("A3.2")
    assert said.score == 0
    assert SAID in said.why


@pytest.mark.usefixtures("read_here")
def test_a_file_that_imports_what_it_may_not_is_not_run(tmp_path: Path) -> None:
    files = {"cost_fit.py": "import subprocess\n" + reference()["cost_fit.py"]}
    grade = Grader(ROOT).grade(submission(tmp_path, "wrong-import", files, right_answers()))
    [fit] = [mark for mark in grade.marks if mark.of == "A3.3"]
    assert fit.score == 0
    assert "line 1: it imports subprocess" in fit.why


GRADED_IN_CI = ("A2.1", "A2.2", "A2.3", *TASKS)
"""Tasks whose references are graded above, or in a hand-in of CI's course."""
OTHERS = [name for name in EVERY_TASK if name not in GRADED_IN_CI]


@pytest.mark.grading
@pytest.mark.timeout(600)
@pytest.mark.parametrize("half", [0, 1])
def test_references_get_all_in_the_sandbox(half: int) -> None:
    tasks = {name: EVERY_TASK[name] for name in OTHERS[half::2]}
    texts = {task.file: (ROOT / task.path).read_text() for task in EVERY_TASK.values()}
    assert why_refused(ROOT, tasks, texts) == {}
    marks = marks_of(tasks, Exercises(ROOT, tasks, texts, 3, ISOLATION).outcomes(500), {})
    assert len(marks) == sum(len(task.checks) for task in tasks.values())
    assert [mark for mark in marks if mark.score != mark.points] == []


@pytest.mark.grading
def test_untouched_exercises_get_nothing() -> None:
    tasks = {name: task for name, task in TASKS.items() if name != "A3.1"}  # which is graded above
    exercises = Exercises(ROOT, tasks, untouched(), 0, ISOLATION)
    marks = marks_of(tasks, exercises.outcomes(), {})
    assert {mark.score for mark in marks} == {0}
    assert {mark.of for mark in marks if "is not written yet" in mark.why} == set(tasks)


@pytest.mark.usefixtures("read_here")
def test_a_tarball_that_cannot_be_read_has_every_check(tmp_path: Path) -> None:
    path = submission(tmp_path, "cut-off", reference(), right_answers())
    path.write_bytes(path.read_bytes()[:5000])
    grade = Grader(ROOT).grade(path)
    assert grade.score == 0
    assert "cut off" in grade.remark
    checks = sum(len(task.checks) for task in TASKS.values())
    assert len(grade.marks) == checks + len(read_questions(ROOT, 3))


@pytest.fixture
def broken_root(tmp_path: Path) -> Iterator[Path]:
    """Yields the project with a key that breaks the grader where the first number is answered."""
    key = read_key(ROOT, 3)
    number = next(name for name, q in read_questions(ROOT, 3).items() if q.kind == NUMBER)
    del key[number]["number"]
    overlay = tmp_path / "overlay" / "assignments" / "assignment3"
    overlay.mkdir(parents=True)
    (overlay / "key.yaml").write_text(yaml.safe_dump(key, allow_unicode=True))
    with with_overlay(ROOT, tmp_path / "overlay") as merged:
        yield merged


@pytest.mark.usefixtures("read_here")
def test_a_fault_of_the_grader_is_one_submissions_and_no_zero(
    tmp_path: Path, broken_root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    blank = questions_path(ROOT, 3).read_bytes()
    paths = [submission(tmp_path, "a-first", {}, right_answers())]
    paths.append(submission(tmp_path, "b-second", {}, blank))
    said: list[str] = []
    with caplog.at_level(logging.ERROR):
        broken, other = Class(Grader(broken_root), paths).grade(tmp_path / "grades", said.append)
    assert broken.remark == "not graded: KeyError"
    assert {mark.score for mark in broken.marks} == {None}
    assert [mark.name for mark in broken.marks] == [mark.name for mark in other.marks]
    assert (other.remark, other.score) == ("", 0)
    assert "Traceback" in caplog.text
    assert [line.partition(":")[0] for line in said] == ["a-first-assign3", "b-second-assign3"]
    assert len((tmp_path / "grades" / "grades.csv").read_text().splitlines()) == 3
    found = json.loads((tmp_path / "grades" / "a-first-assign3.json").read_text())
    assert found["output"] == "not graded: KeyError"


def test_gradescope_gets_a_result_whatever_happens(
    tmp_path: Path, broken_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uploaded, results = tmp_path / "uploaded", tmp_path / "results.json"
    uploaded.mkdir()
    submission(uploaded, "a-first", {}, right_answers())

    def program(variant: str) -> list[str]:
        """Returns what Gradescope runs, from the module's name on."""
        given = (uploaded, results, "3", "0", variant, "visible")
        return ["common.course.autograder", *map(str, given)]

    def refused(words: str) -> None:
        found = json.loads(results.read_text())
        assert found == {"score": 0.0, "output": found["output"], "tests": []}
        assert words in found["output"]
        results.unlink()

    done = subprocess.run(
        [sys.executable, "-m", *program("7")],
        cwd=broken_root,
        env={"PYTHONPATH": str(broken_root)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    refused("KeyError")
    monkeypatch.setattr(sys, "argv", program("seven"))
    with pytest.raises(ValueError):
        autograder.main()
    refused("ValueError")
    shutil.rmtree(uploaded)
    monkeypatch.setattr(sys, "argv", program("7"))
    autograder.main()
    refused("uploaded: no file")


def test_a_sandbox_that_does_not_start_is_told_from_the_rest(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(
        "import pytest\nfrom common.errors import RunFailed\n"
        "from common.course.sandbox.wire import Raised\nWORDS = 'the sandbox does not start: x'\n"
        "@pytest.fixture\ndef broken():\n    raise RunFailed(WORDS)\n\n"
        "def test_fault_before(broken):\n    pass\n\n"
        "def test_fault():\n    raise RunFailed(WORDS)\n\n"
        "def test_raised():\n    raise Raised(f'common.errors.RunFailed: {WORDS}')\n\n"
        "def test_asserted():\n    said = WORDS\n    assert said == '', said\n"
    )
    found = run_tests(tmp_path, ["test_some.py"], {"PYTHONPATH": str(ROOT)})
    faults = [each.name for each in found if FAULT.match(each.message)]
    assert len(found) == 4
    assert faults == ["test_fault_before", "test_fault"]


def test_results_have_only_characters_that_there_are(tmp_path: Path) -> None:
    write_json(Grade("a-b-assign3", [], "", 0, "half of one: \udcff, ü"), tmp_path / "a.json")
    assert json.loads((tmp_path / "a.json").read_text())["output"] == "half of one: \udcff, ü"


def test_what_there_is_no_assignment_or_file_of(tmp_path: Path) -> None:
    unknown = tmp_path / "a-b-assign9.tar.gz"
    unknown.touch()
    with pytest.raises(UserError, match="there is no assignment 9"):
        Grader(ROOT).grade(unknown)
    with pytest.raises(UserError, match="no such file"):
        Grader(ROOT).grade(tmp_path / "c-d-assign3.tar.gz")


def test_a_check_needs_all_of_its_cases_and_one_that_was_skipped_is_not_judged() -> None:
    task = read_tasks()["A3.2"]
    one, other = (check.partition("::") for check in task.checks)

    def outcomes(*pairs: tuple[str, str]) -> list[Outcome]:
        return [Outcome(one[0].removesuffix(".py"), name, what) for name, what in pairs]

    cases = outcomes((f"{one[2]}[1]", "passed"), (f"{one[2]}[2]", "failed"), (other[2], "skipped"))
    scores = [mark.score for mark in marks_of({"A3.2": task}, cases, {})]
    assert scores == [0, None]
    assert [mark.score for mark in marks_of({"A3.2": task}, [], {})] == [0, 0]


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("import subprocess", "imports subprocess"),
        ("import common.perfmodel.model", "imports common.perfmodel.model"),
        ("from common.exercises.cap_search import fastest_cap", "imports common.exercises.cap"),
        ("from torch.nn.parallel import DistributedDataParallel", "not for exercises"),
        ("import torch\ntorch.nn.parallel.DistributedDataParallel", "not for exercises"),
        ("exec('1')", "exec is not for exercises"),
        ("().__class__.__base__.__subclasses__()", "__subclasses__ is not"),
        ("def f(:", "line 1: "),
        ("eval = eval", "eval is not for exercises"),
        ("def compile(text): ...\ncompile('1', '', 'exec')", "compile is not for exercises"),
        ("import os\nos.sys.modules['builtins'].eval('1')", "eval is not for exercises"),
        ("run = model.eval", "eval is not for exercises"),
        ("import os\nre = os.sys.modules['builtins']\nre.compile('1', '', 'exec')", "compile is"),
        ("import re\nre.compile = print", "compile is not for exercises"),
        ("def f(re):\n    return re.compile('1')", "compile is not for exercises"),
        (
            "from torch._C._distributed_c10d import Reducer\nclass Reducer: ...",
            "Reducer is not for exercises",
        ),
        ("import torch\nclass Reducer: ...\ntorch._C._distributed_c10d.Reducer", "Reducer is"),
        (
            "from torch.nn.parallel import *\nif 0:\n    DistributedDataParallel = 0\n"
            "DistributedDataParallel(0)",
            "DistributedDataParallel is not for exercises",
        ),
        (
            "import torch\nself = torch.nn.parallel\nDistributedDataParallel = 0\n"
            "self.DistributedDataParallel(0)",
            "line 4: DistributedDataParallel is not for exercises",
        ),
        ("torch.ops.aten._scaled_dot_product_flash_attention_for_cpu", "is not for exercises"),
        ("torch._flash_attention_forward", "is not for exercises"),
        ("from torch.nn.functional import scaled_dot_product_attention as a", "is not for"),
    ],
)
def test_what_an_exercise_may_not_use(source: str, words: str) -> None:
    [found, *_] = violations(source, "import torch", ["bucket_assignment"])
    assert words in found


@pytest.mark.parametrize(
    "source",
    [
        "model.eval()",
        "import re\nre.compile('[a-z]')",
        "class Model:\n    def eval(self):\n        return super().eval()",
        "class Reducer: ...\nReducer()",
        "def replicate(model): ...\nreplicate(1)",
        "def fill(replicate=True):\n    return replicate",
        "class Ring:\n    def replicate(self): ...\n    def run(self):\n        self.replicate()",
        "def flash_attention_tile(query): ...\nflash_attention_tile(1)",
        "from common.exercises.bucket_assignment import replicate\nreplicate(1)",
    ],
)
def test_names_that_mean_something_else(source: str) -> None:
    assert violations(source, "import torch", ["bucket_assignment"]) == []


def test_references_use_only_what_exercises_may() -> None:
    tasks = read_tasks()
    given = ["same_model"]
    for task in tasks.values():
        text = (ROOT / task.path).read_text()
        others = given + [tasks[needed].file.removesuffix(".py") for needed in task.needs]
        assert violations(text, text, others) == [], task.name


def test_an_overlay_takes_the_projects_place(tmp_path: Path) -> None:
    overlay = tmp_path / "overlay"
    (overlay / "assignments" / "assignment3").mkdir(parents=True)
    (overlay / "assignments" / "assignment3" / "key.yaml").write_text("Q3.1: {number: x}\n")
    with with_overlay(ROOT, overlay) as merged:
        assert read_key(merged, 3) == {"Q3.1": {"number": "x"}}
        assert read_key(merged, 2) == read_key(ROOT, 2)
        assert read_tasks(merged) == read_tasks(ROOT)
    assert not merged.exists()
    with pytest.raises(UserError, match="expected a folder"), with_overlay(ROOT, tmp_path / "no"):
        pass


@pytest.fixture
def overlay_of_a_repository(tmp_path: Path) -> Path:
    """Makes an overlay as a course's private repository looks like after its tests were run."""
    overlay = tmp_path / "overlay"
    for name in (
        "README.md",
        ".git/HEAD",
        "tests/exercises/hidden/extra.py",
        "tests/exercises/hidden/__pycache__/extra.pyc",
    ):
        (overlay / name).parent.mkdir(parents=True, exist_ok=True)
        (overlay / name).write_text("theirs")
    return overlay


def test_an_overlays_own_files_do_not_reach_the_project(overlay_of_a_repository: Path) -> None:
    before = (ROOT / "README.md").read_bytes()
    with with_overlay(ROOT, overlay_of_a_repository) as merged:
        assert (merged / "README.md").read_bytes() == before
    assert (ROOT / "README.md").read_bytes() == before


def test_a_bundle_takes_of_an_overlay_what_grades(
    overlay_of_a_repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = subprocess.run(["git", "ls-files", "tests"], cwd=ROOT, capture_output=True, text=True)
    monkeypatch.setattr(autograder, "tracked_files", lambda root: listed.stdout.splitlines())
    out = tmp_path / "autograder.zip"
    autograder.bundle(ROOT, out, (3, 0), 0, overlay_of_a_repository)
    with zipfile.ZipFile(out) as archive:
        names = archive.namelist()
        assert archive.read("project/tests/exercises/hidden/extra.py") == b"theirs"
    assert not [name for name in names if "__pycache__" in name or "/.git/" in name]
