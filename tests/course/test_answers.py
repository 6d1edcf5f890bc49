"""Questions of all handouts, answers to them, and their marks."""

from __future__ import annotations

import gzip
import json
import re
import tarfile
from pathlib import Path

import numpy as np
import pytest
import yaml
from right_answers import right_answers

from common.course.answers import (
    CHOICE,
    NUMBER,
    TEXT,
    Question,
    load,
    questions_path,
    read_answers,
    read_questions,
)
from common.course.grading.grade import Grader
from common.course.grading.limited import limited
from common.course.grading.marks import judge_answers, read_key
from common.course.limits import SettingsLoader, check_csv, check_run, read_json, read_yaml
from common.course.numbers import assignment0, assignment1, assignment2, assignment3, assignment4
from common.course.sandbox.imports import violations
from common.course.submission import HandedIn, Submission, pack
from common.course.tasks import LOADER
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
LAUGHS = "a0: &a0 [x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 10)
)
"""YAML of a few lines whose aliases stand for more than any memory holds."""


def beginning_of(value: object) -> str:
    """Returns the name of a case, which a process's environment has to hold."""
    return ascii(value)[:30]


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
    assert all("answer" in entries for entries in yaml.safe_load(content).values())


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
        (f"Q1: {{answer: {'9' * 5000}}}", "answers.yaml:1: a number of more than 1,000 digits"),
        (f"Q3: {{answer: 0x{'f' * 5000}}}", "answers.yaml:1: a number of more than 1,000 digits"),
        ("Q1: {answer: 1:30}", "expected a number, in ms; got '1:30'"),
        ("Q1: {answer: !!int 1:30}", "answers.yaml:1: numbers to base 60 are not read"),
        ("Q1: {answer: !!float 1:30.5}", "answers.yaml:1: numbers to base 60 are not read"),
        (f"Q1: {{answer: {'1:' * 200_000}1}}", "expected a number"),
        ("x: " + "[" * 30 + "]" * 30, "answers.yaml:1: more than 20 levels"),
        ("x: [" + "1," * 20_000 + "]", "answers.yaml:1: more than 10,000 values"),
        ("#" * 2**20 + "x", "answers.yaml: more than 1 MB"),
        ("Q1: {answer: !!bool x}", "answers.yaml: no YAML"),
        ('Q1: {answer: !!int ""}', "answers.yaml: no YAML"),
        ("Q1: {answer: !!timestamp x}", "answers.yaml: no YAML"),
        ('Q3: {answer: "\\udcff"}', "Q3: the text has characters that are none"),
        ("Q3: {answer: &a [x], more: [*a, *a]}", "answers.yaml:1: anchors are not read"),
        ("Q3: {answer: *a}", "answers.yaml:1: aliases are not read"),
    ],
    ids=beginning_of,
)
def test_answers_that_cannot_be_read(text: str, words: str) -> None:
    with pytest.raises(UserError) as error:
        read_answers(text.encode(), QUESTIONS)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_what_was_read_before_is_read_alike() -> None:
    # The oracle is PyYAML's own reader, which nothing here changes.
    text = """
Q1: {answer: -1_000.5e+3, more: [0x1f, 0o7, 017, .5, 1e3, 12e-1, ~, yes, 2026-01-02, 0b11, +3]}
Q2: {answer: b, "12:30": '1:30', base: "1:30"}
Q3:
  answer: |
    Of 12:30 to 13:30 it waits, as 3 < 4: "so".
  more: {<<: {a: 1}, b: !!str 5, c: !!int "7", d: !!float 3, e: !!binary aGk=}
"""
    assert load(text.encode(), "x") == yaml.safe_load(text)
    for number in ASSIGNMENTS:
        content = questions_path(ROOT, number).read_bytes()
        assert load(content, "x") == yaml.safe_load(content)


def test_settings_that_the_lab_wrote_are_read_and_bombs_are_not() -> None:
    for content in {path.read_bytes() for path in (ROOT / "data").rglob("config.yaml")}:
        assert read_yaml(content, "x", SettingsLoader) == yaml.load(content, LOADER)
    for text, words in {
        LAUGHS: "more than 10,000 values",
        "a: &a [*a]": "an alias of what it is in",
        "a: *b": "found undefined alias 'b'",
        "#" * 2**16 + "x": "x: more than 64 KB",
    }.items():
        with pytest.raises(UserError, match=words):
            read_yaml(text.encode(), "x", SettingsLoader)


def test_json_within_limits() -> None:
    assert read_json(b'{"a": [1, {"b": NaN}]}', "x")["a"][0] == 1
    for text, words in {
        "[" * 30 + "]" * 30: "more than 20 levels",
        "[" * 500_000: "no JSON",
        "9" * 5000: "no JSON",
        "{": "no JSON",
        " " * 2**20 + "1": "more than 1 MB",
    }.items():
        with pytest.raises(UserError, match=f"x: {words}"):
            read_json(text.encode(), "x")


@pytest.mark.parametrize(
    ("table", "words"),
    [
        (b"a," * 300_000, "x:1: a line of more than 256 KiB"),
        (b"a,b\n1" + b"," * 300 + b"\n", "x:2: more than 200 columns"),
        (b"a\n" + b"1\n" * 600_000, "x: more than 500,000 rows"),
        (b"a\r" + b"1\r" * 600_000, "x: more than 500,000 rows"),
        (b"a" * 2**25 + b"a", "x: more than 32 MB"),
        (b'a,b\n1,"2\n3,4\n', "x: a quote is not closed"),
    ],
    ids=beginning_of,
)
def test_tables_beyond_a_limit(table: bytes, words: str) -> None:
    with pytest.raises(UserError, match=words):
        check_csv(table, "x")


def test_tables_that_the_lab_wrote_are_within_limits() -> None:
    for run in RECORDED:
        check_run(run)
    check_csv(b'a,b\r\n"1\n2","3,4"\r\n', "x")


def test_marks_of_answers() -> None:
    key = {"Q1": {}, "Q2": {"right": "b"}, "Q3": {"look_for": ["x"]}}

    def marks(answers: dict, number: object = 200.0) -> list:
        judged = judge_answers(QUESTIONS, answers, key, {"Q1": number})
        return [mark.score for mark in judged]

    assert marks({"Q1": 200.9, "Q2": "b", "Q3": "because"}) == [4, 3, None]
    assert marks({"Q1": 201.1, "Q2": "a", "Q3": None}) == [0, 0, None]  # the same maximum
    assert marks({"Q1": 200.0, "Q2": "b", "Q3": "x"}, "KeyError") == [0, 3, None]


def hand_in(answers: bytes | None = None, **files: bytes) -> Submission:
    """Returns a hand-in of assignment 3 with the recorded run, and files in its place."""
    run = {f"run/{p.relative_to(RECORDED[3])}": p for p in RECORDED[3].rglob("*.*")}
    content = {name: path.read_bytes() for name, path in run.items()}
    content["answers.yaml"] = right_answers() if answers is None else answers
    return Submission(HandedIn("doe-jane", 3), content | files)


def reasons_of(submission: Submission) -> dict[str, tuple[float | None, str]]:
    """Returns question → points and reason."""
    return {mark.of: (mark.score, mark.why) for mark in Grader(ROOT).answers(submission)[0]}


KINDS = {name: question.kind for name, question in read_questions(ROOT, 3).items()}
POINTS = {name: question.points for name, question in read_questions(ROOT, 3).items()}
MODES = "run/compare_modes/mode-times.csv"
SETTINGS_FILE = "run/compare_modes/config.yaml"


@pytest.mark.grading
@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({}, ""),
        ({MODES: b"," * 199 + b"\n" + (b"," * 199 + b"\n") * 50_000}, "KeyError"),
        ({MODES: b"1" * 100_000_000}, f"{MODES[4:]}: more than 32 MB"),
        ({MODES: b"\x00\xff" * 1000}, "Error"),
        ({SETTINGS_FILE: LAUGHS.encode()}, f"{SETTINGS_FILE[4:]}:"),
        ({"run/compare_modes/environment.json": b"[" * 900_000}, "environment.json: no JSON"),
    ],
    ids=beginning_of,
)
def test_a_table_that_costs_much_costs_the_numbers_only(files: dict, words: str) -> None:
    judged = reasons_of(hand_in(**files))
    lost = {name: why for name, (score, why) in judged.items() if score == 0}
    assert bool(lost) == bool(words)
    for name, why in lost.items():
        assert KINDS[name] == NUMBER
        assert words in why
    for name in judged.keys() - lost.keys():
        assert judged[name][0] == (None if KINDS[name] == TEXT else POINTS[name])


@pytest.mark.grading
def test_times_that_are_no_numbers_give_none() -> None:
    recorded = (RECORDED[3] / "compare_modes" / "mode-times.csv").read_text().splitlines()
    column = recorded[0].split(",").index("step_time_ms")
    for value in ("nan", "1e400"):
        rows = [row.split(",") for row in recorded]
        for row in rows[1:]:
            row[column] = value
        table = "\n".join(map(",".join, rows)).encode()
        judged = reasons_of(hand_in(**{MODES: table}))
        numbers = [judged[name] for name, kind in KINDS.items() if kind == NUMBER]
        assert (0, "your tables do not give it") in numbers


@pytest.mark.grading
@pytest.mark.parametrize(
    ("answers", "words"),
    [
        (LAUGHS.encode(), "anchors are not read"),
        (b"[" * 900_000, "more than 20 levels"),
    ],
    ids=beginning_of,
)
def test_answers_that_cost_much_have_a_reason_and_no_points(answers: bytes, words: str) -> None:
    judged = reasons_of(hand_in(answers))
    assert {score for score, _ in judged.values()} == {0}
    assert all(words in why for _, why in judged.values())


def test_an_exercise_that_is_too_long_is_not_parsed() -> None:
    assert violations("f'" + "{a}" * 300_000 + "'", "", []) == ["it has more than 128 KB"]
    assert violations("# a\n" * 30_000, "", []) == []


@pytest.mark.grading
def test_what_no_limit_of_a_file_finds_is_ended_by_those_of_the_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(UserError, match="it takes more than 1 s"):
        limited(yaml.safe_load, cpu_s=1, stream="1:" * 1_000_000 + "1")
    with pytest.raises(UserError, match="it takes more than 2 GiB of memory"):
        limited(np.ones, shape=2**29)
    with pytest.raises(UserError, match=r"it cannot be read: JSONDecodeError"):
        limited(json.loads, s="{")
    assert limited(yaml.safe_load, stream="a: [1, b]") == {"a": [1, "b"]}
    monkeypatch.setattr("common.course.grading.limited.FREE_BYTES", 2**60)
    with pytest.raises(OSError, match="No space left"):  # which is no student's fault
        limited(json.loads, s="{")


def with_header(payload: bytes) -> bytes:
    """Returns a tarball whose first member has an extended header of this content."""
    header = tarfile.TarInfo("x")
    header.type, header.size = tarfile.XHDTYPE, len(payload)
    padding = bytes(-len(payload) % 512)
    return header.tobuf(tarfile.GNU_FORMAT) + payload + padding + bytes(1024)


def sparse_map(size: int) -> bytes:
    """Returns a tarball with a sparse member whose map is long."""
    member = tarfile.TarInfo("doe-jane-assign3/answers.yaml")
    member.pax_headers = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0"}
    content = b"999999999\n" + b"0\n" * size
    member.size = len(content)
    return member.tobuf(tarfile.PAX_FORMAT) + content + bytes(-len(content) % 512) + bytes(1024)


@pytest.mark.grading
def test_a_tarball_that_costs_much_is_a_row_and_the_next_one_is_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("common.course.grading.limited.UNPACKING_S", 2)
    monkeypatch.setattr(Grader, "checks", lambda *_: [])
    grader = Grader(ROOT)
    bad, good = (tmp_path / f"{name}-assign3.tar.gz" for name in ("doe-jane", "roe-max"))
    for make, words in (  # they are large: one at a time
        (lambda: with_header(b"1" * 2**21), "it takes more than 2 s"),
        (lambda: with_header(b"2 " * 2**20 + b"="), "it takes more than"),  # memory or time
        (lambda: sparse_map(90 * 2**20), "it takes more than|no whole tarball"),
        (lambda: bytes(250 * 2**20), "unpacks to more than 200 MB"),
    ):
        bad.write_bytes(gzip.compress(make(), 1))
        grade = grader.grade(bad)
        assert (grade.score, grade.maximum) == (0, 100)
        assert re.search(words, grade.remark)
    pack(good, HandedIn("roe-max", 3), hand_in().files)
    assert [m.score for m in grader.grade(good).marks] == [
        None if kind == TEXT else POINTS[name] for name, kind in KINDS.items()
    ]
