"""Attributes each moment of a training step to one piece of work: the data of a profile's figures.

A step is a window of time, and every moment in it belongs to exactly one piece of work or to none
(idle), so the parts of a step add up to the step, always.

On a CPU the window is the step's range, and a piece is an operator's call with all that it calls
inside; what an operator without a category takes besides the operators in it is a piece, too. On a
GPU the work is the kernels, which run later than the host launches them: a step is the time from
its first kernel to the next step's first, and a kernel belongs to the operator and the phase that
launched it. A copy that runs at the same time as another kernel takes no time of its own.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence

import pandas as pd

from common.errors import UserError
from common.traces.operator_categories import IDLE
from common.traces.profiler_trace import Event, step_ranges
from common.traces.trace_work import (
    BETWEEN,
    PhaseRanges,
    Piece,
    Window,
    device_work,
    host_pieces,
)

COLUMNS = ("step", "phase", "category", "operator", "shapes", "calls", "time_us")


def attribute(events: Sequence[Event]) -> pd.DataFrame:
    """Computes the time of every step by phase, category, operator and shapes.

    Columns: step (from 0), phase, category, operator, shapes, calls, time_us. Rows of the category
    ``idle`` have no operator. The times of a step add up to it.

    Raises UserError for a trace without steps (``ProfilerStep#`` ranges), or of a device with a
    step that launched no kernels.
    """
    steps = step_ranges(events)
    if not steps:
        raise UserError("the trace has no steps: the profiler was not told where they end")
    phases = PhaseRanges(event for event in events if event.kind == "range")
    on_device = any(event.kind == "kernel" for event in events)
    if on_device:
        pieces, windows = device_work(events, steps, phases)
    else:
        pieces = host_pieces(events, phases, steps[0].thread)
        windows = [Window(step.start_us, step.end_us) for step in steps]
    rows = [
        {"step": index} | row
        for index, window in enumerate(windows)
        for row in account(window, pieces, None if on_device else phases)
    ]
    return pd.DataFrame(rows, columns=list(COLUMNS))


def account(window: Window, pieces: Sequence[Piece], phases: PhaseRanges | None) -> Iterator[dict]:
    """Yields the rows of one step.

    A moment without work is in the phase that ``phases`` give it; without them (on a device) in
    that of the work which then comes, for which the device waited.
    """
    inside = [p for p in pieces if p.end_us > window.start_us and p.start_us < window.end_us]
    time_us: Counter = Counter()
    calls = defaultdict(set)
    for piece in inside:
        if piece.start_us >= window.start_us:
            key = (piece.phase, piece.category, piece.operator, piece.shapes)
            calls[key].add(piece.call)
            time_us[key] += 0.0  # work that is hidden behind other work is in the table, too
    waiting_us = 0.0
    for piece, start_us, end_us in exclusive(inside, window):
        if piece is not None:
            key = (piece.phase, piece.category, piece.operator, piece.shapes)
            time_us[key] += end_us - start_us
            if waiting_us:
                time_us[(piece.phase, IDLE, "", "")] += waiting_us
                waiting_us = 0.0
        elif phases is None:
            waiting_us += end_us - start_us
        else:
            for phase, length_us in phases.split(start_us, end_us):
                time_us[(phase, IDLE, "", "")] += length_us
    if waiting_us:
        time_us[(BETWEEN, IDLE, "", "")] += waiting_us
    names = COLUMNS[1:5]
    for key, length_us in time_us.items():
        row = dict(zip(names, key, strict=True))
        yield row | {"calls": len(calls.get(key, ())), "time_us": length_us}


def exclusive(
    pieces: Iterable[Piece], window: Window
) -> Iterator[tuple[Piece | None, float, float]]:
    """Yields every moment of a window with its one piece, or None: (piece, start, end) in µs.

    Where pieces overlap, the one of the lowest rank has the moment, then the one that began first.
    """
    # A sweep over the starts and ends of pieces. The heap holds the pieces that have begun, the
    # owner of the moment on top; one that has ended leaves it when it comes to the top.
    coming = sorted(pieces, key=lambda piece: piece.start_us, reverse=True)
    running: list[tuple[int, float, int, Piece]] = []
    now = window.start_us
    while now < window.end_us:
        while coming and coming[-1].start_us <= now:
            piece = coming.pop()
            heapq.heappush(running, (piece.rank, piece.start_us, len(coming), piece))
        while running and running[0][-1].end_us <= now:
            heapq.heappop(running)
        current = running[0][-1] if running else None
        until = min(
            window.end_us,
            current.end_us if current else window.end_us,
            coming[-1].start_us if coming else window.end_us,
        )
        yield current, now, until
        now = until
