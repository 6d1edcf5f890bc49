"""Takes the steps of a trace apart: computation, communication, both at once, or neither.

Read from a trace of torch.profiler; steps are its ``ProfilerStep#N`` ranges. Every moment of a step
is computation, exposed communication or idle.

**On a GPU** definitions are those of HolisticTraceAnalysis (Meta; ``get_comm_comp_overlap`` and
``get_temporal_breakdown``): a kernel with nccl in its name communicates, copies and fills
(``Memcpy…``, ``Memset…``) are neither, all others compute. A step lasts from its first computing
kernel to that of the next one, the last to the end of its last kernel.

**On the CPU** over gloo a collective is a range such as ``gloo:all_reduce`` in one of the group's
two worker threads. It lasts from when the thread takes it from the queue until it is done, so it
contains the wait for slower ranks, but not the time in the queue; ``c10d::allreduce_`` in the main
thread is only the handing over. ``fully_shard`` waits for each in the main thread, so that nothing
overlaps. Computation is the union of operators in all other threads, copies
included. Neither autograd's frames (``AddmmBackward0``), in whose hooks a rank may wait, nor
collectives count, so what is idle contains Python and dispatch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from common.errors import UserError, naming
from common.tables import TRACE_OPERATION_COLUMNS, TRACE_STEP_COLUMNS
from common.traces.coarse_intervals import arithmetic
from common.traces.operation_names import (
    GLOO,
    NCCL,
    STEP,
    collective,
    count_elements,
    item_bytes,
)
from common.traces.operator_categories import operator_category
from common.traces.profiler_trace import (
    NO_KERNELS,
    Event,
    read_trace,
    step_ranges,
)
from common.traces.trace_stream import records_of

INTERVALS = arithmetic()
COLUMNS = TRACE_STEP_COLUMNS[1:-1]
TIMES = COLUMNS[1:-1]
GATHER, SCATTER, ADD = "all_gather", "reduce_scatter", "all_reduce"

COLLECTIVES = ("c10d::", "c10d_functional::", "_c10d_functional::", "record_param_comms")
"""Operators that hand a collective over or wait for one."""
FRAMES = ("autograd::", "torch::autograd::")
"""Operators that only call others, and hooks, which may wait."""


@dataclass(frozen=True)
class StepWindow:
    """A step by its number in the trace, in microseconds."""

    step: int
    start_us: float
    end_us: float


@dataclass(frozen=True)
class Activity:
    """Disjoint intervals [n, 2], in µs, of a rank's computation, communication and copies (GPU).

    Intervals of different kinds may overlap.
    """

    computation: NDArray
    communication: NDArray
    copies: NDArray


def read_step_overlap(path: Path) -> pd.DataFrame:
    """Reads a trace of one rank: a row per step.

    Columns: step (its number in the trace), step_ms, computation_ms, communication_ms, overlap_ms
    (both at once), exposed_communication_ms (communication without computation), idle_ms
    (neither), copy_ms (the part of idle_ms in which a GPU copies or fills). Computation, exposed
    communication and idle time add up to the step.

    Raises UserError for a file that is no trace, has no steps, or a step without kernels.
    """
    events = read_trace(Path(path))
    with naming(path):
        windows = step_windows(events)
    return step_overlap(windows, activity(events))


def step_overlap(windows: Sequence[StepWindow], activity: Activity) -> pd.DataFrame:
    """Returns a row per step, with the columns of ``read_step_overlap``."""
    return pd.DataFrame([_row(activity, window) for window in windows], columns=list(COLUMNS))


def step_operations(
    events: Sequence[Event], windows: Sequence[StepWindow], activity: Activity
) -> pd.DataFrame:
    """Returns a row per step and operation of its communication.

    Columns: step, operation (``all_gather``, ``reduce_scatter``, ``all_reduce``, …; ``other`` where
    the name does not tell), calls (that began in the step), communication_ms, exposed_ms (without
    computation). Time of several operations at once counts for each. Gloo scatters by an
    all-reduce; where the program asks for reduce-scatters and for no all-reduce, its all-reduces
    are those.
    """
    on_device = any(event.kind == "kernel" for event in events)
    of_operation: dict[str, list[Event]] = defaultdict(list)
    for event in events:
        if _communicates(event, on_device):
            of_operation[collective(event.name) or "other"].append(event)
    if not on_device and _only_scatters(events) and ADD in of_operation:
        of_operation[SCATTER] += of_operation.pop(ADD)
    rows = []
    for window in windows:
        step = INTERVALS.union([(window.start_us, window.end_us)])
        for name, occurrences in sorted(of_operation.items()):
            spans = INTERVALS.intersection(INTERVALS.union(_spans(occurrences)), step)
            exposed = INTERVALS.difference(spans, activity.computation)
            calls = sum(window.start_us <= event.start_us < window.end_us for event in occurrences)
            if calls or len(spans):
                times_us = INTERVALS.length(spans), INTERVALS.length(exposed)
                rows.append((window.step, name, calls, *(time / 1e3 for time in times_us)))
    return pd.DataFrame(rows, columns=list(TRACE_OPERATION_COLUMNS[1:]))


def _communicates(event: Event, on_device: bool) -> bool:
    if on_device:
        return event.kind == "kernel" and kernel_kind(event.name) == "communication"
    return event.kind == "range" and event.name.startswith(GLOO)


def _only_scatters(events: Sequence[Event]) -> bool:
    """Returns True if the program asked for reduce-scatters and for no all-reduce."""
    calls = {event.name for event in events if event.name.startswith("c10d::")}
    return any("reduce_scatter" in name for name in calls) and "c10d::allreduce_" not in calls


def collectives_of(path: Path) -> pd.DataFrame:
    """Reads the collectives that a trace records: a row per step, operation and size.

    They are what the program asked for, so a reduce-scatter is one, though gloo runs an all-reduce
    for it. Read from NCCL's records (``record_param_comms``) where there are any, else from the
    ``c10d`` operators, of which only a trace with ``record_shapes=True`` knows the sizes.

    Columns: step, operation (``all_reduce``, ``all_gather``, ``reduce_scatter``, ``broadcast``, …),
    size_bytes (of the whole message: the tensor reduced, gathered or to be scattered; missing where
    the trace does not tell), count.

    Raises UserError for a file that is no trace.
    """
    records = [r for r in records_of(Path(path)) if "dur" in r]
    steps = [
        (int(r["name"].removeprefix(STEP)), r["ts"], r["ts"] + r["dur"])
        for r in records
        if r.get("cat") == "user_annotation" and r["name"].startswith(STEP)
    ]
    calls = [r for r in records if r.get("args", {}).get("In msg nelems", 0) > 0]
    calls = [r for r in calls if r["name"] == "record_param_comms"]
    calls = calls or [r for r in records if r["name"].startswith("c10d::")]
    by_length = _item_bytes_by_length(records)
    rows = [
        (step, _operation(call), _message_bytes(call, by_length))
        for step, start, end in steps
        for call in calls
        if start <= call["ts"] < end
    ]
    table = pd.DataFrame(rows, columns=["step", "operation", "size_bytes"])
    table = table.astype({"size_bytes": "Int64"})
    return table.groupby([*table.columns], dropna=False).size().reset_index(name="count")


def _operation(record: dict) -> str:
    """Returns the operation of a call, such as ``all_gather``."""
    name = record.get("args", {}).get("Collective name", record["name"])
    return collective(name) or name.removeprefix("c10d::").strip("_").lower()


def _message_bytes(record: dict, by_length: dict[int, int]) -> int | None:
    """Returns the larger of input and output, each of which may be a list of tensors."""
    arguments = record.get("args", {})
    if "In msg nelems" in arguments:
        elements = max(arguments["In msg nelems"], arguments.get("Out msg nelems", 0))
        kind = arguments.get("dtype")
    else:
        elements = max(map(count_elements, arguments.get("Input Dims", ())), default=0)
        kind = next(iter(arguments.get("Input type", ())), None)
    size = item_bytes(str(kind)) or by_length.get(elements)
    return elements * size if elements and size else None


def _item_bytes_by_length(records: Iterable[dict]) -> dict[int, int]:
    """Maps tensor lengths to bytes of an element, from gloo's ranges.

    An operator on a list of tensors does not tell their type; the range of its collective does.
    """
    sizes = {}
    for record in records:
        arguments = record.get("args", {})
        if record["name"].startswith(GLOO) and arguments.get("Input type"):
            size = item_bytes(arguments["Input type"][0])
            if size:
                sizes[count_elements(arguments["Input Dims"])] = size
    return sizes


def step_windows(events: Sequence[Event]) -> list[StepWindow]:
    """Returns when each step took place: on the device if the trace has kernels, else on the host.

    Raises UserError if there are no steps, one has launched no computing kernel, or all that a GPU
    did is missing.
    """
    ranges = step_ranges(events)
    if not ranges:
        raise UserError("no steps; give the profiler a schedule and call its step() after each")
    numbers = [int(step.name.removeprefix(STEP)) for step in ranges]
    kernels = [event for event in events if event.kind == "kernel"]
    if not kernels:
        if any(event.kind == "range" and event.name.startswith(NCCL) for event in events):
            raise UserError(NO_KERNELS)
        return [
            StepWindow(n, step.start_us, step.end_us)
            for n, step in zip(numbers, ranges, strict=True)
        ]
    # A kernel belongs to the step in whose range the host launched it: it may run after the end of
    # that range, and kernels of two steps may lie in one.
    launched = {e.correlation: e.start_us for e in events if e.kind == "launch" and e.correlation}
    starts_us = np.array([step.start_us for step in ranges])
    of_step: dict[int, list[Event]] = defaultdict(list)
    for kernel in kernels:
        moment = launched.get(kernel.correlation)
        index = -1 if moment is None else int(np.searchsorted(starts_us, moment, "right")) - 1
        if index >= 0 and moment < ranges[index].end_us:
            of_step[index].append(kernel)
    borders = []
    for index, number in enumerate(numbers):
        computing = [k.start_us for k in of_step[index] if kernel_kind(k.name) == "computation"]
        if not computing:
            raise UserError(f"step {number} launched no computing kernels")
        borders.append(min(computing))
    borders.append(max(kernel.end_us for kernel in of_step[len(numbers) - 1]))
    return [StepWindow(n, *pair) for n, pair in zip(numbers, pairwise(borders), strict=True)]


def activity(events: Sequence[Event]) -> Activity:
    """Returns when the rank was active: on the device if the trace has kernels, else the host."""
    if any(event.kind == "kernel" for event in events):
        return _device_activity(events)
    return _host_activity(events)


def kernel_kind(name: str) -> str:
    """Returns ``communication``, ``copy`` or ``computation``, as HTA's ``get_kernel_type`` does."""
    if "nccl" in name.lower():
        return "communication"
    return "copy" if name.startswith(("Memcpy", "Memset")) else "computation"


def computes(name: str) -> bool:
    """Returns True if a host's operator computes all through its call."""
    if name.startswith(COLLECTIVES) or name.startswith(FRAMES):
        return False
    return "::" in name or operator_category(name) is not None


def _device_activity(events: Sequence[Event]) -> Activity:
    """Returns when the kernels of a GPU ran, by their kind."""
    kinds: dict[str, list[Event]] = defaultdict(list)
    for event in events:
        if event.kind == "kernel":
            kinds[kernel_kind(event.name)].append(event)
    return Activity(
        computation=INTERVALS.union(_spans(kinds["computation"])),
        communication=INTERVALS.union(_spans(kinds["communication"])),
        copies=INTERVALS.union(_spans(kinds["copy"])),
    )


def _host_activity(events: Sequence[Event]) -> Activity:
    """Returns when the operators of a CPU ran, and gloo's collectives."""
    communicating = [event for event in events if _communicates(event, on_device=False)]
    # gloo's threads also copy and divide; that is part of the collective.
    workers = {event.thread for event in communicating}
    threads: dict[int, list[Event]] = defaultdict(list)
    for event in events:
        if event.kind == "operator" and event.thread not in workers:
            threads[event.thread].append(event)
    computing = [pair for thread in threads.values() for pair in _computing(thread)]
    return Activity(
        computation=INTERVALS.union(computing),
        communication=INTERVALS.union(_spans(communicating)),
        copies=INTERVALS.union([]),
    )


def _computing(operators: Sequence[Event]) -> Iterator[NDArray]:
    """Yields one thread's computation, without collectives inside of operators.

    The norm of sharded tensors is such an operator.
    """
    computing = INTERVALS.union(_spans(e for e in operators if computes(e.name)))
    waiting = INTERVALS.union(_spans(e for e in operators if e.name.startswith(COLLECTIVES)))
    yield from INTERVALS.difference(computing, waiting)


def _row(activity: Activity, window: StepWindow) -> tuple[float, ...]:
    """Returns a step's row, in the order of ``COLUMNS``."""
    step_us = (window.start_us, window.end_us)
    step = INTERVALS.union([step_us])
    computation = INTERVALS.intersection(activity.computation, step)
    communication = INTERVALS.intersection(activity.communication, step)
    apart = INTERVALS.take_apart(step_us, computation, communication)
    busy = INTERVALS.union([*computation, *communication])
    copies = INTERVALS.difference(INTERVALS.intersection(activity.copies, step), busy)
    times_us = (
        apart.total,
        apart.computation,
        apart.communication,
        apart.overlap,
        apart.exposed,
        apart.idle,
        INTERVALS.length(copies),
    )
    return (window.step, *(time / 1e3 for time in times_us))


def _spans(events: Iterable[Event]) -> list[tuple[float, float]]:
    """Returns start and end of each event."""
    return [(event.start_us, event.end_us) for event in events]
