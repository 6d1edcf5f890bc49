"""A run like that of 2026-11-26: two rounds, on a machine that had other work in them.

Its first page said "1.68 times, the exchange adds −21 %" and "0.56 → 1.44 (1.23 to 1.68)".
"""

from __future__ import annotations

import io
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from rich.console import Console

from common.analysis.findings.collect import findings_of, machine_line, machine_states
from common.analysis.findings.finding import Answer
from common.report import first_page
from common.report.run_page import RunPage
from common.runtime.paths import project_root

DATA = project_root() / "data"
ALONE_MS, ROUNDS, STEPS = 1000.0, 2, 3
MEDIANS_MS = {"single": ALONE_MS, "DDP": ALONE_MS / 1.68, "local": ALONE_MS / 1.68 / 0.79}
"""What a step took in the middle: DDP 1.68 times as fast as one device, and 21 % less than the same
computation without an exchange, which cannot be."""
SLOW, FAST = 2934 / 915, 205 / 915
"""One configuration took 205 to 2,934 ms within 20 s, 915 in the median."""


def strategies(folder: Path) -> None:
    """Makes a run of assignment 1 in which every configuration's steps differ as much."""
    shutil.copytree(DATA / "epyc-2-cores" / "assignment1" / "compare_strategies", folder)
    rows = [
        (name, 1, round_, step, rank, median_ms * factor, 0)
        for name, median_ms in MEDIANS_MS.items()
        for round_ in range(ROUNDS)
        for step, factor in enumerate([FAST, 1.0, SLOW][:: 1 - 2 * round_])
        for rank in range(2)
    ]
    path = folder / "strategy-times.csv"
    columns = pd.read_csv(path).columns
    pd.DataFrame(rows, columns=columns).to_csv(path, index=False)


def changes(folder: Path) -> None:
    """Makes a run of changes of which two rounds are there."""
    shutil.copytree(DATA / "xeon-2-cores/assignment4/emulated-2x1gbit/verify_changes", folder)
    path = folder / "steps.csv"
    steps = pd.read_csv(path, low_memory=False)
    steps[steps["round"].fillna(0) < ROUNDS].to_csv(path, index=False)


def busy(folder: Path) -> None:
    """Adds what a witness writes beside a process that keeps a core busy."""
    moments = [("run", 0), *(("rounds", round_) for round_ in range(ROUNDS + 1)), ("run", 1)]
    rows = [
        {
            **{"stage": stage, "round": round_, "rank": rank, "host": "host", "witness_ms": 2.3},
            **{"span_s": 5.0 if place else np.nan, "others_share": 0.4 if place else np.nan},
            **{"steal_share": 0.0, "idle_share": 0.0, "load_1min": 3.0},
        }
        for place, (stage, round_) in enumerate(moments)
        for rank in range(2)
    ]
    pd.DataFrame(rows).to_csv(folder / "witness.csv", index=False)


def answer_of(assignment: str, title: str, run: Path) -> Answer:
    findings = {one.question.title: one for one in findings_of(assignment, run)}
    return findings[title].answer


@pytest.mark.parametrize(("is_busy", "verdict"), [(True, "disturbed"), (False, "not settled")])
@pytest.mark.parametrize(
    ("assignment", "make", "title", "numbers"),
    [
        ("assignment1", strategies, "Speedup of DDP", ["1.68", "-21%", "−21"]),
        ("assignment4", changes, "The change that helps most", ["times as fast"]),
    ],
    ids=["strategies", "changes"],
)
def test_its_first_page_says_none_of_its_numbers(
    assignment: str,
    make: Callable[[Path], None],
    title: str,
    numbers: list[str],
    is_busy: bool,
    verdict: str,
    tmp_path: Path,
) -> None:
    make(tmp_path / "stage")
    if is_busy:
        busy(tmp_path / "stage")
    answer = answer_of(assignment, title, tmp_path)
    assert answer.text.startswith(f"{verdict}: ")
    assert not any(number in answer.text for number in numbers)
    assert "-21%" not in answer.spread
    assert answer.to_settle
    state = "disturbed" if is_busy else "not witnessed"
    [(stage, (its_state, _))] = machine_states(tmp_path).items()
    assert (stage, its_state) == ("stage", state)
    line = machine_line(machine_states(tmp_path))
    assert ("40 % of the cores" in line) == is_busy
    assert ("judged by rounds alone" in line) == (not is_busy)


def test_steps_of_another_speed_stand_in_a_box_on_its_first_page(tmp_path: Path) -> None:
    strategies(tmp_path / "stage")
    page = RunPage()
    page.open("assignment1", tmp_path)
    page.look("assignment1")
    first = page.first()
    [sentence] = first.violations
    low, high, usual = (
        float(number.replace(",", "")) for number in re.findall(r"\b[\d,]*\d\b", sentence)
    )
    assert (low / usual, high / usual) == pytest.approx((FAST, SLOW), rel=0.01)
    console = Console(file=io.StringIO(), width=300)
    first_page.print_page(first, console)
    assert f"Cannot be: {sentence}" in console.file.getvalue()
    for form in (first_page.as_html(first), first_page.as_typst(first)[0]):
        assert first_page.IMPOSSIBLE in form
        assert sentence in form


def test_only_stages_whose_numbers_are_shown_say_how_the_machine_was(tmp_path: Path) -> None:
    strategies(tmp_path / "stage")
    for name in ("stage-again", "cut"):
        shutil.copytree(tmp_path / "stage", tmp_path / name)
        busy(tmp_path / name)
    record = tmp_path / "cut" / "environment.json"
    record.write_text(record.read_text().replace('"complete"', '"failed"'))
    assert list(machine_states(tmp_path)) == ["stage"]
    assert machine_line(machine_states(tmp_path)).endswith("judged by rounds alone.")


def test_a_copied_stage_counts_where_the_one_it_was_copied_from_is_not_asked(
    tmp_path: Path,
) -> None:
    strategies(tmp_path / "stage")
    busy(tmp_path / "stage")
    record = tmp_path / "stage" / "environment.json"
    record.write_text(json.dumps(json.loads(record.read_text()) | {"copied_from": "elsewhere"}))
    [(state, _)] = machine_states(tmp_path).values()
    assert state == "disturbed"
    assert machine_states(tmp_path, with_copies=False) == {}


@pytest.mark.parametrize("content", ["", "stage,round\nrun,0\n"])
def test_a_witness_that_was_cut_costs_a_state_and_not_the_page(
    tmp_path: Path, content: str
) -> None:
    strategies(tmp_path / "stage")
    (tmp_path / "stage" / "witness.csv").write_text(content)
    [(state, reason)] = machine_states(tmp_path).values()
    assert state == "not witnessed"
    assert "cannot be read" in reason


def test_the_main_limit_of_a_disturbed_sweep_is_not_said(tmp_path: Path) -> None:
    stage = tmp_path / "sweep_text"
    shutil.copytree(DATA / "xeon-2-cores/assignment4/emulated-2x1gbit/sweep_text", stage)
    busy(stage)
    answer = answer_of("assignment4", "What limits scaling", tmp_path)
    assert "too small for this exchange" in answer.value  # as of the recorded run
    assert answer.text == "disturbed: what limits scaling"


def test_a_run_that_was_disturbed_in_all_stages_leaves_room_for_its_findings() -> None:
    states = {f"stage{number}": ("disturbed", f"reason {number}") for number in range(30)}
    line = machine_line(states)
    assert line.startswith("Of 30 stages the machine was disturbed in 30. stage0: reason 0.")
    assert "stage2: reason 2. Why in 27 more stages: witness.csv" in line
    assert "stage3" not in line
