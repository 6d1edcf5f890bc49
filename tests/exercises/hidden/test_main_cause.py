"""A4.4: causes of recorded runs with planted faults, judged by macro-F1.

Faults were planted from outside of the trainer (``ddplab study diagnosis``). The public runs are
those that thresholds may be set on; ``ddplab course faults`` plants others.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pandas as pd
import pytest

from common.course.faults import CAUSES, STUDY, recorded_runs
from common.course.sandbox.student import Student
from common.runtime.paths import project_root

RECORDED = project_root() / STUDY
FRESH = project_root() / "data" / "fault-runs-graded"
"""Where an overlay has runs with faults that nobody has seen."""
LESS = pytest.mark.grading
"""Mark of a score that another check asks more of."""


def tables_of(folder: Path) -> dict[str, pd.DataFrame]:
    return {path.stem: pd.read_csv(path) for path in folder.glob("*.csv")}


def judged(
    student: Student, folder: Path, runs: Sequence[tuple[str, str, str]]
) -> tuple[list[str], list[str]]:
    """Returns the causes that were named and those that were planted."""
    main_cause = student.exercise("main_cause").main_cause
    found = [
        main_cause(tables_of(folder / name), tables_of(folder / baseline) if baseline else None)
        for name, _, baseline in runs
    ]
    return found, [cause for _, cause, _ in runs]


def macro_f1(found: Sequence[str], planted: Sequence[str]) -> float:
    """Computes the mean over planted causes of 2·hits / (named + planted)."""
    scores = []
    for cause in dict.fromkeys(planted):
        hits = sum(one == other == cause for one, other in zip(found, planted, strict=True))
        scores.append(2 * hits / (list(found).count(cause) + list(planted).count(cause)))
    return sum(scores) / len(scores)


def test_the_score_is_that_of_the_definition() -> None:
    assert macro_f1(["a", "b", "b"], ["a", "b", "b"]) == 1
    assert macro_f1(["a", "a", "a"], ["a", "b", "b"]) == 0.25  # precision 1/3, recall 1; then 0


def public_score(student: Student) -> float:
    """Returns the macro-F1 of the runs that students have."""
    return macro_f1(*judged(student, RECORDED, recorded_runs(RECORDED, held_out=False)))


def other_score(student: Student) -> float:
    """Returns that of the other runs."""
    folder, runs = RECORDED, recorded_runs(RECORDED, held_out=True)
    if FRESH.is_dir():
        folder, listed = FRESH, pd.read_csv(FRESH / CAUSES, keep_default_na=False)
        runs = list(listed.itertuples(index=False, name=None))
    found, planted = judged(student, folder, runs)
    guess = max(set(planted), key=planted.count)
    assert macro_f1([guess] * len(planted), planted) < 0.2
    return macro_f1(found, planted)


@LESS
def test_half_of_the_public_causes_are_named(student: Student) -> None:
    assert public_score(student) > 0.5


@LESS
def test_most_of_the_public_causes_are_named(student: Student) -> None:
    assert public_score(student) > 0.75


def test_causes_of_the_public_runs_are_named(student: Student) -> None:
    assert public_score(student) > 0.95


def test_a_baseline_of_something_else_is_seen(student: Student) -> None:
    main_cause = student.exercise("main_cause").main_cause
    healthy, large = (f"healthy-{name}" for name in ("benchmark", "large-benchmark"))
    run, own = tables_of(RECORDED / healthy), tables_of(RECORDED / large)
    assert main_cause(run, None) == "healthy"
    assert main_cause(run, own) == "mixed-configurations"


@LESS
def test_a_third_of_the_other_causes_are_named(student: Student) -> None:
    assert other_score(student) > 0.35


@LESS
def test_half_of_the_other_causes_are_named(student: Student) -> None:
    assert other_score(student) > 0.5


def test_causes_of_other_runs_are_named(student: Student) -> None:
    assert other_score(student) > 0.7
