"""A pipeline's operations from a table, replayed, and what they would take if all were alike.

The table has a row for each operation of each worker: dp_rank, stage, step, optype, start_ts,
duration and seq_id, in the format of ByteDance's StragglerAnalysis (arXiv 2505.05713). The slowdown
is the replayed step over that of an ideal job, in which each kind of computation takes its mean
over all workers and steps, and each kind of communication its median, as that paper has it. A
stage's slowdown is that of a job in which that stage alone is as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd

from common.csv_tables import numbers
from common.errors import UserError, naming
from common.perfmodel.replay.engine import run
from common.perfmodel.replay.gate import Gate
from common.perfmodel.replay.program import EXCHANGE, HOST, Program
from common.perfmodel.replay.program import Call as Collective

COLUMNS = ("dp_rank", "stage", "step", "optype", "start_ts", "duration", "seq_id")
PASSES = ("forward", "backward")
OVER_REPLICAS = ("grads-reduce-scatter", "params-all-gather")
OVER_STAGES = ("embedding-grads-all-reduce",)
OVER_ALL = ("optimizer-clip-main-grad",)
"""Collectives of the workers of one stage, of one replica, and of all."""
MEANT = ("layernorm-grads-all-reduce",)
"""Communication that is joined with nobody's here, as its group has one worker."""


@dataclass(frozen=True, eq=False)
class Slowdown:
    """Cost of differences between workers.

    Attributes:
        gate: the replay of the table as it is.
        ratio: replayed over ideal step.
        by_stage: stage → ratio of a job in which that stage alone is as it was, the largest first.
    """

    gate: Gate
    ratio: float
    by_stage: pd.Series

    @property
    def slowest_stage(self) -> int:
        """Returns the stage that costs most."""
        return int(self.by_stage.index[0])


def read_operations(path: Path) -> pd.DataFrame:
    """Reads a table of operations (.parquet or .csv). Raises UserError for a file that is none."""
    try:
        table = pd.read_parquet(path) if path.suffix == ".parquet" else pd.read_csv(path)
    except (OSError, ValueError, ImportError) as error:
        reason = getattr(error, "strerror", None) or "not a table"
        raise UserError(f"{path}: {reason}") from None
    if missing := [column for column in COLUMNS if column not in table.columns]:
        raise UserError(f"{path}: no column {', '.join(missing)}; a table of operations has them")
    if table.empty:
        raise UserError(f"{path}: no operations")
    table = table.loc[:, list(COLUMNS)].reset_index(drop=True)
    for column in table.columns.drop("optype"):
        least = 0 if column == "duration" else None
        table[column] = numbers(table, column, path, at_least=least)
    with naming(path):
        idle = ~table["duration"].ne(0).groupby(table["step"]).any()
        if idle.any():
            raise UserError(f"step {idle.idxmax()}: all of its operations take no time")
    return table.astype({"optype": str, "start_ts": float, "duration": float})


def slowdown(table: pd.DataFrame) -> Slowdown:
    """Computes the cost of differences between workers. Raises UserError for no pipeline."""
    programs = {step: _program(rows) for step, rows in table.groupby("step")}
    measured = table.assign(end=table["start_ts"] + table["duration"]).groupby("step")
    measured_s = measured["end"].max() - measured["start_ts"].min()
    replayed_s = pd.Series({step: _step_s(program) for step, program in programs.items()})
    steps = pd.DataFrame({"measured_s": measured_s, "replayed_s": replayed_s})
    errors = (replayed_s / measured_s - 1).abs()
    gate = Gate(
        steps.rename_axis("step"),
        f"the furthest off is step {errors.idxmax()}, by {errors.max():.1%}",
    )
    usual = _usual([*programs.values()])
    stages = sorted(table["stage"].unique())

    def mean_s(keep: Callable[[int], bool]) -> float:
        return float(
            np.mean([_step_s(_alike(program, usual, keep)) for program in programs.values()])
        )

    ideal_s = mean_s(lambda stage: False)
    if not ideal_s:
        raise UserError("operations usually take no time: there is nothing to compare with")
    by_stage = {stage: mean_s(lambda s, stage=stage: s == stage) / ideal_s for stage in stages}
    return Slowdown(
        gate, gate.replayed_s / ideal_s, pd.Series(by_stage).sort_values(ascending=False)
    )


def _step_s(program: Program) -> float:
    return float(run(program).end_s.max())


def _usual(programs: list[Program]) -> dict[str, float]:
    """Returns what each kind of operation usually takes, over all steps and workers."""
    works: dict[str, list[float]] = {}
    for program in programs:
        called = {member for call in program.calls for member in call.members}
        for operation, label in enumerate(program.label):
            if operation not in called:
                works.setdefault(_kind(label), []).append(program.work_s[operation])
        for call in program.calls:
            tails = [program.work_s[member] for member in call.members]
            works.setdefault(call.operation, []).extend(call.own_s + tail for tail in tails)
    calls = {call.operation for program in programs for call in program.calls} | {*MEANT}
    return {
        kind: float(np.median(values) if kind in calls else np.mean(values))
        for kind, values in works.items()
    }


def _kind(label: str) -> str:
    return label.partition("@")[0]


def _alike(program: Program, usual: dict[str, float], keep: Callable[[int], bool]) -> Program:
    """Gives operations what their kind usually takes, but for those of stages that are kept."""
    stages = [int(label.partition("@")[2]) for label in program.label]
    called = {member for call in program.calls for member in call.members}
    work_s = list(program.work_s)
    for operation, label in enumerate(program.label):
        if not keep(stages[operation]):
            work_s[operation] = 0.0 if operation in called else usual[_kind(label)]
    calls = [
        call
        if any(keep(stages[member]) for member in call.members)
        else replace(call, own_s=usual[call.operation])
        for call in program.calls
    ]
    return program.changed(work_s, calls)


def _program(rows: pd.DataFrame) -> Program:
    """Makes the program of one step."""
    program = Program()
    groups: dict[Hashable, list[tuple[int, float, float]]] = {}
    last_stage = int(rows["stage"].max())
    for (replica, stage), worker in rows.groupby(["dp_rank", "stage"]):
        computes = _add_worker(program, worker, int(replica), int(stage), groups)
        _add_transfers(program, worker, (int(replica), int(stage), last_stage), computes, groups)
    for (what, *_), members in groups.items():
        began_s = max(start for _, start, _ in members)
        ended_s = max(began_s, min(end for *_, end in members))
        for operation, _, end_s in members:
            program.work_s[operation] = max(0.0, end_s - ended_s)
        ids = tuple(operation for operation, *_ in members)
        program.calls.append(Collective(what, 0.0, ended_s - began_s, ids))
    return program


def _add_worker(
    program: Program, worker: pd.DataFrame, replica: int, stage: int, groups: dict
) -> dict[str, list[int]]:
    """Adds what a worker does one after another; returns the passes' operations by kind."""
    lane = program.add_lane(replica, HOST)
    computes: dict[str, list[int]] = {kind: [] for kind in PASSES}
    transfers = worker["optype"].str.contains("-send|-recv")
    # What begins at the same moment takes no time, but for the last.
    for row in worker[~transfers].sort_values(["start_ts", "duration"]).itertuples():
        operation = program.add(lane, row.duration, label=f"{row.optype}@{stage}")
        kind = row.optype.removesuffix("-compute")
        if kind in computes:
            computes[kind].append(operation)
        key = {
            OVER_REPLICAS: (row.optype, row.seq_id, "stage", stage),
            OVER_STAGES: (row.optype, row.seq_id, "replica", replica),
            OVER_ALL: (row.optype, row.seq_id),
        }
        for names, group in key.items():
            if row.optype in names:
                groups.setdefault(group, []).append(
                    (operation, row.start_ts, row.start_ts + row.duration)
                )
    return computes


def _add_transfers(
    program: Program,
    worker: pd.DataFrame,
    worker_of: tuple[int, int, int],
    computes: dict[str, list[int]],
    groups: dict,
) -> None:
    """Adds what a worker sends and receives; each is one call with that of the other stage."""
    replica, stage, last_stage = worker_of
    for kind, step in zip(PASSES, (1, -1), strict=True):
        for verb, sender in (("send", stage), ("recv", stage - step)):
            of_kind = worker[worker["optype"] == f"{kind}-{verb}"].sort_values("seq_id")
            if not len(of_kind):
                continue
            if not 0 <= sender <= last_stage or len(of_kind) != len(computes[kind]):
                raise UserError(
                    f"stage {stage}: {len(of_kind)} times {kind}-{verb} for "
                    f"{len(computes[kind])} passes: a pipeline of one chunk a stage is expected"
                )
            lane = program.add_lane(replica, EXCHANGE)
            for number, row in enumerate(of_kind.itertuples()):
                compute = computes[kind][number]
                before = [compute] if verb == "send" else computes[kind][:number][-1:]
                operation = program.add(
                    lane, 0.0, [(other, 0.0) for other in before], f"{kind}-transfer@{stage}"
                )
                if verb == "recv":
                    program.after[compute].append((operation, 0.0))
                groups.setdefault((f"{kind}-transfer", number, replica, sender), []).append(
                    (operation, row.start_ts, row.start_ts + row.duration)
                )
