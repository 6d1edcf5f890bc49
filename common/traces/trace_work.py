"""The work in a trace: which call of which operator has which stretch of time, in which phase."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from common.errors import UserError
from common.traces.operator_categories import (
    DATA,
    OPTIMIZER,
    kernel_category,
    operator_category,
    own_time_category,
)
from common.traces.profiler_trace import Event, shapes_text

PHASES = ("data", "forward", "backward", "optimizer")
"""The ranges that ``TrainingStep.run`` marks."""
BETWEEN = "between phases"


@dataclass(frozen=True)
class Window:
    """The time of one step, in microseconds."""

    start_us: float
    end_us: float


@dataclass(frozen=True)
class Piece:
    """A stretch of time that one call of an operator takes.

    ``rank`` says who has a moment that several pieces cover: the lowest. ``call`` is a number that
    the pieces of one call share.
    """

    start_us: float
    end_us: float
    operator: str
    shapes: str
    category: str
    phase: str
    call: int
    rank: int = 0


class PhaseRanges:
    """The phases of the training step on the host's clock."""

    def __init__(self, ranges: Iterable[Event]) -> None:
        chosen = [(r.start_us, r.end_us, r.name) for r in ranges if r.name in PHASES]
        self._ranges = sorted(chosen)
        self._starts = [start for start, _, _ in self._ranges]
        self._borders = sorted(moment for start, end, _ in chosen for moment in (start, end))

    def at(self, moment_us: float) -> str:
        """Returns the phase at a moment, or ``BETWEEN``."""
        index = bisect_right(self._starts, moment_us) - 1
        if index >= 0 and moment_us < self._ranges[index][1]:
            return self._ranges[index][2]
        return BETWEEN

    def split(self, start_us: float, end_us: float) -> Iterator[tuple[str, float]]:
        """Yields an interval cut where phases begin and end: (phase, length in µs)."""
        first, last = bisect_right(self._borders, start_us), bisect_left(self._borders, end_us)
        cuts = [start_us, *self._borders[first:last], end_us]
        for left, right in pairwise(cuts):
            yield self.at((left + right) / 2), right - left


def host_pieces(events: Iterable[Event], phases: PhaseRanges, main_thread: int) -> list[Piece]:
    """Returns the work of the host's operators, from all its threads.

    While the main thread waits in autograd's engine, another thread's operators have the moment.
    """
    pieces = []
    for thread, operators in _by_thread(events).items():
        for event, start_us, end_us, is_own_time in flatten(operators):
            phase = phases.at((start_us + end_us) / 2)
            category = operator_category(event.name) or own_time_category(event.name)
            pieces.append(
                Piece(
                    start_us=start_us,
                    end_us=end_us,
                    operator=event.name,
                    shapes="" if is_own_time else shapes_text(event.shapes),
                    category=in_phase(category, phase),
                    phase=phase,
                    call=id(event),
                    rank=2 * is_own_time + (thread != main_thread),
                )
            )
    return pieces


def flatten(operators: Sequence[Event]) -> Iterator[tuple[Event, float, float, bool]]:
    """Yields one thread's nested calls as stretches of time that do not overlap.

    An operator with a category has all of its call. One without has what remains between the
    operators inside it, if only in pieces.

    Args:
        operators: operators of one thread, by start and then longest first.

    Yields:
        (operator, start in µs, end in µs, whether it is such a remainder).
    """
    # The stack holds the calls without a category that are open, each with the moment up to which
    # its time has been given away. Calls inside an operator with a category are skipped: they
    # begin before claimed_until.
    open_calls: list[tuple[Event, float]] = []
    claimed_until = float("-inf")

    def close_until(moment: float) -> Iterator[tuple[Event, float, float, bool]]:
        while open_calls and open_calls[-1][0].end_us <= moment:
            event, since = open_calls.pop()
            if event.end_us > since:
                yield event, since, event.end_us, True
            if open_calls:
                open_calls[-1] = (open_calls[-1][0], event.end_us)

    for event in operators:
        if event.start_us < claimed_until:
            continue
        yield from close_until(event.start_us)
        if open_calls:
            outer, since = open_calls[-1]
            if event.start_us > since:
                yield outer, since, event.start_us, True
            open_calls[-1] = (outer, event.end_us)
        if operator_category(event.name) is None:
            open_calls.append((event, event.start_us))
        else:
            claimed_until = event.end_us
            yield event, event.start_us, event.end_us, False
    yield from close_until(float("inf"))


def device_work(
    events: Sequence[Event], steps: Sequence[Event], phases: PhaseRanges
) -> tuple[list[Piece], list[Window]]:
    """Returns the work of a device's kernels, and the windows of the steps on the device.

    Raises UserError where a step launched no kernels on the main stream, the busiest one.
    """
    launches = {e.correlation: e for e in events if e.kind == "launch" and e.correlation}
    calls = _by_thread(events)
    threads = {launch.thread for launch in launches.values()}
    callers = {thread: Callers(calls[thread]) for thread in threads}
    kernels = [event for event in events if event.kind == "kernel"]
    busy = Counter()
    for kernel in kernels:
        busy[kernel.thread] += kernel.end_us - kernel.start_us
    main_stream = busy.most_common(1)[0][0]
    pieces, of_step = [], defaultdict(list)
    ends = [step.end_us for step in steps]
    for kernel in kernels:
        launch = launches.get(kernel.correlation)
        caller, phase = None, BETWEEN
        if launch:
            phase = phases.at(launch.start_us)
            caller = callers[launch.thread].at(launch.start_us)
        category = operator_category(caller.name) if caller else kernel_category(kernel.name)
        pieces.append(
            Piece(
                start_us=kernel.start_us,
                end_us=kernel.end_us,
                operator=caller.name if caller else kernel.name,
                shapes=shapes_text(caller.shapes) if caller else "",
                category=in_phase(category, phase),
                phase=phase,
                call=id(caller or kernel),
                rank=int(kernel.thread != main_stream),
            )
        )
        if launch and kernel.thread == main_stream:
            index = bisect_right(ends, launch.start_us)
            if index < len(steps) and launch.start_us >= steps[index].start_us:
                of_step[index].append(kernel)
    if len(of_step) < len(steps):
        raise UserError("the trace has a step that launched no kernels on the device's main stream")
    starts = [min(kernel.start_us for kernel in of_step[index]) for index in range(len(steps))]
    last = max(kernel.end_us for kernel in of_step[len(steps) - 1])
    return pieces, [Window(*pair) for pair in zip(starts, [*starts[1:], last], strict=True)]


class Callers:
    """The operators with a category that one thread called, by time."""

    def __init__(self, operators: Sequence[Event]) -> None:
        self._calls = [call for call, _, _, own_time in flatten(operators) if not own_time]
        self._starts = [call.start_us for call in self._calls]

    def at(self, moment_us: float) -> Event | None:
        """Returns the operator whose call was going on at a moment, or None."""
        index = bisect_right(self._starts, moment_us) - 1
        call = self._calls[index] if index >= 0 else None
        return call if call and moment_us <= call.end_us else None


def in_phase(category: str | None, phase: str) -> str | None:
    """Returns the category of work in a phase: all of the optimizer's is one, all of data's too."""
    return {"optimizer": OPTIMIZER, "data": DATA}.get(phase, category)


def _by_thread(events: Iterable[Event]) -> dict[int, list[Event]]:
    """Returns operators by thread, each list by start and then longest first."""
    threads: dict[int, list[Event]] = defaultdict(list)
    for event in sorted(events, key=lambda event: (event.start_us, -event.end_us)):
        if event.kind == "operator":
            threads[event.thread].append(event)
    return threads
