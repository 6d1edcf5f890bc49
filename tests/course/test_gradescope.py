"""What Gradescope gets: a fixed number of points, who sees what, and a bundle that installs."""

from __future__ import annotations

import json
import re
import subprocess
import tomllib
import zipfile
from pathlib import Path

import jsonschema
import pytest

from common.course import autograder
from common.course.answers import TEXT
from common.course.autograder import (
    all_questions,
    locked_versions,
    points_by_hand_in,
    refusal,
    results_of,
    uploaded,
)
from common.course.grading.grade import Grader
from common.course.grading.marks import Grade, Mark
from common.course.submission import HandedIn, pack
from common.course.tasks import COURSE, read_tasks
from common.errors import UserError
from common.runtime.paths import project_root

ROOT = project_root()
FAILED = "Scalars are not close"
FROM_TABLES = "200 ms; your tables say 210"
# https://gradescope-autograders.readthedocs.io/en/latest/specs/#output-format
STATUS = {"enum": ["passed", "failed"]}
VISIBILITY = {"enum": ["hidden", "after_due_date", "after_published", "visible"]}
FORMAT = {"enum": ["text", "html", "simple_format", "md", "ansi"]}
SCHEMA = {
    "type": "object",
    "anyOf": [{"required": ["score"]}, {"required": ["tests"]}],
    "additionalProperties": False,
    "properties": {
        "score": {"type": "number", "minimum": 0},
        "execution_time": {"type": "number"},
        "output": {"type": "string"},
        "output_format": FORMAT,
        "test_output_format": FORMAT,
        "test_name_format": FORMAT,
        "visibility": VISIBILITY,
        "stdout_visibility": VISIBILITY,
        "extra_data": {"type": "object"},
        "leaderboard": {"type": "array"},
        "tests": {
            "type": "array",
            "items": {
                "type": "object",
                "additionalProperties": False,
                "properties": {
                    "score": {"type": "number"},
                    "max_score": {"type": "number"},
                    "status": STATUS,
                    "name": {"type": "string"},
                    "name_format": FORMAT,
                    "number": {"type": "string"},
                    "output": {"type": "string"},
                    "output_format": FORMAT,
                    "tags": {"type": "array", "items": {"type": "string"}},
                    "visibility": VISIBILITY,
                    "extra_data": {"type": "object"},
                },
            },
        },
    },
}


def marks(*, timed: float | None = 5.0) -> list[Mark]:
    return [
        Mark("A2.1", "buckets", 10, 10.0),
        Mark("A2.2", "time", 20, 0.0, "bucket_time.py, line 3: it imports subprocess"),
        Mark("A2.3", "search", 10, 0.0, "task A2.3 is not written yet"),
        Mark("A2.4", "twin", 20, 10.0, FAILED),
        Mark("A2.4", "speed", 5, timed, "" if timed else "not timed here"),
        Mark("Q2.2", "a number", 3, 0.0, FROM_TABLES),
        Mark("Q2.3", "a number", 2, 0.0, "no answer"),
        Mark("Q2.1", "a text", 4, None, "somebody has to read it"),
        Mark("Q2.4", "a blank text", 4, 0.0, "no answer"),
    ]


def results(wanted: list[Mark], visibility: str = "after_published") -> dict:
    made = results_of(Grade("doe-jane-assign2", wanted, "namespaces", 7), ROOT, visibility)
    jsonschema.validate(json.loads(json.dumps(made)), SCHEMA)
    return made


def test_the_score_is_of_fixed_points_and_texts_are_no_part_of_it() -> None:
    made = results(marks())
    assert made["score"] == 25
    assert made["extra_data"]["maximum"] == 70
    assert [test["max_score"] for test in made["tests"][-2:]] == [0, 0]


def test_what_was_not_judged_neither_costs_nor_gives_points() -> None:
    made = results(marks(timed=None))
    assert made["score"] == pytest.approx(20 * 70 / 65, abs=0.005)
    assert made["extra_data"]["maximum"] == 70
    assert "5 of 70 points could not be judged" in made["output"]
    full = [Mark(m.of, m.name, m.points, m.score and float(m.points)) for m in marks(timed=None)]
    full = [m if m.score != 0 else Mark(m.of, m.name, m.points, float(m.points)) for m in full]
    assert results(full)["score"] == 70
    assert results([Mark("A2.1", "buckets", 10, None)])["score"] == 0


def test_a_bonus_comes_on_top() -> None:
    made = results([Mark("A0.1", "bytes", 25, 25.0), Mark("A0.4", "tiles", 10, 4.0)])
    assert (made["score"], made["extra_data"]["maximum"]) == (29, 25)


@pytest.mark.parametrize("visibility", ["after_published", "hidden"])
def test_students_see_at_once_what_was_handed_in_and_nothing_of_the_checks(
    visibility: str,
) -> None:
    seen, *checks = results(marks(), visibility)["tests"]
    assert {check["visibility"] for check in checks} == {visibility}
    assert seen["visibility"] == "visible"
    assert seen["output"].splitlines() == [
        "A2.1: its checks were run",
        "A2.2: bucket_time.py, line 3: it imports subprocess",
        "A2.3: task A2.3 is not written yet",
        "A2.4: its checks were run",
        "answers: read",
        "without an answer: Q2.3, Q2.4",
    ]
    one_check = results([Mark("A3.3", "fit", 15, 0.0, FAILED)], visibility)["tests"][0]
    assert FAILED not in one_check["output"]


def test_answers_that_cannot_be_read_say_so_at_once() -> None:
    wrong = [Mark(f"Q2.{n}", "a number", 2, 0.0, "answers.yaml:3: no YAML") for n in (2, 3)]
    assert "answers: answers.yaml:3: no YAML" in results(wrong)["tests"][0]["output"]
    jsonschema.validate(refusal("no whole tarball"), SCHEMA)


def test_points_to_set_are_those_of_tasks_and_questions() -> None:
    rows = points_by_hand_in(ROOT)
    assert list(rows) == [(0, 0), (1, 1), (1, 2), (2, 0), (3, 0), (4, 0)]
    tasks = sum(task.points for task in read_tasks().values() if not task.bonus)
    questions = all_questions(ROOT).values()
    assert sum(points + hand for points, hand in rows.values()) == tasks + sum(
        question.points for question in questions
    )
    texts = [q.points for q in questions if q.kind == TEXT and q.name.startswith("Q1.")]
    assert [rows[1, 1][1], rows[1, 2][1]] == [0, sum(texts)]


@pytest.mark.parametrize("name", ["homework (1).TAR.GZ", "handin/doe.tar", "a.TGZ", "文件"])
def test_what_was_uploaded_is_the_tarball_whatever_it_is_called(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "uploaded"
    (folder / name).parent.mkdir(parents=True)
    (folder / name).touch()
    (folder / "._of a Mac").touch()
    assert uploaded(folder) == folder / name
    (folder / "b.tar.gz").touch()
    if name != "文件":
        with pytest.raises(UserError, match=r"uploaded: .*b\.tar\.gz.*; expected one tarball"):
            uploaded(folder)


def test_a_hand_in_of_another_assignment_gets_nothing(tmp_path: Path) -> None:
    path = tmp_path / "doe-jane-assign2.tar.gz"
    pack(path, HandedIn("doe-jane", 2), {})
    with pytest.raises(UserError, match="it is of assignment 2, not assignment 1, part 1"):
        Grader(ROOT).grade(path, (1, 1))


@pytest.mark.parametrize(
    ("of", "words"),
    [((7, 0), "--assignment 7: one of 0, 1, 2"), ((1, 0), "in two parts"), ((2, 1), "no part 1")],
)
def test_a_bundle_of_what_there_is_not(tmp_path: Path, of: tuple[int, int], words: str) -> None:
    with pytest.raises(UserError, match=words):
        autograder.bundle(ROOT, tmp_path / "autograder.zip", of, 0)
    assert list(tmp_path.iterdir()) == []


def test_a_bundle_has_its_own_python_versions_and_course(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(autograder, "tracked_files", lambda root: [str(COURSE)])
    out = tmp_path / "autograder.zip"
    autograder.bundle(ROOT, out, (1, 2), 7, without=["A2.3"], visibility="hidden")
    with zipfile.ZipFile(out) as archive:
        texts = {name: archive.read(name).decode() for name in archive.namelist()}
    assert texts["run_autograder"].endswith(" 1 2 7 hidden\n")
    setup = texts["setup.sh"]
    assert "--managed-python --python 3.11" in setup
    assert "--torch-backend=cpu" in setup
    assert "project/constraints.txt" in texts
    assert not re.findall(r"\{\w+\}", setup + texts["run_autograder"])
    assert subprocess.run(["bash", "-n"], input=setup, text=True).returncode == 0
    (tmp_path / COURSE).parent.mkdir()
    (tmp_path / COURSE).write_text(texts[f"project/{COURSE}"])
    omitted = {name for name, task in read_tasks(tmp_path).items() if task.omitted}
    assert omitted == {"A2.3"}


def test_versions_are_those_of_the_lock() -> None:
    lock = tomllib.loads((ROOT / "uv.lock").read_text())
    locked = {(package["name"], package.get("version")) for package in lock["package"]}
    lines = locked_versions(ROOT).decode().splitlines()
    pinned = {tuple(re.match(r"([\w.-]+)==([^ ;]+)", line).groups()) for line in lines}
    assert pinned <= locked
    assert {name for name, _ in pinned} >= {"torch", "numpy", "pytest", "hypothesis", "psutil"}


@pytest.mark.parametrize("graded", [marks(), []])
def test_results_are_what_gradescope_reads(graded: list[Mark]) -> None:
    made = Grade("doe-jane-assign2", graded, "namespaces", 7, seconds=12.34).results()
    jsonschema.validate(json.loads(json.dumps(made)), SCHEMA)


def test_what_was_not_judged_is_not_in_the_maximum_and_is_flagged() -> None:
    grade = Grade("doe-jane-assign2", marks(), "namespaces", 7)
    assert (grade.score, grade.maximum) == (25, 74)
    made = grade.results()
    assert made["extra_data"]["not_judged"] == ["a text"]
    assert [test["max_score"] for test in made["tests"]] == [10, 20, 10, 20, 5, 3, 2, 0, 4]
    assert made["tests"][7]["name"] == "Q2.1: a text (not judged)"
