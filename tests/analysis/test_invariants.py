"""Values that cannot be, put into recorded runs."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest

from common.analysis.findings.invariants import violations
from common.analysis.runs import recorded_assignment

RUNS = {name: recorded_assignment(name) for name in map("assignment{}".format, (0, 1, 2, 4))}
STRATEGIES = "compare_strategies/strategy-times.csv"


def more_rounds(times: pd.DataFrame) -> pd.DataFrame:
    """Repeats the first round six times, so that what differs is settled."""
    first = times[times["round"] == times["round"].min()]
    return pd.concat(
        [
            first.assign(round=round_, step_time_ms=first["step_time_ms"] * (1 + 0.001 * round_))
            for round_ in range(6)
        ],
        ignore_index=True,
    )


def scaled(column: str, factor: float, **where: object) -> Callable[[pd.DataFrame], pd.DataFrame]:
    def change(table: pd.DataFrame) -> pd.DataFrame:
        rows = pd.Series(True, index=table.index)
        for name, value in where.items():
            rows &= table[name] == value
        table.loc[rows, column] *= factor
        return table

    return change


@pytest.mark.parametrize(("assignment", "folder"), RUNS.items(), ids=RUNS)
def test_the_recorded_runs_violate_nothing(assignment: str, folder: Path) -> None:
    assert violations(folder) == ()


@pytest.mark.parametrize(
    ("assignment", "table", "change", "sentence"),
    [
        (
            "assignment1",
            STRATEGIES,
            lambda times: scaled("step_time_ms", 0.3, strategy="DDP")(more_rounds(times)),
            r"with its exchange DDP's step takes 0\.\d\d times",
        ),
        (
            "assignment1",
            STRATEGIES,
            lambda times: scaled("step_time_ms", 3.0, strategy="single")(more_rounds(times)),
            r"DDP on 2 ranks is \d\.\d\d times .* more than 2 times is not possible",
        ),
        (
            "assignment4",
            "sweep/steps.csv",
            scaled("forward_time_ms", 6.0),
            r"sweep: the parts of arm \d+ add up to",
        ),
        (
            "assignment0",
            "profile_training/device-peak.csv",
            scaled("flops_per_s", 1.2),
            "the device's peak in float32 is .* differ by",
        ),
        (
            "assignment2",
            "ddp_benchmark/local-times.csv",
            scaled("backward_time_ms", 1.5),
            "the backward pass without DDP takes .* apart",
        ),
    ],
)
def test_what_cannot_be_is_told_with_its_numbers(
    assignment: str, table: str, change: Callable, sentence: str, tmp_path: Path
) -> None:
    emulated = shutil.ignore_patterns("emulated-*")
    run = shutil.copytree(RUNS[assignment], tmp_path / "run", ignore=emulated)
    path = run / table
    change(pd.read_csv(path)).to_csv(path, index=False)
    told = violations(run)
    assert any(re.search(sentence, line) for line in told), told


def test_tables_that_are_cut_off_or_missing_violate_nothing(tmp_path: Path) -> None:
    run = shutil.copytree(RUNS["assignment1"], tmp_path / "run")
    path = run / STRATEGIES
    path.write_text(path.read_text()[:900])
    assert violations(run) == ()
    assert violations(tmp_path) == ()


def test_what_cannot_be_checked_is_said(tmp_path: Path) -> None:
    run = shutil.copytree(RUNS["assignment0"], tmp_path / "run")
    [peaks, *_] = sorted(run.glob("*/device-peak.csv"))
    peaks.write_text("device\na processor\n")
    [sentence] = violations(run)
    assert sentence.startswith("peaks apart: not checked, its tables cannot be read (")


def test_peaks_of_two_devices_may_differ(tmp_path: Path) -> None:
    run = shutil.copytree(RUNS["assignment0"], tmp_path / "assignment0")
    path = run / "profile_training" / "device-peak.csv"
    peak = pd.read_csv(path)
    peak.assign(device="another CPU", flops_per_s=2 * peak["flops_per_s"]).to_csv(path, index=False)
    assert violations(run) == ()
