"""A4.4: causes of recorded runs with planted faults, judged by macro-F1.

Faults were planted from outside of the trainer (``ddplab study diagnosis``). The public runs are
those that thresholds may be set on.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from common.exercises.main_cause import CAUSES, HEALTHY, Tables, main_cause
from common.runtime.paths import project_root

STUDY = project_root() / "data" / "xeon-2-cores" / "study-diagnosis"
BASELINES = {"mixed-configurations-held-out": "baseline"}


def tables_of(folder: Path) -> Tables:
    return {path.stem: pd.read_csv(path) for path in folder.glob("*.csv")}


def judged(held_out: bool) -> tuple[list[str], list[str]]:
    """Return the causes that were named and those that were planted."""
    faults = pd.read_csv(STUDY / "faults.csv")
    found, planted = [], []
    for case in faults[faults["held_out"] == held_out].itertuples():
        baseline = BASELINES.get(case.case)
        found.append(
            main_cause(
                tables_of(STUDY / case.case), tables_of(STUDY / baseline) if baseline else None
            )
        )
        planted.append(case.planted)
    return found, planted


def macro_f1(found: Sequence[str], planted: Sequence[str]) -> float:
    """Return the mean over planted causes of 2·hits / (named + planted)."""
    scores = []
    for cause in dict.fromkeys(planted):
        hits = sum(one == other == cause for one, other in zip(found, planted, strict=True))
        scores.append(2 * hits / (list(found).count(cause) + list(planted).count(cause)))
    return sum(scores) / len(scores)


def test_the_score_is_that_of_the_definition() -> None:
    assert macro_f1(["a", "b", "b"], ["a", "b", "b"]) == 1
    assert macro_f1(["a", "a", "a"], ["a", "b", "b"]) == 0.25  # precision 1/3, recall 1; then 0
    assert set(judged(held_out=False)[1]) == {*CAUSES, HEALTHY}


def test_causes_of_the_public_runs_are_named() -> None:
    found, planted = judged(held_out=False)
    assert macro_f1(found, planted) > 0.95, list(zip(found, planted, strict=True))


def test_a_baseline_of_something_else_is_seen() -> None:
    run, own = tables_of(STUDY / "healthy-benchmark"), tables_of(STUDY / "healthy-large-benchmark")
    assert main_cause(run) == HEALTHY
    assert main_cause(run, own) == "mixed-configurations"


def test_causes_of_other_runs_are_named() -> None:
    found, planted = judged(held_out=True)
    assert macro_f1(found, planted) > 0.7, list(zip(found, planted, strict=True))
    guess = max(set(planted), key=planted.count)
    assert macro_f1([guess] * len(planted), planted) < 0.1
