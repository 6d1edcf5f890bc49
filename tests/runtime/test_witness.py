"""The witness of a measurement, and rounds that go on until intervals are narrow enough."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from ddplab_watch.machine_cores import CpuTimes
from rank_support import RankServer
from rounds_worker import ARMS, made_up
from scipy import stats

from common.analysis.runs import Run
from common.judged import FIRST_PAGE_ROUNDS, NOT_WITNESSED
from common.machine_state import judge_machine
from common.runtime.machine.witness import LEAST_SPAN_S, Reading, read_machine, witness_rows
from common.runtime.records.recorder import Recorder
from common.runtime.records.run_directory import RunDirectory
from common.samples import rotated
from common.tables import WITNESS_COLUMNS

WORKER = Path(__file__).with_name("rounds_worker.py")


def reading(
    at_s: float,
    busy_s: float | None,
    own_s: float | None,
    *,
    stolen_s: float | None = 0.0,
    machine: str = "m",
) -> Reading:
    """Returns what a rank on two cores sees."""
    times = CpuTimes(at_s, busy_s, stolen_s, own_s, {})
    return Reading(machine, cores=2, times=times, witness_ms=2.0, load_1min=1.5)


def shares(rows: list[dict]) -> list[tuple]:
    return [(row["others_share"], row["steal_share"], row["idle_share"]) for row in rows]


def test_what_the_ranks_did_not_compute_others_did() -> None:
    # Two cores for ten seconds: 16 of 20 core seconds busy, of which the ranks had 7 and 4.
    before = [reading(100, 50, 10, stolen_s=3), reading(100, 50, 20, stolen_s=3)]
    after = [reading(110, 66, 17, stolen_s=4), reading(110, 66, 24, stolen_s=4)]
    rows = witness_rows(before, after, ["h0", "h1"])
    assert shares(rows) == [(5 / 20, 1 / 20, 3 / 20)] * 2
    assert [(row["rank"], row["host"], row["span_s"]) for row in rows] == [
        (0, "h0", 10),
        (1, "h1", 10),
    ]


def test_ranks_of_another_machine_have_computed_nothing_here() -> None:
    before = [reading(0, 0, 0), reading(500, 0, 0, machine="n")]
    after = [reading(10, 20, 8), reading(510, 10, 10, machine="n")]
    assert shares(witness_rows(before, after, ["h0", "h1"])) == [(12 / 20, 0, 0), (0, 0, 10 / 20)]


@pytest.mark.parametrize(
    ("after", "expected"),
    [
        (reading(10, 18, None), (None, 0, 2 / 20)),  # no counter of the process
        (reading(10, None, 8, stolen_s=None), (None, None, None)),  # no /proc/stat
        (reading(LEAST_SPAN_S / 2, 0.1, 0.1), (None, None, None)),  # too short for its ticks
        (reading(10, 7.9, 8), (0, 0, 1 - 7.9 / 20)),  # ticks are rounded, shares are none below 0
    ],
)
def test_what_the_system_does_not_tell_is_left_empty(after: Reading, expected: tuple) -> None:
    rows = witness_rows([reading(0, 0, 0)], [after], ["h"])
    assert shares(rows) == [pytest.approx(expected, abs=1e-4)]


def test_at_the_beginning_nothing_has_gone_by() -> None:
    [row] = witness_rows([], [reading(0, 1, 1)], ["h"])
    assert {**row, "stage": "run", "round": 0}.keys() == set(WITNESS_COLUMNS)
    assert (row["span_s"], *shares([row])[0]) == (None,) * 4
    assert (row["witness_ms"], row["load_1min"]) == (2.0, 1.5)


def test_only_the_ranks_cores_are_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "proc").mkdir()
    lines = [f"cpu{core} {core}00 0 0 7 0 0 0 {core} 0 0" for core in range(4)]
    (tmp_path / "proc/stat").write_text("\n".join(["cpu 999 0 0 0 0 0 0 99 0 0", *lines]))
    monkeypatch.setattr("common.runtime.machine.witness.own_cores", lambda: frozenset({1, 3}))
    seen = read_machine(tmp_path)
    assert (seen.times.busy_s, seen.times.stolen_s) == (4.0, 0.04)  # in hundredths of a second
    assert (seen.cores, seen.times.own_s, seen.load_1min) == (2, None, None)
    assert seen.witness_ms > 0


def test_short_rounds_are_counted_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    moments = iter([reading(0.2 * index, 0.3 * index, 0.1 * index) for index in range(8)])
    monkeypatch.setattr("common.runtime.records.recorder.read_machine", lambda: next(moments))
    run = RunDirectory.create(tmp_path, "short", {}, {"status": "running"}, "run")
    recorder = Recorder(SimpleNamespace(gather=lambda item: [item], is_main=True), run, ["h"])
    with run:
        recorder.witness()
        assert len(list(recorder.rounds("a", 4, stage="arms"))) == 4
        recorder.witness()
        recorder.witness()
    rows = pd.read_csv(run.path / "witness.csv")
    assert rows["span_s"].round(1).tolist()[1:] == [0.2, 0.4, 0.6, 0.2, 0.4, 0.6, 0.2]
    # Of two cores others had 0.2 core seconds in each 0.2 seconds: a half.
    assert rows["others_share"].round(2).dropna().to_dict() == {3: 0.5, 6: 0.5}
    assert rows[rows["stage"] == "run"]["round"].tolist() == [0, 1, 2]


def rounds_until(half_width: float, least: int) -> int:
    """Returns the number of rounds after which the ratio is known so well, by SciPy."""
    for count in range(max(least, FIRST_PAGE_ROUNDS), 10):  # of ten and more some are trimmed
        times = made_up(count)
        logs = np.log(times["b"] / times["a"])
        low, high = stats.ttest_1samp(logs, 0).confidence_interval(0.95)
        if (high - low) / 2 <= half_width:
            return count
    raise AssertionError("choose a wider interval")


@pytest.mark.parametrize(
    ("options", "rounds"),
    [
        ({"rounds": 2, "budget_s": 1e6, "half_width": 0.2}, rounds_until(0.2, 2)),
        ({"rounds": 8, "budget_s": 1e6, "half_width": 0.2}, 8),  # narrow enough before
        ({"rounds": 3, "budget_s": 1e-9, "half_width": 1e-9}, 3),  # the time is up at once
        ({"rounds": 3, "half_width": 1e-9}, 3),
    ],
)
def test_all_ranks_make_as_many_whole_rounds_as_make_the_interval_narrow(
    options: dict, rounds: int, rank_server: RankServer, tmp_path: Path
) -> None:
    done = rank_server.succeed(WORKER, tmp_path, json.dumps(options), ranks=2)
    visits = [[number, arm] for number in range(rounds) for arm in rotated(ARMS, number)]
    assert [json.loads(text.splitlines()[-1]) for text in done.stdout] == [visits] * 2
    run = Run(tmp_path / "run", tmp_path)
    witness = run.table("witness.csv")
    assert tuple(witness) == WITNESS_COLUMNS
    moments = [("run", 0), *(("arms", number) for number in range(rounds + 1)), ("run", 1)]
    expected = [(stage, number, rank) for stage, number in moments for rank in range(2)]
    assert list(witness[["stage", "round", "rank"]].itertuples(index=False, name=None)) == expected
    assert witness[["witness_ms", "host"]].notna().all(axis=None)
    judged = judge_machine(witness)
    assert run.environment["machine_state"] == run.machine_state == judged.state
    assert run.environment["machine_reason"] == judged.reason


def test_a_run_without_a_witness_says_so(tmp_path: Path) -> None:
    assert Run(tmp_path, tmp_path).machine_state == NOT_WITNESSED
    assert judge_machine(pd.DataFrame(columns=WITNESS_COLUMNS)).state == NOT_WITNESSED
