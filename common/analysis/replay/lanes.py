"""One rank's trace as lanes of operations: its host, its streams, and what sends.

**On a CPU** the main thread computes, hands collectives to gloo's two threads, and waits for them:
under DDP before it copies a bucket out, elsewhere where it stands still until one ends. What it
does between two of these moments is its work; how long it stands still is not taken from the trace.

**On a GPU** the host is a lane of its own, on which launches follow each other with the time that
the trace shows between them. A kernel waits for its launch, for the one before it in its stream,
and for collectives that its stream was told to wait for. The host waits where it synchronises.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from common.perfmodel.replay.changes import LOADER
from common.perfmodel.replay.program import EXCHANGE, HOST, Program
from common.traces.operation_names import collective
from common.traces.rank_trace import RankTrace, Span

GLOO_THREADS = 2
STILL_US = 100.0
"""Least time that a main thread has to stand still to be taken to wait for a collective."""


@dataclass(eq=False)
class Joinable:
    """A collective of one rank, to be joined with those of the others.

    Attributes:
        call: the call as its program handed it over.
        operation: id of its operation in the program.
        start_us, end_us: the call on the clock of the rank's trace, with waits for other ranks.
        step: number of the step in which it was handed over.
        shares: whether calls share a link.
    """

    call: Span
    what: str
    operation: int
    start_us: float
    end_us: float
    step: int
    shares: bool


@dataclass(eq=False)
class RankLanes:
    """Lanes and calls of one rank.

    Attributes:
        trace: the trace.
        calls: collectives, in the order in which they were handed over.
        boundaries: (step, operation, until its end, µs on the trace's clock), a row for the
            beginning of each step and one for the end of the last.
        first: operations that begin a lane, with the moment on the trace's clock.
        seen_us: operation → beginning and end on the trace's clock.
    """

    trace: RankTrace
    calls: list[Joinable] = field(default_factory=list)
    boundaries: list[tuple[int, int, bool, float]] = field(default_factory=list)
    first: list[tuple[int, float]] = field(default_factory=list)
    seen_us: dict[int, tuple[float, float]] = field(default_factory=dict)


class StepRanges:
    """Some steps of a trace: number → range, and the moments at which they begin and end."""

    def __init__(self, trace: RankTrace, steps: Sequence[int]) -> None:
        self.spans = {number: span for number, span in numbered_steps(trace) if number in steps}
        self.first_us = min(span.start_us for span in self.spans.values())
        self.last_us = max(span.end_us for span in self.spans.values())
        self._starts = sorted((span.start_us, number) for number, span in self.spans.items())

    def holds(self, span: Span) -> bool:
        """Returns True if something begins in the time of these steps."""
        return self.first_us <= span.start_us < self.last_us

    def step_at(self, moment_us: float) -> int:
        """Returns the number of the step that a moment is in; of the first where it is before."""
        return self._starts[max(0, bisect_right(self._starts, (moment_us, 1 << 60)) - 1)][1]

    def cuts(self) -> list[Cut]:
        """Returns the cuts at which steps begin, and the last one ends."""
        begins = [Cut(span.start_us, span.start_us, step=n) for n, span in self.spans.items()]
        return [*begins, Cut(self.last_us, self.last_us)]


@dataclass(eq=False)
class Cut:
    """A moment of the host at which it hands something over, waits, or begins a step.

    It stands still from ``start_us`` to ``end_us``; ``waits`` and ``hands`` are indices.
    """

    start_us: float
    end_us: float
    waits: int = -1
    hands: int = -1
    step: int | None = None


class HostLane:
    """Makes a host's operations from its cuts."""

    def __init__(self, program: Program, trace: RankTrace) -> None:
        self.program, self.trace = program, trace
        self.lane = program.add_lane(trace.rank, HOST)
        self.loads = [(span.start_us, span.end_us) for span in trace.loads]
        self.handed: dict[int, int] = {}
        self.waits: list[tuple[int, int, float]] = []  # operation, index, when it resumed
        self.steps: list[tuple[int, int, float]] = []  # step, operation, µs
        self.seen_us: dict[int, tuple[float, float]] = {}
        self.last = -1

    def make(self, cuts: Sequence[Cut], start_us: float) -> RankLanes:
        """Adds an operation for the time up to each cut; returns the rank's lanes.

        What a loader takes is an operation of its own.
        """
        now_us, pending, step = start_us, None, None
        ordered = sorted(cuts, key=lambda cut: cut.start_us)
        for cut in [*ordered, None]:
            until_us = max(cut.start_us, now_us) if cut else now_us
            first = True
            for begin_us, end_us, label in self._pieces(now_us, until_us):
                self.last = self.program.add(self.lane, (end_us - begin_us) / 1e6, label=label)
                self.seen_us[self.last] = (begin_us, end_us)
                if first and pending is not None:
                    self.waits.append((self.last, *pending))
                if first and step is not None:
                    self.steps.append((step[0], self.last, step[1]))
                first = False
            if cut is None:
                break
            pending = (cut.waits, cut.end_us) if cut.waits >= 0 else None
            step = None if cut.step is None else (cut.step, cut.start_us)
            if cut.hands >= 0:
                self.handed[cut.hands] = self.last
            now_us = max(cut.end_us, until_us)
        first = [(self.program.lanes[self.lane].operations[0], start_us)]
        return RankLanes(self.trace, first=first, seen_us=self.seen_us)

    def _pieces(self, start_us: float, end_us: float) -> list[tuple[float, float, str]]:
        """Cuts a stretch of time where a loader begins and ends."""
        pieces, now_us = [], start_us
        for begin_us, until_us in self.loads:
            begin_us, until_us = max(begin_us, now_us), min(until_us, end_us)
            if begin_us < until_us:
                pieces += [(now_us, begin_us, ""), (begin_us, until_us, LOADER)]
                now_us = until_us
        return [*pieces, (now_us, end_us, "")]


def host_lanes(program: Program, trace: RankTrace, steps: Sequence[int]) -> RankLanes:
    """Adds the lanes of a rank that computes on its CPU, for some steps of its trace."""
    ranges = StepRanges(trace, steps)
    calls = _matched(trace, ranges)
    main = main_thread(trace)
    bucket_waits = _bucket_waits(trace, calls, main)
    cuts, ends_us = ranges.cuts(), []
    for index, (handed, sent) in enumerate(calls):
        wait = bucket_waits.get(index) or _wait(main, trace, handed, sent)
        end_us = sent.end_us
        if wait is not None:
            end_us = max(sent.start_us, min(end_us, wait[1]))  # noted late by gloo's thread
            still_us = wait[0] if sent.end_us > wait[0] else wait[1]
            cuts.append(Cut(still_us, wait[1], waits=index))
        ends_us.append(end_us)
        cuts.append(Cut(handed.start_us, handed.start_us, hands=index))
    host = HostLane(program, trace)
    lanes = host.make(cuts, ranges.first_us)
    exchange = program.add_lane(trace.rank, EXCHANGE, GLOO_THREADS)
    taken_up_us = _usual_lag_us(calls)
    for index, (handed, sent) in enumerate(calls):
        operation = program.add(exchange, 0.0, [(host.handed[index], taken_up_us / 1e6)])
        step = ranges.step_at(handed.start_us)
        what = collective(handed.name) or collective(sent.name) or handed.name
        lanes.seen_us[operation] = (sent.start_us, ends_us[index])
        lanes.calls.append(
            Joinable(sent, what, operation, sent.start_us, ends_us[index], step, shares=True)
        )
    # How long a thread takes to go on once it may is the same for all its waits: their mean.
    still_us = {cut.waits: cut.start_us for cut in cuts if cut.waits >= 0}
    real = {index: at - ends_us[index] for _, index, at in host.waits if still_us[index] < at}
    goes_on_us = max(0.0, float(np.mean(list(real.values())))) if real else 0.0
    for operation, index, _ in host.waits:
        lag_us = goes_on_us if index in real else 0.0
        program.after[operation].append((lanes.calls[index].operation, lag_us / 1e6))
    lanes.boundaries = [(n, operation, False, at_us) for n, operation, at_us in host.steps]
    lanes.boundaries.append((-1, host.last, True, ranges.last_us))
    return lanes


def _usual_lag_us(calls: Sequence[tuple[Span, Span]]) -> float:
    """Returns how long gloo takes to begin a collective with a thread to spare: the mean."""
    lags = []
    for index, (handed, sent) in enumerate(calls):
        under_way = sum(other.end_us > handed.start_us for _, other in calls[:index][-8:])
        if under_way < GLOO_THREADS:
            lags.append(max(0.0, sent.start_us - handed.start_us))
    return float(np.mean(lags)) if lags else 0.0


def numbered_steps(trace: RankTrace) -> list[tuple[int, Span]]:
    """Returns the number of each step with its range."""
    return [(int(step.name.partition("#")[2]), step) for step in trace.steps]


def _matched(trace: RankTrace, ranges: StepRanges) -> list[tuple[Span, Span]]:
    """Returns collectives as (handed over, sent), in the order in which they were handed over.

    Threads take collectives from one queue in order, but two that start within microseconds of
    each other may be noted the other way round; their sizes then tell them apart.
    """
    handed = [span for span in trace.handed if ranges.holds(span) and collective(span.name)]
    queue = [span for span in trace.gloo if ranges.holds(span)]
    if len(handed) != len(queue):  # one hands over several, or none: taken as handed when sent
        return [(replace(span, end_us=span.start_us), span) for span in queue]
    matched = []
    for index, call in enumerate(handed):
        near = queue[:GLOO_THREADS]
        fits = [span for span in near if call.size_bytes and span.size_bytes == call.size_bytes]
        chosen = (fits or near)[0]
        if not fits and len(near) > 1 and abs(near[0].start_us - near[1].start_us) < STILL_US:
            copied = _copied_before(trace, handed, index)
            chosen = next((span for span in near if span.size_bytes == copied), chosen)
        queue.remove(chosen)
        matched.append((call, chosen))
    return matched


def _copied_before(trace: RankTrace, handed: Sequence[Span], index: int) -> float:
    """Returns the bytes of the gradients that were copied in since the call before this one."""
    since = handed[index - 1].start_us if index else -np.inf
    return sum(
        copy.size_bytes
        for copy in trace.copied_in
        if since < copy.start_us < handed[index].start_us
    )


@dataclass(frozen=True, eq=False)
class MainThread:
    """Beginnings and ends of whatever a thread does, ascending."""

    starts: NDArray
    ends: NDArray

    def idle_before(self, moment_us: float) -> float:
        """Returns since when nothing began or ended before something begins at a moment."""
        began = self.starts[max(0, bisect_left(self.starts, moment_us) - 1)]
        ended = self.ends[max(0, bisect_right(self.ends, moment_us) - 1)]
        return float(min(moment_us, max(began, ended if ended <= moment_us else began)))

    def longest_pause(self, since_us: float, until_us: float) -> tuple[float, float]:
        """Returns the longest time in which nothing begins or ends, up to something that begins."""
        first, last = bisect_right(self.starts, since_us), bisect_right(self.starts, until_us)
        resumed = [*self.starts[first:last], until_us]
        pauses = [(max(since_us, self.idle_before(at_us)), float(at_us)) for at_us in resumed]
        return max(pauses, key=lambda pause: pause[1] - pause[0])


def main_thread(trace: RankTrace) -> MainThread:
    rows = trace.busy[trace.busy[:, 2] == trace.steps[0].thread]
    return MainThread(rows[:, 0], np.sort(rows[:, 1]))


def bucket_copies(
    trace: RankTrace, handed: Sequence[Span]
) -> dict[int, tuple[list[Span], list[Span]]]:
    """Finds DDP's buckets among collectives: index → copies into it, and out of it.

    A bucket is an all-reduce with copies of gradients since the call before. Buckets are copied
    out in order, as many gradients from each as were copied in; none where gradients are views.
    """
    buckets: dict[int, tuple[list[Span], list[Span]]] = {}
    copies_in, out = trace.copied_in, trace.copied_out
    first, position = 0, 0
    for index, call in enumerate(handed):
        last = first
        while last < len(copies_in) and copies_in[last].start_us < call.start_us:
            last += 1
        if last > first and collective(call.name) == "all_reduce":
            buckets[index] = (copies_in[first:last], [])
        first = last
    for index, (inside, outside) in buckets.items():
        # Copies out of a pass come after the last of its buckets was handed over.
        while position < len(out) and out[position].start_us < handed[index].start_us:
            position += 1
        outside += out[position : position + len(inside)]
        position += len(outside)
    return buckets


def _bucket_waits(
    trace: RankTrace, calls: Sequence[tuple[Span, Span]], main: MainThread
) -> dict[int, tuple[float, float]]:
    """Returns where the main thread waits for each bucket of DDP: since when, and until when."""
    waits, before_us = {}, -np.inf
    for index, (_, copies_out) in bucket_copies(trace, [call for call, _ in calls]).items():
        if copies_out:
            last_handed_us = max(
                call.start_us for call, _ in calls if call.start_us < copies_out[0].start_us
            )
            since_us = max(before_us, last_handed_us)
            waits[index] = main.longest_pause(since_us, copies_out[0].start_us)
            before_us = copies_out[-1].end_us
    return waits


def _wait(
    main: MainThread, trace: RankTrace, handed: Span, sent: Span
) -> tuple[float, float] | None:
    """Returns where the main thread waits for a collective that is no bucket with copies.

    That is where it stands still while the collective ends. One that ends while the main thread is
    at work has to be done before the update that follows.
    """
    resumes = bisect_left(main.starts, sent.end_us - STILL_US)
    while resumes < len(main.starts) and main.starts[resumes] < handed.start_us:
        resumes += 1
    if resumes < len(main.starts):
        resumed_us = float(main.starts[resumes])
        since_us = main.idle_before(resumed_us)
        still_us = resumed_us - since_us
        if still_us >= STILL_US and since_us < sent.end_us and resumed_us < sent.end_us + 1e4:
            return since_us, resumed_us
    update = next((u for u in trace.updates if u.start_us >= sent.end_us), None)
    return (update.start_us, update.start_us) if update else None
