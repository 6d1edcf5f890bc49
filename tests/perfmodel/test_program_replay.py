"""A program run again: beginnings and ends that were computed by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from command_line import ROOT

from common.errors import UserError
from common.perfmodel.replay.changes import (
    NotJudged,
    equal_work,
    in_bf16,
    loader_hidden,
    network_times,
    no_launches,
    no_slow_rank,
    predicted,
)
from common.perfmodel.replay.engine import link_works, run
from common.perfmodel.replay.gate import gate_of
from common.perfmodel.replay.pipeline import read_operations, slowdown
from common.perfmodel.replay.program import DEVICE, EXCHANGE, HOST, Call, Program, Step
from common.perfmodel.replay.waits import waits

STRAGGLERS = ROOT.parent / "shared" / "measured" / "traces" / "stragglers-8-gpus-trace-ST.parquet"


def job(work_s: tuple[float, ...] = (1.0, 3.0), own_s: float = 2.0, steps: int = 3) -> Program:
    """Returns ranks that work, add up a gradient, wait for it and work 0.5 s, step after step."""
    program = Program()
    hosts = [program.add_lane(rank, HOST) for rank in range(len(work_s))]
    links = [program.add_lane(rank, EXCHANGE, 2) for rank in range(len(work_s))]
    for number in range(steps):
        members = []
        firsts = []
        for host, link, seconds in zip(hosts, links, work_s, strict=True):
            firsts.append(program.add(host, seconds))
            members.append(program.add(link, 0.0, [(firsts[-1], 0.0)]))
            last = program.add(host, 0.5, [(members[-1], 0.0)])
            span_s = max(work_s) + own_s + 0.5
            rank = program.lanes[host].rank
            program.steps.append(Step(rank, number, firsts[-1], last, True, span_s))
        program.calls.append(Call("all_reduce", 4e6, own_s, tuple(members), 4, shares=True))
    return program


def test_ranks_wait_for_the_last_and_then_for_the_exchange() -> None:
    replayed = run(job())
    gate = gate_of(replayed)
    assert gate.steps["replayed_s"].to_numpy() == pytest.approx([5.5] * 3)
    assert gate.within == 3
    table = waits(replayed).set_index(["rank", "cause"])["seconds"]
    assert table[0, "the last rank"] == pytest.approx(2.0)
    assert table[0, "the exchange"] == table[1, "the exchange"] == pytest.approx(2.0)
    assert (1, "the last rank") not in table[table > 1e-9]


def test_calls_at_once_share_the_link_and_sharing_is_undone() -> None:
    # 2 s of work from 0 s on and 1 s from 1 s on: half each until the second has its second at 3 s,
    # by when the first has had 1 + 1.
    program = Program()
    lane = program.add_lane(0, EXCHANGE, 2)
    ids = [program.add(lane, 0.0), program.add(lane, 0.0)]
    program.not_before_s = {ids[0]: 0.0, ids[1]: 1.0}
    for operation, own_s in zip(ids, (2.0, 1.0), strict=True):
        program.calls.append(Call("all_reduce", 1.0, own_s, (operation,), shares=True))
    ended = run(program)
    assert ended.end_s == pytest.approx([3.0, 3.0])
    spans = np.stack([ended.start_s, ended.end_s], axis=1)
    assert link_works(spans) == pytest.approx([2.0, 1.0])


def test_a_third_call_waits_for_one_of_two_threads() -> None:
    program = Program()
    lane = program.add_lane(0, EXCHANGE, 2)
    for own_s in (1.0, 3.0, 1.0):
        operation = program.add(lane, 0.0)
        program.calls.append(Call("all_reduce", 1.0, own_s, (operation,)))
    assert run(program).start_s == pytest.approx([0.0, 0.0, 1.0])


def test_operations_that_wait_for_each_other_are_refused() -> None:
    program = Program()
    lanes = [program.add_lane(0, HOST), program.add_lane(0, DEVICE)]
    program.add(lanes[0], 1.0, [(1, 0.0)])
    program.add(lanes[1], 1.0, [(0, 0.0)])
    with pytest.raises(UserError, match="wait for each other"):
        run(program)


def test_a_replay_that_is_off_predicts_nothing() -> None:
    program = job()
    program.steps = [Step(s.rank, s.number, s.first, s.last, True, 5.0) for s in program.steps]
    with pytest.raises(UserError, match=r"\+10\.0%.*step 0 of rank"):
        gate_of(run(program)).check()


@pytest.mark.parametrize(
    ("change", "step_s"),
    [(network_times(2), 4.5), (network_times(0.5), 7.5), (in_bf16, 4.5), (no_slow_rank, 3.5)],
)
def test_changes_move_the_step_as_computed_by_hand(change, step_s) -> None:
    answer = predicted("change", change, run(job()))
    assert answer.step_s.estimate == pytest.approx(step_s)
    assert answer.gain.estimate == pytest.approx(1 - step_s / 5.5)


def test_work_that_ranks_have_by_turns_is_shared() -> None:
    program = job(steps=4)
    for step in program.steps:
        if step.number % 2:
            program.work_s[step.first] = 4.0 - program.work_s[step.first]
    answer = predicted("change", equal_work, run(program))
    # One rank has 3 s of work and the other 1 s; with 2 s each a step takes 2 + 2 + 0.5 s.
    assert answer.step_s.estimate == pytest.approx(4.5)
    with pytest.raises(NotJudged, match="no rank is slower"):
        no_slow_rank(program)
    with pytest.raises(NotJudged, match="see what no slow rank gains"):
        equal_work(job())


def test_what_a_trace_does_not_hold_is_not_judged() -> None:
    equal, alone = job((1.0, 1.0)), job((1.0,))
    for change, program in (
        (no_slow_rank, equal),
        (no_slow_rank, alone),
        (equal_work, alone),
        (loader_hidden, equal),
        (no_launches, equal),
    ):
        with pytest.raises(NotJudged):
            change(program)


def test_a_device_waits_for_its_host_until_launches_cost_nothing() -> None:
    program = Program()
    host, stream = program.add_lane(0, HOST), program.add_lane(0, DEVICE)
    kernels = []
    for _ in range(4):
        launch = program.add(host, 1.0)
        kernels.append(program.add(stream, 0.25, [(launch, 0.0)]))
    program.steps.append(Step(0, 0, kernels[0], kernels[-1], True, 3.25))
    replayed = run(program)
    assert gate_of(replayed).error == pytest.approx(0.0)
    assert waits(replayed).iloc[0].tolist() == [0, "its host", pytest.approx(2.25)]
    answer = predicted("launches", no_launches, replayed)
    assert answer.step_s.estimate == pytest.approx(1.0)


def test_the_stage_of_a_published_pipeline_is_named() -> None:
    # The expected numbers are the authors' (StragglerAnalysis, data/result-ST.json).
    if not STRAGGLERS.exists():
        pytest.skip(f"no {STRAGGLERS}")
    result = slowdown(read_operations(STRAGGLERS))
    assert result.ratio == pytest.approx(1.1787, rel=0.002)
    assert result.slowest_stage == 3
    assert result.by_stage[3] == pytest.approx(1.2323, rel=0.002)
    assert result.gate.is_open


ROW = {"dp_rank": 0, "stage": 0, "step": 1, "optype": "forward-compute"}
ROWS = pd.DataFrame([ROW | {"start_ts": t, "duration": 1.0, "seq_id": t} for t in range(3)])


def test_a_job_of_one_stage_is_its_own_ideal(tmp_path: Path) -> None:
    ROWS.to_csv(tmp_path / "table.csv")
    assert slowdown(read_operations(tmp_path / "table.csv")).ratio == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("column", "values", "message"),
    [
        ("duration", ["1", "abc", "1"], r"line 3, column 'duration': 'abc' is not a number"),
        ("duration", [1, 1, -1], r"line 4, column 'duration': '-1' is not a number of at least 0"),
        ("start_ts", ["soon", "1", "2"], r"line 2, column 'start_ts': 'soon' is not a number"),
        ("stage", [0, np.inf, 0], r"line 3, column 'stage'"),
        ("duration", [0, 0, 0], r"step 1: all of its operations take no time"),
    ],
)
def test_operations_that_cannot_be_are_refused(tmp_path: Path, column, values, message) -> None:
    path = tmp_path / "table.csv"
    ROWS.assign(**{column: values}).to_csv(path)
    with pytest.raises(UserError, match=rf"table\.csv: {message}"):
        read_operations(path)


def test_a_table_of_something_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    pd.DataFrame({"step": [1], "stage": [0]}).to_csv(path)
    with pytest.raises(UserError, match=r"table\.csv: no column dp_rank"):
        read_operations(path)
    (tmp_path / "table.parquet").write_bytes(b"no parquet")
    with pytest.raises(UserError, match="not a table"):
        read_operations(tmp_path / "table.parquet")
