"""Questions of all handouts, answers to them, and their marks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from common.course.answers import (
    CHOICE,
    LEVELS,
    NUMBER,
    TEXT,
    Question,
    questions_path,
    read_answers,
    read_questions,
)
from common.course.grading.marks import judge_answers, read_key
from common.course.grading.reading import blank_levels, read_levels, reading_sheet
from common.course.numbers import assignment0, assignment1, assignment2, assignment3, assignment4
from common.errors import UserError
from common.runtime.paths import project_root

ROOT = project_root()
ASSIGNMENTS = range(5)
NUMBERS = (assignment0, assignment1, assignment2, assignment3, assignment4)
RECORDED = [ROOT / "data" / "epyc-2-cores" / f"assignment{n}" for n in range(4)]
RECORDED.append(ROOT / "data" / "xeon-2-cores" / "assignment4")

QUESTIONS = {
    "Q1": Question("Q1", "a time", NUMBER, 4, unit="ms"),
    "Q2": Question("Q2", "a letter", CHOICE, 3, choices={"a": "one", "b": "other"}),
    "Q3": Question("Q3", "a text", TEXT, 8, levels={"none": "-", "half": "one", "full": "both"}),
}


@pytest.mark.parametrize("number", ASSIGNMENTS)
def test_questions_key_and_handout_agree(number: int) -> None:
    questions, key = read_questions(ROOT, number), read_key(ROOT, number)
    handout = (ROOT / "assignments" / f"assignment{number}" / "README.md").read_text()
    asked = dict(re.findall(r"\*\*(Q\d\.\d+)\*\* \((\d+) points?\)", handout))
    assert {name: str(q.points) for name, q in questions.items()} == asked
    assert list(questions) == list(key)


@pytest.mark.parametrize("number", ASSIGNMENTS)
def test_numbers_can_be_computed_from_a_recorded_run(number: int) -> None:
    questions, key = read_questions(ROOT, number), read_key(ROOT, number)
    for name, question in questions.items():
        if question.kind == NUMBER:
            found = float(getattr(NUMBERS[number], key[name]["number"])(RECORDED[number]))
            assert found > 0, (name, found)
        elif question.kind == CHOICE:
            assert key[name]["right"] in question.choices
        else:
            assert len(key[name]["look_for"]) > 1


@pytest.mark.parametrize("number", ASSIGNMENTS)
def test_the_form_is_empty_and_can_be_read(number: int) -> None:
    content = questions_path(ROOT, number).read_bytes()
    answers = read_answers(content, read_questions(ROOT, number))
    assert set(answers.values()) == {None}


def test_answers_of_each_kind() -> None:
    text = "Q1: {answer: 3}\nQ2: {answer: b}\nQ3: {answer: because}\n"
    assert read_answers(text.encode(), QUESTIONS) == {"Q1": 3.0, "Q2": "b", "Q3": "because"}
    assert read_answers(b"{}", QUESTIONS) == {"Q1": None, "Q2": None, "Q3": None}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Q9: {answer: 3}", "unknown question 'Q9'"),
        ("Q1: {answer: [3]}", "Q1: expected a number, in ms; got a list"),
        ("Q1: {answer: true}", "got yes or no"),
        ("Q1: {answer: 3 ms}", "expected a number"),
        ("Q1: {answer: .inf}", "not finite"),
        ("Q2: {answer: c}", "expected one of a, b"),
        ("Q2: {answer: 1}", "expected a letter"),
        ("Q3: {answer: {a: b}}", "expected text; got a mapping"),
        ("Q1: 3", "expected questions"),
        ("- Q1", "expected questions"),
        ("Q1: {answer: [", "answers.yaml:"),
        ("Q1: !!python/object/apply:os.system ['true']", "answers.yaml:1"),
        ("[" * 5000, "answers.yaml"),
        (f"Q1: {{answer: {10**400}}}", "Q1: the number is not finite"),
        (f"Q3: {{answer: 0x{'f' * 5000}}}", "Q3: expected text; got a number of very many digits"),
        (f"? 0x{'f' * 5000}\n: {{}}", "unknown question 'a number of very many digits'"),
        ("Q1: {answer: !!bool x}", "answers.yaml: no YAML"),
        ('Q1: {answer: !!int ""}', "answers.yaml: no YAML"),
        ("Q1: {answer: !!timestamp x}", "answers.yaml: no YAML"),
        ('Q3: {answer: "\\udcff"}', "Q3: the text has characters that are none"),
        ("Q3: {answer: &a [x], more: [*a, *a]}", "answers.yaml:1: aliases are not read"),
    ],
)
def test_answers_that_cannot_be_read(text: str, words: str) -> None:
    with pytest.raises(UserError) as error:
        read_answers(text.encode(), QUESTIONS)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_marks_of_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assignment2, "made_up", lambda run: 200.0, raising=False)
    monkeypatch.setattr(assignment2, "broken", lambda run: {}["x"], raising=False)
    key = {"Q1": {"number": "made_up"}, "Q2": {"right": "b"}, "Q3": {"look_for": ["x"]}}

    def marks(answers: dict, levels: dict | None = None, number: str = "made_up") -> list:
        own = key | {"Q1": {"number": number}}
        judged = judge_answers(QUESTIONS, answers, own, tmp_path, 2, levels or {})
        return [mark.score for mark in judged]

    assert marks({"Q1": 200.9, "Q2": "b", "Q3": "because"}) == [4, 3, None]
    assert marks({"Q1": 201.1, "Q2": "a", "Q3": None}) == [0, 0, 0]
    assert marks({"Q1": 200.0, "Q2": "b", "Q3": "x"}, {"Q3": "half"}, "broken") == [0, 3, 4]


def test_a_reading_sheet_and_the_levels_that_come_back(tmp_path: Path) -> None:
    answers = {"doe-jane-assign2": {"Q3": "<b>because</b>"}, "иванова-анна-assign2": {}}
    page = reading_sheet("Texts", QUESTIONS, {"Q3": {"look_for": ["a fact"]}}, answers)
    assert "&lt;b&gt;because" in page
    assert "иванова" in page
    assert page.count("<section>") == 1
    path = tmp_path / "levels.csv"
    path.write_text(blank_levels(list(answers), QUESTIONS))
    assert read_levels(path) == {}
    path.write_text(path.read_text().replace("doe-jane-assign2,Q3,", "doe-jane-assign2,Q3,half"))
    assert read_levels(path) == {"doe-jane-assign2": {"Q3": "half"}}
    path.write_text("submission,question,level\na-b-assign2,Q3,good\n")
    with pytest.raises(UserError, match=f"2: level 'good'; known: {', '.join(LEVELS)}"):
        read_levels(path)
    path.write_text("a,b\n1,2\n")
    with pytest.raises(UserError, match="expected the columns"):
        read_levels(path)


def test_the_students_file_does_not_ask_anything_else() -> None:
    for number in ASSIGNMENTS:
        content = yaml.safe_load(questions_path(ROOT, number).read_text())
        assert all("answer" in entries for entries in content.values())
