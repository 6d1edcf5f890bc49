"""Sheets of questions for an oral check, of hand-ins that were made up."""

from __future__ import annotations

import pytest

from common.course.grading.oral import draw, sheet
from common.course.markers import student_source
from common.course.submission import HandedIn, Submission
from common.course.tasks import read_tasks
from common.errors import UserError
from common.runtime.paths import project_root

ROOT = project_root()
DOE = HandedIn("doe-jane", 2)
TASK = read_tasks()["A2.1"]
BEGUN = student_source((ROOT / TASK.path).read_text(), TASK.file, ())
MINE = """

def mine_alone(sizes, cap):
    kept = []
    for size in sizes:
        if size < cap:
            kept.append(size)
            cap -= size
    return kept
"""
TABLE = b"step,time_ms,kind\n1,12.5,<b>timed</b>\n2,13,plain\n"


def submission(files: dict[str, bytes]) -> Submission:
    return Submission(DOE, {f"exercises/{TASK.file}": (BEGUN + MINE).encode()} | files)


def test_questions_are_on_what_the_student_wrote_measured_and_answered() -> None:
    answers = b"Q2.2: {answer: 4321.5}\n"
    handed_in = submission({"run/times.csv": TABLE, "answers.yaml": answers})
    asked = draw(handed_in, ROOT, seed=0)
    assert len(asked) == 6
    words = [question.words for question in asked]
    assert "mine_alone" in words[0]
    assert "for size in sizes" in asked[0].quote
    assert not any(name in word for word in words for name in ("assign_buckets",))
    [number] = [question for question in asked if "time_ms is 12.5" in question.words]
    assert number.where == "run/times.csv, line 2"
    assert any("You answered 4321.5" in word for word in words)
    left_out = [question for question in asked if "left out of mine_alone" in question.words]
    assert left_out
    for question in left_out:
        number, _, text = question.quote.split("\n")[0].strip().partition("  ")
        assert text in (BEGUN + MINE).split("\n")[int(number) - 1]
    page = sheet(handed_in, asked)
    assert "&lt;b&gt;timed" in page
    assert page.count("Notes:") == 6


def test_the_same_seed_draws_the_same_and_another_one_others() -> None:
    draws = [draw(submission({}), ROOT, seed) for seed in (0, 0, 1, 2, 3)]
    assert draws[0] == draws[1]
    assert any(other != draws[0] for other in draws[2:])


@pytest.mark.parametrize("text", ["def f(:", "(" * 5000, "x = 1\n" * 50_000, BEGUN])
def test_a_hand_in_without_anything_of_ones_own(text: str) -> None:
    files = {f"exercises/{TASK.file}": text.encode(), "answers.yaml": b"["}
    files["run/a.csv"] = b"a\n" + b'"' * 200_000
    with pytest.raises(UserError, match="doe-jane-assign2: neither code nor numbers"):
        draw(Submission(DOE, files), ROOT, 0)


def test_a_part_without_answers_asks_about_code() -> None:
    of = HandedIn("doe-jane", 1, 1)
    text = (ROOT / read_tasks()["A1.3"].path).read_text()
    asked = draw(Submission(of, {"exercises/overlapped_ddp.py": text.encode()}), ROOT, 0)
    assert len(asked) == 6
    assert {question.where.partition(",")[0] for question in asked} == {"overlapped_ddp.py"}
