"""Changes of a program, and what a step would take with each: what-if.

A change gives other work to operations, or another own time to calls; waiting follows from the
replay. It says what it assumes, or why it cannot be judged.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike

from common.errors import UserError
from common.perfmodel.collectives import AlphaBeta
from common.perfmodel.replay.engine import Replayed, run
from common.perfmodel.replay.gate import slowest
from common.perfmodel.replay.program import DEVICE, EXCHANGE, HOST, Call, Program
from common.samples import Interval, student

SLOW_OFTEN, SLOW_BY = 0.75, 1.03
"""A rank is slow that has the most work in so many of the steps, so many times the others'."""
CHANGE_ERROR = 0.09
"""Standard error of a predicted change, as a share of it: of the model ``equal`` in ``ddplab study
traces``, whose other model was kept from this."""
LOADER = "loader"


class NotJudged(Exception):
    """A change needs what a trace does not hold; the message names it."""


@dataclass(frozen=True)
class Predicted:
    """Effect of a change on the step.

    Attributes:
        name: name of the change.
        step_s: seconds of a step with it, with the interval of the mean of another run of as many
            steps (``of_another_run``).
        gain: share of the measured step that it saves, with the same interval.
        not_judged: why it could not be predicted; empty where it was.
        replayed: the program with the change, run.
    """

    name: str
    step_s: Interval | None = None
    gain: Interval | None = None
    assumed: tuple[str, ...] = ()
    not_judged: str = ""
    replayed: Replayed | None = None


Changed = tuple[Program, tuple[str, ...]]
"""A changed program, and what it assumes."""


def predicted(name: str, change: Callable[[Program], Changed], base: Replayed) -> Predicted:
    """Predicts one change of a replayed program."""
    try:
        program, assumed = change(base.program)
    except NotJudged as reason:
        return Predicted(name, not_judged=str(reason))
    replayed = run(program)
    before, after = (slowest(of.steps()) for of in (base, replayed))
    # What the replay is off by, it is off by with the change as well.
    off = before["measured_s"].sum() / before["replayed_s"].sum()
    measured_s = float(before["measured_s"].mean())
    step_s = of_another_run(after["replayed_s"] * off, measured_s)
    gain = step_s.map(lambda seconds: 1 - seconds / measured_s)
    return Predicted(name, step_s, gain, assumed, replayed=replayed)


def of_another_run(steps_s: ArrayLike, measured_s: float) -> Interval:
    """Returns the mean step after a change, with the interval of that of another run.

    The other run, of as many steps, differs from this one by chance as this one does from the long
    run: √2 times. The change itself is predicted with an error of ``CHANGE_ERROR``.
    ``measured_s`` is the mean step as it was.
    """
    mean = student(steps_s)
    of_change = 2 * CHANGE_ERROR * abs(mean.estimate - measured_s)
    off = math.hypot(math.sqrt(2) * mean.half_width, of_change)
    return replace(mean, low=mean.estimate - off, high=mean.estimate + off)


def no_slow_rank(program: Program) -> Changed:
    """Gives the slow rank the work of the others, operation by operation (their median)."""
    if len(program.ranks) < 2:
        raise NotJudged("a trace of one rank has no other to be slower than")
    work = rank_work(program)
    if (slow := slow_rank(work)) is None:
        raise NotJudged("no rank is slower than the others in most steps")
    rank, ratio = slow
    ours, *theirs = _alike(program, rank)
    work_s = list(program.work_s)
    assumed: tuple[str, ...] = ()
    same = [lane for lane in theirs if [len(x) for x in lane] == [len(x) for x in ours]]
    if same:
        for number, operations in enumerate(ours):
            if not operations:
                continue
            values = np.array([[program.work_s[o] for o in lane[number]] for lane in same])
            for operation, value in zip(operations, np.median(values, axis=0), strict=True):
                work_s[operation] = float(value)
    else:
        assumed = (f"all that rank {rank} does is slow alike: its operations are other ones",)
        for operation in (o for operations in ours for o in operations):
            work_s[operation] /= ratio
    return program.changed(work_s=work_s), (
        f"rank {rank}, which has {ratio:.2f} times the work of the others, works as they do",
        *assumed,
    )


def equal_work(program: Program) -> Changed:
    """Gives all ranks the same work in each step, operation by operation (their mean)."""
    if len(program.ranks) < 2:
        raise NotJudged("a trace of one rank has no other to share work with")
    if slow_rank(rank_work(program)) is not None:
        raise NotJudged("one rank has the most work in most steps: see what no slow rank gains")
    lanes = _alike(program, program.ranks[0])
    if len({tuple(len(operations) for operations in rank) for rank in lanes}) > 1:
        raise NotJudged("ranks do not do the same operations")
    work_s = list(program.work_s)
    for same_lane in zip(*lanes, strict=True):
        for operations in zip(*same_lane, strict=True):
            mean_s = sum(program.work_s[o] for o in operations) / len(operations)
            for operation in operations:
                work_s[operation] = mean_s
    return program.changed(work_s=work_s), ("ranks share each step's work, whose sum stays",)


def _alike(program: Program, rank: int) -> list[list[list[int]]]:
    """Returns the operations of a rank's lanes, and then those of each other rank."""
    lanes = {
        other: [
            lane.operations
            for lane in program.lanes
            if lane.rank == other and lane.kind != EXCHANGE
        ]
        for other in program.ranks
    }
    return [lanes.pop(rank), *lanes.values()]


def rank_work(program: Program) -> pd.DataFrame:
    """Returns the work of hosts, or of devices if longer: a row a step, a column a rank; s."""
    rows: dict[tuple[int, int], dict[str, float]] = {}
    for rank in program.ranks:
        steps = [step for step in program.steps if step.rank == rank]
        for kind in (HOST, DEVICE):
            for lane in program.lanes:
                if lane.rank != rank or lane.kind != kind:
                    continue
                operations = np.array(lane.operations)
                work = np.cumsum([program.work_s[o] for o in lane.operations])
                borders = [step.first for step in steps] + [steps[-1].last]
                at = np.searchsorted(operations, borders)
                total = np.concatenate([[0.0], work])
                until = [*at[1:-1], len(operations)]
                for step, begin, end in zip(steps, at[:-1], until, strict=True):
                    entry = rows.setdefault((step.number, rank), {HOST: 0.0, DEVICE: 0.0})
                    entry[kind] = max(entry[kind], float(total[end] - total[begin]))
    table = pd.Series({key: max(value.values()) for key, value in rows.items()})
    return table.unstack()


def slow_rank(work: pd.DataFrame) -> tuple[int, float] | None:
    """Returns the rank that has the most work in most steps, and how many times the others'."""
    if work.shape[1] < 2:
        return None
    rank = int(work.median().idxmax())
    ratios = work[rank] / work.drop(columns=rank).median(axis=1)
    ratio = float(ratios.median())
    often = float((work.idxmax(axis=1) == rank).mean())
    return (rank, ratio) if often >= SLOW_OFTEN and ratio >= SLOW_BY else None


def network_times(factor: float) -> Callable[[Program], Changed]:
    """Returns the change to links that are so many times as fast; latency stays."""
    return lambda program: _with_transfer(program, 1 / factor)


def in_bf16(program: Program) -> Changed:
    """Sends all-reduces of four-byte elements in two bytes each."""
    wide = [call for call in program.calls if _is_wide(call)]
    if not wide:
        raise NotJudged("no all-reduce of elements of four bytes")
    changed, assumed = _with_transfer(program, 0.5, _is_wide)
    further = ["casts take no time", "sums in bf16 are as fast, byte by byte"]
    if any(not call.item_bytes for call in wide):
        further.append("elements have four bytes: the trace does not tell")
    return changed, (*assumed, *further)


def _is_wide(call: Call) -> bool:
    return call.operation == "all_reduce" and call.item_bytes in (0, 4)


def _with_transfer(
    program: Program, share: float, applies: Callable[[Call], bool] = lambda call: True
) -> Changed:
    """Multiplies the part of calls' own time that is no latency."""
    if not program.calls:
        raise NotJudged("no collective in the trace")
    latency_s, assumed = latency(program)
    if len(program.ranks) < 2:
        assumed = (*assumed, "what the one rank waits for the others is sending, too")
    calls = []
    for call in program.calls:
        if applies(call):
            fixed_s = min(latency_s, call.own_s)
            call = replace(call, own_s=fixed_s + (call.own_s - fixed_s) * share)
        calls.append(call)
    return program.changed(calls=calls), assumed


def latency(program: Program) -> tuple[float, tuple[str, ...]]:
    """Returns the latency of all-reduces by a line through their sizes, and what is assumed."""
    calls = [call for call in program.calls if call.operation == "all_reduce" and call.size_bytes]
    table = pd.DataFrame(
        [(call.size_bytes, call.own_s) for call in calls if call.own_s > 0], columns=["size", "own"]
    )
    medians = table.groupby("size")["own"].median()
    if len(medians) >= 2:
        try:
            return AlphaBeta.fit(medians.index, medians.to_numpy()).alpha_s, ()
        except UserError:
            pass
    return 0.0, ("latency is none: the trace does not tell it from transfer",)


def loader_hidden(program: Program) -> Changed:
    """Takes no time for the next batch."""
    if LOADER not in program.label:
        raise NotJudged("no range of a DataLoader in the trace")
    work_s = [
        0.0 if label == LOADER else seconds
        for label, seconds in zip(program.label, program.work_s, strict=True)
    ]
    return program.changed(work_s=work_s), ("workers are fast enough, and take no core",)


def no_launches(program: Program) -> Changed:
    """Takes no time of the host between launches, as with CUDA graphs."""
    if not any(lane.kind == DEVICE for lane in program.lanes):
        raise NotJudged("nothing is launched on a CPU")
    work_s = list(program.work_s)
    for lane in program.lanes:
        if lane.kind == HOST:
            for operation in lane.operations:
                if program.label[operation] != LOADER:
                    work_s[operation] = 0.0
    return program.changed(work_s=work_s), ("kernels stay as they are, and so do waits for them",)


CHANGES: dict[str, Callable[[Program], Changed]] = {
    "no slow rank": no_slow_rank,
    "equal work": equal_work,
    "network × 2": network_times(2),
    "network × 10": network_times(10),
    "all-reduces in bf16": in_bf16,
    "loader hidden": loader_hidden,
    "launch cost gone": no_launches,
}
"""Change by its name."""
