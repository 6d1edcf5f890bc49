"""A4.4: causes of recorded runs with planted faults, judged by macro-F1.

Faults were planted from outside of the trainer (``ddplab study diagnosis``). The public runs are
those that thresholds may be set on; ``ddplab course faults`` plants others.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from arguments import assert_unchanged
from judging import shuffled

from common.course.faults import CAUSES, STUDY, recorded_runs
from common.course.sandbox.student import Student
from common.runtime.paths import project_root

RECORDED = project_root() / STUDY
FRESH = project_root() / "data" / "fault-runs-graded"
"""Where an overlay has runs with faults that nobody has seen."""
LESS = pytest.mark.grading
"""Mark of a score that another check asks more of."""


TIMES = ("_ms", "_s")
"""Ends of the names of columns that are times."""
FACTORS = 0.5, 2.0
"""How long times may be on the machine of a variant."""


def tables_of(folder: Path, factor: float) -> dict[str, pd.DataFrame]:
    """Reads a run's tables, as they would be of a machine whose every time is ``factor`` as long.

    What slows a run down is the same there.
    """
    tables = {path.stem: pd.read_csv(path) for path in sorted(folder.glob("*.csv"))}
    for table in tables.values():
        times = [name for name in table if name.endswith(TIMES)]
        table[times] = table[times].apply(pd.to_numeric, errors="coerce") * factor
    return tables


def judged(
    student: Student,
    folder: Path,
    runs: Sequence[tuple[str, str, str]],
    generator: np.random.Generator,
) -> tuple[list[str], list[str]]:
    """Returns the causes that were named and those that were planted, of the runs in any order."""
    main_cause, factor = student.exercise("main_cause").main_cause, generator.uniform(*FACTORS)
    runs = shuffled(runs, generator)
    read = functools.cache(lambda name: tables_of(folder / name, factor) if name else None)
    named = [main_cause(read(name), read(baseline)) for name, _, baseline in runs]
    return named, [cause for _, cause, _ in runs]


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


def check_public(student: Student, generator: np.random.Generator, least: float) -> None:
    """Checks the macro-F1 of the runs that students have."""
    runs = recorded_runs(RECORDED, held_out=False)
    score = macro_f1(*judged(student, RECORDED, runs, generator))
    assert score > least, f"macro-F1 of the public runs is {score:.2f}; above {least} it counts"


def check_others(student: Student, generator: np.random.Generator, least: float) -> None:
    """Checks that of the other runs."""
    folder, runs = RECORDED, recorded_runs(RECORDED, held_out=True)
    if FRESH.is_dir():
        folder, listed = FRESH, pd.read_csv(FRESH / CAUSES, keep_default_na=False)
        runs = list(listed.itertuples(index=False, name=None))
    named, planted = judged(student, folder, runs, generator)
    guess = max(set(planted), key=planted.count)
    assert macro_f1([guess] * len(planted), planted) < 0.2, "a guess would do"
    score = macro_f1(named, planted)
    assert score > least, f"macro-F1 of the other runs is {score:.2f}; above {least} it counts"


@LESS
def test_half_of_the_public_causes_are_named(
    student: Student, generator: np.random.Generator
) -> None:
    check_public(student, generator, 0.5)


@LESS
def test_most_of_the_public_causes_are_named(
    student: Student, generator: np.random.Generator
) -> None:
    check_public(student, generator, 0.75)


def test_causes_of_the_public_runs_are_named(
    student: Student, generator: np.random.Generator
) -> None:
    check_public(student, generator, 0.95)


def test_a_baseline_of_something_else_is_seen(
    student: Student, generator: np.random.Generator
) -> None:
    main_cause, factor = student.exercise("main_cause").main_cause, generator.uniform(*FACTORS)
    runs = {
        name: tables_of(RECORDED / f"healthy-{name}", factor)
        for name in ("benchmark", "large-benchmark")
    }
    alone = {
        name: {table: rows[rows["rank"] == 0] for table, rows in run.items() if "rank" in rows}
        for name, run in runs.items()
    }
    assert main_cause(runs["benchmark"], None) == "healthy", "a healthy run without a baseline"
    for name, run in runs.items():
        without = main_cause(run, None)
        for other, baseline in alone.items():
            expected = without if other == name else "mixed-configurations"
            words = "the same training" if other == name else "another training"
            assert main_cause(run, baseline) == expected, f"beside a baseline of {words}"
    assert_unchanged(student, "main_cause", "main_cause", runs["benchmark"], alone["benchmark"])


@LESS
def test_a_third_of_the_other_causes_are_named(
    student: Student, generator: np.random.Generator
) -> None:
    check_others(student, generator, 0.35)


@LESS
def test_half_of_the_other_causes_are_named(
    student: Student, generator: np.random.Generator
) -> None:
    check_others(student, generator, 0.5)


@pytest.mark.grading
def test_causes_of_other_runs_are_named(student: Student, generator: np.random.Generator) -> None:
    check_others(student, generator, 0.7)
