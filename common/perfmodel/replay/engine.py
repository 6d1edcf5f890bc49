"""Runs a program: when each operation begins and ends.

Lanes run ahead as far as what they wait for has ended. Only calls have to be taken in the order of
time, because calls under way at once share a link in equal parts (processor sharing): a call ends
when the work that each call has been served reaches its own.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from common.errors import UserError
from common.perfmodel.replay.program import Program


@dataclass(frozen=True, eq=False)
class Replayed:
    """A program that was run: seconds at which each operation begins and ends."""

    program: Program
    start_s: NDArray
    end_s: NDArray

    def steps(self) -> pd.DataFrame:
        """Returns a row for each step of each rank: rank, step, measured_s, replayed_s."""
        rows = [
            (
                step.rank,
                step.number,
                step.measured_s,
                (self.end_s if step.until_end else self.start_s)[step.last]
                - self.start_s[step.first],
            )
            for step in self.program.steps
        ]
        return pd.DataFrame(rows, columns=["rank", "step", "measured_s", "replayed_s"])


def run(program: Program) -> Replayed:
    """Runs a program. Raises UserError where operations wait for each other in a circle."""
    running = _Running(program)
    running.finish()
    return Replayed(program, np.array(running.start_s), np.array(running.end_s))


class _Link:
    """Calls that share a link: each is served at the same rate, 1/n of n."""

    def __init__(self) -> None:
        self.now_s = self.served_s = 0.0
        self.ends: list[tuple[float, int]] = []

    def pass_to(self, moment_s: float) -> None:
        """Serves all calls until a moment."""
        if self.ends:
            self.served_s += (moment_s - self.now_s) / len(self.ends)
        self.now_s = moment_s

    def next_end_s(self) -> float:
        """Returns the moment at which the first of them ends."""
        return self.now_s + max(0.0, self.ends[0][0] - self.served_s) * len(self.ends)


class _Running:
    """The state of a run."""

    def __init__(self, program: Program) -> None:
        self.program = program
        count = len(program.lane)
        nan = float("nan")
        self.start_s, self.end_s = [nan] * count, [nan] * count
        self.call_of = {m: index for index, call in enumerate(program.calls) for m in call.members}
        self.arrived = [0] * len(program.calls)
        self.waiting: dict[int, list[int]] = defaultdict(list)  # operation → lanes that wait for it
        self.position = [0] * len(program.lanes)
        self.free_s: list[list[float]] = [[0.0] * lane.servers for lane in program.lanes]
        self.events: list[tuple[float, int, int, int]] = []  # (when, 0 end or 1 begin, call, stamp)
        self.link, self.stamp = _Link(), 0
        self.ready = list(range(len(program.lanes)))[::-1]

    def finish(self) -> None:
        """Runs all lanes to their ends."""
        while True:
            while self.ready:
                self.advance(self.ready.pop())
            if not self.events:
                break
            moment_s, begins, index, stamp = heapq.heappop(self.events)
            if begins:
                self.begin(moment_s, index)
            elif stamp in (-1, self.stamp):
                self.end(moment_s, index)
        if any(map(np.isnan, self.end_s)):
            waiting = sum(map(np.isnan, self.end_s))
            raise UserError(
                f"{waiting} operations of {len(self.end_s)} wait for each other for good"
            )

    def advance(self, index: int) -> None:
        """Runs one lane until it has to wait."""
        program, end_s, free_s = self.program, self.end_s, self.free_s[index]
        operations, work_s = program.lanes[index].operations, program.work_s
        while self.position[index] < len(operations) and free_s:
            operation = operations[self.position[index]]
            begin_s = max(free_s[0], program.not_before_s.get(operation, 0.0))
            for other, lag_s in program.after[operation]:
                other_s = end_s[other]
                if other_s != other_s:  # NaN: not ended
                    self.waiting[other].append(index)
                    return
                begin_s = max(begin_s, other_s + lag_s)
            heapq.heappop(free_s)
            self.position[index] += 1
            self.start_s[operation] = begin_s
            if operation in self.call_of:
                self.arrive(self.call_of[operation])
            else:
                self.done(operation, begin_s + work_s[operation])

    def done(self, operation: int, moment_s: float) -> None:
        """Notes the end of an operation and wakes what waits for it."""
        self.end_s[operation] = moment_s
        heapq.heappush(self.free_s[self.program.lane[operation]], moment_s)
        if operation in self.waiting:
            self.ready += self.waiting.pop(operation)

    def arrive(self, index: int) -> None:
        """Notes that one more rank has come to a call."""
        call = self.program.calls[index]
        self.arrived[index] += 1
        if self.arrived[index] == len(call.members):
            last_s = max(self.start_s[member] for member in call.members)
            heapq.heappush(self.events, (last_s, 1, index, -1))

    def begin(self, moment_s: float, index: int) -> None:
        """Begins a call, to which all ranks have come."""
        call = self.program.calls[index]
        if not call.shares:
            heapq.heappush(self.events, (moment_s + call.own_s, 0, index, -1))
            return
        self.link.pass_to(moment_s)
        heapq.heappush(self.link.ends, (self.link.served_s + call.own_s, index))
        self.expect_end()

    def end(self, moment_s: float, index: int) -> None:
        """Ends a call on all its ranks."""
        call = self.program.calls[index]
        if call.shares:
            self.link.pass_to(moment_s)
            heapq.heappop(self.link.ends)
            self.expect_end()
        for member in call.members:
            self.done(member, moment_s + self.program.work_s[member])
            self.ready.append(self.program.lane[member])

    def expect_end(self) -> None:
        """Plans the next end on the link; plans made before are void."""
        self.stamp += 1
        if self.link.ends:
            index = self.link.ends[0][1]
            heapq.heappush(self.events, (self.link.next_end_s(), 0, index, self.stamp))


def link_works(spans: NDArray) -> NDArray:
    """Computes what calls that shared a link would have taken alone, each by its span.

    It undoes the sharing: while n are under way, a call is served 1/n of the time. ``spans``
    [calls, 2] are seconds of beginning (of the last rank) and end.
    """
    moments = np.unique(spans)
    if len(moments) < 2:
        return np.zeros(len(spans))
    under_way = np.zeros(len(moments))
    first, last = np.searchsorted(moments, spans[:, 0]), np.searchsorted(moments, spans[:, 1])
    np.add.at(under_way, first, 1)
    np.add.at(under_way, last, -1)
    counts = np.maximum(np.cumsum(under_way)[:-1], 1)
    served = np.concatenate([[0.0], np.cumsum(np.diff(moments) / counts)])
    return served[last] - served[first]
