"""One rank's trace as lanes where a GPU computes: the host, its launches, and the streams.

The trace does not say which event a stream waits for, in most versions. Two rules stand for it. A
collective waits for what its program launched before it. A stream that is told to wait outside of
a collective's own call waits for the collectives in the order in which they were handed over, as
DDP does; where numbers do not fit, a kernel that begins as a collective ends has waited for it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from common.analysis.replay.lanes import Cut, HostLane, Joinable, RankLanes, StepRanges
from common.errors import UserError
from common.perfmodel.replay.program import DEVICE, Program
from common.traces.operation_names import (
    DEVICE_COLLECTIVE,
    LAUNCHES,
    STREAM_WAITS,
    SYNCHRONISES,
    collective,
)
from common.traces.rank_trace import RankTrace, Span

LONG_CALL_US = 20.0
"""Calls of the runtime that take less do not wait for the device."""
AS_IT_ENDS_US = 15.0
"""Within so long after a collective's end a kernel begins that has waited for it."""


def device_lanes(program: Program, trace: RankTrace, steps: Sequence[int]) -> RankLanes:
    """Adds the lanes of a rank that computes on a GPU, for some steps of its trace."""
    ranges = StepRanges(trace, steps)
    launches = {
        span.correlation: span
        for span in trace.runtime
        if LAUNCHES.match(span.name) and ranges.holds(span)
    }
    kernels = sorted(
        (kernel for kernel in trace.kernels if kernel.correlation in launches),
        key=lambda kernel: (launches[kernel.correlation].start_us, kernel.start_us),
    )
    index_of = {kernel.correlation: index for index, kernel in reversed([*enumerate(kernels)])}
    cuts = ranges.cuts()
    for correlation, index in index_of.items():
        at_us = launches[correlation].start_us
        cuts.append(Cut(at_us, at_us, hands=index))
    synchronised = _synchronised(trace, launches, kernels, ranges)
    cuts += [Cut(span.start_us, span.end_us, waits=index) for span, index in synchronised]
    host = HostLane(program, trace)
    lanes = host.make(cuts, ranges.first_us)
    ids = _add_kernels(program, lanes, kernels, launches, index_of, host)
    for operation, index, resumed_us in host.waits:
        lag_us = max(0.0, resumed_us - kernels[index].end_us)
        program.after[operation].append((ids[index], lag_us / 1e6))
    begun = set()
    for kernel, operation in zip(kernels, ids, strict=True):
        step = ranges.step_at(launches[kernel.correlation].start_us)
        what = _communicates(kernel)
        if what:
            lanes.calls.append(
                Joinable(kernel, what, operation, kernel.start_us, kernel.end_us, step, False)
            )
        elif step not in begun and not kernel.name.startswith(("Memcpy", "Memset")):
            begun.add(step)
            lanes.boundaries.append((step, operation, False, kernel.start_us))
    if len(begun) < len(ranges.spans):
        raise UserError(f"{trace.path}: a step launched no computing kernels")
    last = max(range(len(kernels)), key=lambda index: kernels[index].end_us)
    lanes.boundaries.append((-1, ids[last], True, kernels[last].end_us))
    return lanes


def _communicates(kernel: Span) -> str:
    """Returns the operation of a collective's kernel; empty for others."""
    if not DEVICE_COLLECTIVE.search(kernel.name):
        return ""
    return kernel.operation or collective(kernel.name) or "collective"


def _synchronised(
    trace: RankTrace,
    launches: dict[int, Span],
    kernels: Sequence[Span],
    ranges: StepRanges,
) -> list[tuple[Span, int]]:
    """Finds calls in which the host waits for the device: the call, and the kernel it waits for.

    That is the last one that ended meanwhile, of those launched before.
    """
    ends = np.array([kernel.end_us for kernel in kernels])
    launched = np.array([launches[kernel.correlation].start_us for kernel in kernels])
    waits = []
    for span in trace.runtime:
        is_sync = SYNCHRONISES.match(span.name) and ranges.holds(span)
        if not is_sync or span.end_us - span.start_us < LONG_CALL_US:
            continue
        before = int(np.searchsorted(launched, span.end_us))
        ended = ends[:before]
        inside = np.flatnonzero((ended > span.start_us) & (ended <= span.end_us))
        if len(inside):
            waits.append((span, int(inside[ended[inside].argmax()])))
    return waits


def _add_kernels(
    program: Program,
    lanes: RankLanes,
    kernels: Sequence[Span],
    launches: dict[int, Span],
    index_of: dict[int, int],
    host: HostLane,
) -> list[int]:
    """Adds an operation for each kernel, on the lane of its stream; returns their ids."""
    streams: dict[int, int] = {}
    lag_us = _launch_lag_us(kernels, launches)
    waits = _stream_waits(lanes.trace, kernels, launches, lag_us)
    ids: list[int] = []
    last_computing = -1
    for index, kernel in enumerate(kernels):
        stream = kernel.thread
        launch = index_of[kernel.correlation]
        after = [(host.handed[launch], lag_us / 1e6)]
        communicates = _communicates(kernel)
        if communicates and last_computing >= 0:
            after.append((ids[last_computing], 0.0))
        after += [(ids[other], 0.0) for other in waits.get(index, ()) if other < index]
        is_first = stream not in streams
        if is_first:
            streams[stream] = program.add_lane(lanes.trace.rank, DEVICE)
        work_us = 0.0 if communicates else kernel.end_us - kernel.start_us
        label = communicates or "kernel"
        ids.append(program.add(streams[stream], work_us / 1e6, after, label))
        lanes.seen_us[ids[-1]] = (kernel.start_us, kernel.end_us)
        if is_first:
            lanes.first.append((ids[-1], _free_since(lanes.trace, kernel)))
        if not communicates:
            last_computing = index
    return ids


def _free_since(trace: RankTrace, kernel: Span) -> float:
    """Returns when the kernel before the first one that counts has ended in its stream."""
    before = [
        other.end_us
        for other in trace.kernels
        if other.thread == kernel.thread and other.start_us < kernel.start_us
    ]
    return max(before, default=0.0)


def _launch_lag_us(kernels: Sequence[Span], launches: dict[int, Span]) -> float:
    """Returns how long after its launch a kernel begins that waits for nothing else."""
    lags, free_us = [], defaultdict(float)
    for kernel in kernels:
        launched_us = launches[kernel.correlation].start_us
        if free_us[kernel.thread] < launched_us and not _communicates(kernel):
            lags.append(kernel.start_us - launched_us)
        free_us[kernel.thread] = max(free_us[kernel.thread], kernel.end_us)
    return max(0.0, float(np.median(lags))) if lags else 0.0


def _stream_waits(
    trace: RankTrace, kernels: Sequence[Span], launches: dict[int, Span], lag_us: float
) -> dict[int, list[int]]:
    """Finds what computing kernels wait for in other streams: kernel → collectives, by index."""
    calls = [index for index, kernel in enumerate(kernels) if _communicates(kernel)]
    if not calls:
        return {}
    launched = [launches[kernel.correlation].start_us for kernel in kernels]
    moments = _told_to_wait(trace, launched)
    waits: dict[int, list[int]] = defaultdict(list)
    computing = [index for index, kernel in enumerate(kernels) if not _communicates(kernel)]
    computing_launched = [launched[index] for index in computing]
    if len(moments) == len(calls):
        for at_us, call in zip(moments, calls, strict=True):
            following = bisect_left(computing_launched, at_us)
            if following < len(computing):
                waits[computing[following]].append(call)
        return waits
    ends = sorted((kernels[call].end_us, call) for call in calls)
    free_us: dict[int, float] = defaultdict(float)
    for index in computing:
        kernel = kernels[index]
        explained_us = max(free_us[kernel.thread], launched[index] + lag_us)
        index_before = bisect_right(ends, (kernel.start_us, 1 << 60)) - 1
        is_late = kernel.start_us > explained_us + AS_IT_ENDS_US / 3
        if is_late and index_before >= 0:
            ended_us, call = ends[index_before]
            if kernel.start_us - ended_us < AS_IT_ENDS_US:
                waits[index].append(call)
        free_us[kernel.thread] = max(free_us[kernel.thread], kernel.end_us)
    return waits


def _told_to_wait(trace: RankTrace, launched: Sequence[float]) -> list[float]:
    """Returns the moments at which a stream is told to wait, outside of a collective's own call."""
    starts = [span.start_us for span in trace.handed]
    moments = []
    for span in trace.runtime:
        if span.name not in STREAM_WAITS or not launched[0] <= span.start_us:
            continue
        index_before = bisect_right(starts, span.start_us) - 1
        if index_before < 0 or span.start_us > trace.handed[index_before].end_us:
            moments.append(span.start_us)
    return moments
