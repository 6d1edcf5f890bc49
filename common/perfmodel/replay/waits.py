"""Finds what lanes of a replay wait for: their host, the last rank of a collective, exchange."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import pandas as pd

from common.perfmodel.replay.engine import Replayed, run
from common.perfmodel.replay.program import DEVICE, EXCHANGE, HOST, Program

LAST_RANK, SENDING, FOR_HOST, FOR_DEVICE = "the last rank", "the exchange", "its host", "its device"
CAUSES = (FOR_HOST, FOR_DEVICE, LAST_RANK, SENDING)


def waits(replayed: Replayed) -> pd.DataFrame:
    """Returns how long each rank's lane that computes waits, and for what.

    Columns: rank, cause (a member of ``CAUSES``), seconds (a step, on average). A wait is the
    time between two operations of the lane; its cause is what ended last. Of the waits for
    collectives the exchange has what would remain if all other ranks came first, by a run of the
    rank alone; the last rank has the rest.
    """
    program = replayed.program
    total = _totals(replayed)
    for rank in program.ranks if len(program.ranks) > 1 else ():
        together_s = total.pop((rank, SENDING), 0.0)
        alone_s = min(together_s, _totals(run(_alone(program, rank))).get((rank, SENDING), 0.0))
        total |= {(rank, SENDING): alone_s, (rank, LAST_RANK): together_s - alone_s}
    steps = max(1, len(program.steps) // max(1, len(program.ranks)))
    rows = [(*key, seconds / steps) for key, seconds in sorted(total.items())]
    return pd.DataFrame(rows, columns=["rank", "cause", "seconds"])


def _alone(program: Program, rank: int) -> Program:
    """Returns the program in which no call of a rank has to wait for another rank."""
    of_rank = [
        [member for member in call.members if program.lanes[program.lane[member]].rank == rank]
        for call in program.calls
    ]
    calls = [
        replace(call, members=tuple(members))
        for call, members in zip(program.calls, of_rank, strict=True)
        if members
    ]
    return program.changed(calls=calls)


def _totals(replayed: Replayed) -> dict[tuple[int, str], float]:
    """Returns seconds of waits by rank and cause; for collectives all is the exchange's."""
    program, start_s, end_s = replayed.program, replayed.start_s, replayed.end_s
    called = {member for call in program.calls for member in call.members}
    total: dict[tuple[int, str], float] = defaultdict(float)
    for lane in _computing(replayed):
        before_s = None
        for operation in lane.operations:
            if before_s is not None and start_s[operation] > before_s and program.after[operation]:
                edges = program.after[operation]
                cause, _ = max(edges, key=lambda edge: end_s[edge[0]] + edge[1])
                kind = program.lanes[program.lane[cause]].kind
                name = FOR_HOST if kind == HOST else FOR_DEVICE
                name = SENDING if cause in called else name
                total[lane.rank, name] += start_s[operation] - before_s
            before_s = end_s[operation]
    return total


def _computing(replayed: Replayed) -> list:
    """Returns the lane of each rank that computes most: of its device where it has one."""
    program = replayed.program
    chosen = {}
    for lane in program.lanes:
        if lane.kind == EXCHANGE or not lane.operations:
            continue
        busy_s = sum(program.work_s[operation] for operation in lane.operations)
        key = (lane.kind == DEVICE, busy_s)
        if lane.rank not in chosen or key > chosen[lane.rank][0]:
            chosen[lane.rank] = (key, lane)
    return [lane for _, lane in chosen.values()]
