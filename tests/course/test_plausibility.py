"""Runs that do not go together and hand-ins that are alike, and how often honest ones are named."""

from __future__ import annotations

import csv
import functools
import io
import json
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from itertools import combinations
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from honest_variants import BUCKETS, RING
from right_answers import answers

from common.course.grading import plausibility
from common.course.grading.checks import Exercises
from common.course.grading.evidence import evidence, shingles
from common.course.grading.limited import lay_out
from common.course.grading.plausibility import (
    CODE,
    FEWEST,
    KEPT,
    REFERENCE,
    SAMPLES,
    TEXTS,
    Suspicion,
    as_csv,
    as_page,
    code_suspicions,
    keep,
    measured_of,
    pages_of,
    sample_suspicions,
    suspicions_by_strength,
)
from common.course.markers import student_source
from common.course.outcomes import PASSED, SKIPPED
from common.course.sandbox.isolation import strongest_isolation
from common.course.submission import HandedIn, Submission
from common.course.tasks import read_tasks
from common.runtime.paths import project_root

pytestmark = pytest.mark.usefixtures("read_here")
ROOT = project_root()
RECORDED = ROOT / "data" / "epyc-2-cores"
TABLE = "run/compare_strategies/strategy-times.csv"
STAGES = ("run/compare_strategies", "run/learning")
VARIANTS = {"A1.1": RING, "A2.1": BUCKETS}


def hand_in(name: str, assignment: int = 1, **files: bytes | None) -> Submission:
    """Returns a hand-in with a recorded run; files in its place, None for none."""
    machine = RECORDED if assignment < 4 else RECORDED.parent / "xeon-2-cores"
    folder = machine / f"assignment{assignment}"
    content = {
        f"run/{path.relative_to(folder)}": path.read_bytes()
        for path in folder.rglob("*.*")
        if path.suffix in (".csv", ".json", ".yaml") and "emulated" not in str(path)
    }
    content = {name: text for name, text in (content | files).items() if text is not None}
    return Submission(HandedIn(name, assignment, 2 if assignment == 1 else 0), content)


def anew(table: bytes, seed: int, noise: float = 0.03) -> bytes:
    """Returns a table as another run on the same machine would have it: its times with noise."""
    frame, draws = pd.read_csv(io.BytesIO(table)), np.random.default_rng(seed)
    for column in frame.columns[frame.columns.str.contains("_ms|_s$")]:
        frame[column] *= np.exp(draws.normal(0, noise, len(frame)))
    return frame.to_csv(index=False).encode()


@functools.cache
def another_run(seed: int) -> dict[str, bytes]:
    return {
        name: anew(content, seed)
        for name, content in hand_in("a-a").files.items()
        if name.endswith(".csv")
    }


def evidence_of(submission: Submission, folder: Path) -> dict:
    """Returns the evidence, read in this process."""
    folder.mkdir(parents=True)
    lay_out(submission, folder)
    return evidence(str(folder), str(ROOT), submission.of.assignment)


def run_problems(tmp_path: Path, **files: bytes | None) -> list[str]:
    """Returns what is wrong with two stages of the recorded run, and files in their place."""
    others = {n: None for n in hand_in("a-a").files if not n.startswith(STAGES)}
    run = hand_in("doe-jane", **others | files)
    return [words for _, words in evidence_of(run, tmp_path / "x")["run"]]


def solved(task: str, body: str) -> str:
    """Returns the exercise of a task with a solution in place of what is to be written."""
    path = ROOT / read_tasks()[task].path
    text = student_source(path.read_text(), path.name, ())
    return text.replace(f'    raise NotYetWritten("{task}")\n', body.lstrip("\n"))


def code_of(texts: Mapping[str, str], file: str) -> dict[str, dict]:
    return {name: {"code": {file: shingles(text)}} for name, text in texts.items()}


def compared(texts: Mapping[str, str], file: str) -> dict[tuple[str, str], str]:
    """Returns pair → strength of the suspicions on these texts of one exercise."""
    return {(s.student, s.other): s.strength for s in code_suspicions(code_of(texts, file), ROOT)}


@pytest.mark.parametrize("assignment", range(5))
def test_recorded_runs_go_together(tmp_path: Path, assignment: int) -> None:
    assert evidence_of(hand_in("doe-jane", assignment), tmp_path / "x")["run"] == []


def test_tables_have_the_rows_that_their_settings_ask_for(tmp_path: Path) -> None:
    table = (RECORDED / "assignment1/compare_strategies/strategy-times.csv").read_text()
    head, *rows = table.splitlines(keepends=True)
    frame = pd.read_csv(io.StringIO(table))
    copied = frame.assign(step_time_ms=np.repeat(frame["step_time_ms"].to_numpy()[:54], 2))
    changed = {
        "1 of 2 ranks": frame[frame["rank"] == 0].to_csv(index=False),
        "1 of 2 rounds": frame[frame["round"] == 1].to_csv(index=False),
        "2 of 3 iterations": frame[frame["iteration"] < 2].to_csv(index=False),
        "3 rows": "".join([head, *rows[:3]]),
        "step_time_ms has 4 digits at most": frame.round({"step_time_ms": 0}).to_csv(index=False),
        "54 of 108 values of step_time_ms occur again": copied.to_csv(index=False),
        "11 of 12 rows by rank, round, iteration": frame[
            (frame[["rank", "round", "iteration"]] != 1).any(axis=1)
        ].to_csv(index=False),
    }
    for number, (words, text) in enumerate(changed.items()):
        problems = run_problems(tmp_path / str(number), **{TABLE: text.encode()})
        assert any(re.search(f"strategy-times.csv: {words}", p) for p in problems), problems


def test_records_and_clocks_go_together(tmp_path: Path) -> None:
    path = "run/compare_strategies/environment.json"
    record = json.loads((RECORDED / "assignment1/compare_strategies/environment.json").read_text())
    changed = {
        "strategy-times.csv without environment.json": None,
        "no start before an end": {"end_time": "2026-01-01T00:00:00+00:00"},
        "steps of 20 s in a stage that lasted 1 s": {"end_time": "2026-11-20T18:12:28+00:00"},
        "ran at the same time": {"end_time": "2026-11-20T18:20:00+00:00"},
        "the machine of": {"cpu": {"model": "another", "cores": 2}},
        "the versions of": {"packages": {"torch": "1.0"}},
        "2 of 8 ranks": {"world_size": 8},
    }
    for number, (words, change) in enumerate(changed.items()):
        content = None if change is None else json.dumps(record | change).encode()
        problems = run_problems(tmp_path / str(number), **{path: content})
        assert any(words in problem for problem in problems), (words, problems)
    problems = run_problems(tmp_path / "report", **{"report.pdf": b"%PDF-1.4"})
    assert problems == ["report.pdf of 8 bytes is none"]
    problems = run_problems(tmp_path / "bad", **{TABLE: b"a," * 300_000})
    assert ["the run cannot be read: compare_strategies" in p for p in problems] == [True]


def test_the_same_run_is_found_in_any_order_and_form(tmp_path: Path) -> None:
    frame = pd.read_csv(RECORDED / "assignment1/compare_strategies/strategy-times.csv")
    scaled = frame.assign(step_time_ms=frame["step_time_ms"] * 1.07)
    renamed = frame.sample(frac=1, random_state=0)[frame.columns[::-1]]
    quoted = renamed.to_csv(index=False, quoting=csv.QUOTE_ALL, lineterminator="\r\n")
    tables = [table.to_csv(index=False) for table in (renamed, frame.head(80), scaled)]
    recorded = evidence_of(hand_in("a-a"), tmp_path / "recorded")
    for number, table in enumerate([*tables, quoted]):
        other = hand_in("b-b", **another_run(1) | {TABLE: table.encode()})
        kept = {"a-a": recorded, "b-b": evidence_of(other, tmp_path / str(number))}
        [suspicion] = sample_suspicions(kept)
        assert (suspicion.student, suspicion.other) == ("a-a", "b-b")
        assert suspicion.strength == "strong"
        assert "compare_strategies/strategy-times.csv: step_time_ms" in suspicion.evidence


def test_runs_of_the_same_machine_are_not_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = {
        f"s-{seed}": evidence_of(hand_in(f"s-{seed}", **another_run(seed)), tmp_path / str(seed))
        for seed in range(4)
    }
    assert list(sample_suspicions(kept)) == []
    # A run that half of a class has is the same run, and nobody's scaled.
    shared = kept | {f"t-{number}": kept["s-0"] for number in range(5)}
    same = list(sample_suspicions(shared))
    assert {frozenset((s.student, s.other)) for s in same} == {
        frozenset(pair) for pair in combinations(["s-0", *(f"t-{n}" for n in range(5))], 2)
    }
    assert all("100%" in s.evidence and "scaled" not in s.evidence for s in same)
    # Columns without a value in common are not compared any further.
    monkeypatch.setattr(plausibility, "share_of", None)
    assert list(sample_suspicions(kept)) == []


def test_recorded_repetitions_of_a_training_are_not_the_same() -> None:
    # Real runs of the same settings on the same machine, one after another.
    runs = RECORDED.glob("study-trainer/runs/trainings/*")
    kept = {folder.name: measured_of(folder) for folder in runs}
    assert len(kept) == 30
    assert list(sample_suspicions(kept)) == []


def test_honest_solutions_are_not_alike_and_copies_are() -> None:
    for task, bodies in VARIANTS.items():
        file = read_tasks()[task].file
        texts = {f"s-{n}": solved(task, body) for n, body in enumerate(bodies)}
        assert compared(texts, file) == {}, task
        for name, text in list(texts.items()):
            renamed = text
            for word in ("size", "index", "group", "count"):
                renamed = re.sub(rf"\b{word}\b(?!=)", f"{word}_of_mine", renamed)
            copy = re.sub(r"\n    (\w)", r"\n    # I thought of this myself\n    \1", renamed)
            assert compared(texts | {"t": copy}, file) == {(name, "t"): "strong"}


@pytest.mark.grading
@pytest.mark.timeout(300)
@pytest.mark.parametrize("number", range(3))
def test_honest_solutions_get_all_points(number: int) -> None:
    tasks = {name: read_tasks()[name] for name in VARIANTS}
    texts = {task.file: solved(name, VARIANTS[name][number]) for name, task in tasks.items()}
    exercises = Exercises(ROOT, tasks, texts, 0, strongest_isolation())
    failed = [o for o in exercises.outcomes() if o.outcome not in (PASSED, SKIPPED)]
    assert failed == []


def test_a_reference_is_found_and_what_many_wrote_is_not() -> None:
    for task in VARIANTS:
        path = ROOT / read_tasks()[task].path
        reference = {"a-a": path.read_text()}
        assert compared(reference, path.name) == {("a-a", REFERENCE): "strong"}
    texts = {f"s-{n}": solved("A2.1", BUCKETS[0]) for n in range(6)}
    assert compared(texts, "bucket_assignment.py") == {}
    untouched = {f"s-{n}": solved("A2.1", "    raise NotYetWritten\n") for n in range(2)}
    assert compared(untouched, "bucket_assignment.py") == {}


LONG = (
    "Communication of a bucket starts as soon as its last gradient is ready, so most of it hides "
    "behind the backward pass; what remains is the last bucket, which nothing can hide, and the "
    "time that the slower of both ranks makes the other wait."
)
OTHER = (
    "I measured twice and the second run was slower since the laptop was warm; I think the network "
    "is not what limits here, because sent bytes were equal and only the computation grew."
)


@pytest.mark.grading
def test_the_list_is_written_and_a_late_one_is_held_against_it(tmp_path: Path) -> None:
    texts = {"answers.yaml": answers(LONG, 1), "exercises/fsdp.py": b"x = 1\n"}
    first = hand_in("doe-jane", **another_run(0), **texts)
    keep(tmp_path / KEPT / "doe-jane.json", first, ROOT)
    header = "student,kind,other student,evidence,strength\n"
    assert pages_of(tmp_path, suspicions_by_strength(tmp_path, ROOT))["plausibility.csv"] == header
    copied = answers(LONG.replace("nothing can hide", "cannot be hidden").upper(), 1)
    late = hand_in("roe-max", **another_run(1), **{"answers.yaml": copied})
    honest = hand_in("poe-kim", **another_run(2), **{"answers.yaml": answers(OTHER, 1)})
    broken = {"answers.yaml": b"[" * 1000, "exercises/fsdp.py": b"\xff" * 99}
    broken = hand_in("bad-one", **another_run(0), **broken)
    theirs = hand_in("poe-ann")
    handed_in = {"roe-max": datetime(2026, 1, 1, tzinfo=UTC)}
    for other in (late, honest, broken, theirs):
        keep(tmp_path / KEPT / f"{other.of.name}.json", other, ROOT)
    suspicions = suspicions_by_strength(tmp_path, ROOT, handed_in)
    pages = pages_of(tmp_path, suspicions)
    rows = list(csv.DictReader(pages["plausibility.csv"].splitlines()))
    kinds = {(r["student"], r["kind"], r["other student"]) for r in rows}
    assert kinds == {
        ("doe-jane", TEXTS, "roe-max"),
        ("bad-one", SAMPLES, "doe-jane"),
        ("bad-one", "run", ""),
        ("poe-ann", SAMPLES, "(recorded, epyc-2-cores)"),
        ("roe-max", "run", ""),
    }
    assert len(rows) == len(suspicions)
    assert "5 suspicions among 5 submissions" in pages["plausibility.md"]
    # Handed in again, and then alone: the others stay.
    better = hand_in("bad-one", **another_run(3))
    keep(tmp_path / KEPT / "bad-one.json", better, ROOT)
    suspicions = suspicions_by_strength(tmp_path, ROOT)
    assert {s.student for s in suspicions} == {"doe-jane", "poe-ann"}


def test_words_of_a_hand_in_stay_words(tmp_path: Path) -> None:
    table = f"run/=cmd/{TABLE.rpartition('/')[2]}"
    content = (RECORDED / "assignment1/compare_strategies/strategy-times.csv").read_bytes()
    problems = run_problems(tmp_path, **{table: content})
    suspicions = [Suspicion("a-a", "run", "", f"{p} \x1b[31m | <b>", "some") for p in problems]
    assert suspicions
    for text in (as_csv(suspicions), as_page(suspicions, 1)):
        assert "\x1b" not in text
        assert not re.search("[\n,]=cmd", text)
    assert "\\| \\<b\\>" in as_page(suspicions, 1)


def test_references_of_different_tasks_are_not_alike() -> None:
    texts = {}
    for task in read_tasks().values():
        source = (ROOT / task.path).read_text()
        forced = shingles(student_source(source, task.file, ()))
        texts[task.file] = set(shingles(source)) - set(forced)
    for (first, a), (second, b) in combinations(texts.items(), 2):
        share = len(a & b) / max(FEWEST[CODE], min(len(a), len(b)))
        # A1.3 and A2.4 are the same wrapper, once without buckets and once with them.
        assert share < 0.3 or {first, second} == {"overlapped_ddp.py", "bucketed_ddp.py"}
