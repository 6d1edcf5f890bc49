"""What one rank's trace holds that decides when its steps end: the facts that a replay is made of.

Read record by record (``trace_stream``); what decides nothing is dropped at once, so that a trace
of any size fits. A trace that breaks off is read up to there.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from common.errors import UserError
from common.traces import operation_names as names
from common.traces.trace_stream import head_of, records_of

RANK_IN_NAME = re.compile(r"(\d+)(?=\D*$)")
GROUP = "Process Group Ranks"


@dataclass(slots=True)
class Span:
    """Something with a name, in µs; sizes and ``sequence`` of a collective where they are known."""

    name: str
    start_us: float
    end_us: float
    thread: int
    size_bytes: float = 0.0
    item_bytes: int = 0
    correlation: int = 0
    group: str = ""
    operation: str = ""
    sequence: int | None = None


@dataclass(eq=False)
class RankTrace:
    """The facts of one rank's trace, each list in order of time.

    Attributes:
        rank, world_size, host_name: who it is; a rank that the trace does not name is the last
            number of its file's name, a world that it does not name is 0.
        steps: the profiler's steps.
        busy: [n, 3], start, end and thread of all operators and ranges of the host.
        handed: operators that hand a collective over.
        gloo: collectives in gloo's threads.
        copied_in, copied_out: DDP's copies into buckets and out of them.
        nodes: ends of autograd's nodes: [n, 2], start and end.
        updates, loads: ranges of the optimizer, and of a loader.
        runtime: calls of the device's runtime that launch, wait or let a stream wait.
        kernels: what the device does; ``thread`` is the stream.
        note: what was wrong with the file; empty where nothing was.
    """

    path: Path
    rank: int
    world_size: int = 0
    host_name: str = ""
    steps: list[Span] = field(default_factory=list)
    busy: NDArray = field(default_factory=lambda: np.zeros((0, 3)))
    handed: list[Span] = field(default_factory=list)
    gloo: list[Span] = field(default_factory=list)
    copied_in: list[Span] = field(default_factory=list)
    copied_out: list[Span] = field(default_factory=list)
    nodes: list[Span] = field(default_factory=list)
    updates: list[Span] = field(default_factory=list)
    loads: list[Span] = field(default_factory=list)
    runtime: list[Span] = field(default_factory=list)
    kernels: list[Span] = field(default_factory=list)
    note: str = ""

    @property
    def on_device(self) -> bool:
        """Returns True if the trace has kernels of a GPU."""
        return bool(self.kernels)

    def lists(self) -> Iterator[list[Span]]:
        """Yields all lists of spans."""
        for value in vars(self).values():
            if isinstance(value, list):
                yield value


def read_rank_trace(path: Path) -> RankTrace:
    """Reads one rank's trace.

    Raises UserError for a file that is no trace, or has no step of the profiler.
    """
    head = head_of(path)
    who = head.get("distributedInfo")
    who = who if isinstance(who, dict) else {}
    match = RANK_IN_NAME.search(path.name)
    trace = RankTrace(
        path,
        rank=_number(who.get("rank"), int(match[1]) if match else 0),
        world_size=_number(who.get("world_size"), 0),
        host_name=str(head.get("host_name", "")),
    )
    busy = array("d")
    calls: dict[int, dict] = {}
    try:
        for record in records_of(path):
            if record.get("ph") == "X" and "dur" in record:
                _take(trace, record, busy, calls)
    except UserError as error:
        if not trace.steps and not len(busy):
            raise
        trace.note = str(error)
    except (TypeError, ValueError, AttributeError, KeyError):
        raise UserError(f"{path}: not a trace of torch.profiler") from None
    for spans in trace.lists():
        spans.sort(key=lambda span: span.start_us)
    trace.steps = [step for step in trace.steps if step.end_us > step.start_us]
    if not trace.steps:
        raise UserError(
            f"{path}: no steps; give the profiler a schedule and call its step() after each"
        )
    table = np.frombuffer(busy).reshape(-1, 3) if len(busy) else np.zeros((0, 3))
    trace.busy = table[np.argsort(table[:, 0], kind="stable")]
    if trace.note:  # the step in which a trace breaks off is not a whole one
        last_us = float(table[:, 0].max(initial=0.0))
        trace.steps = [step for step in trace.steps if step.end_us <= last_us]
    return trace


def _number(value: object, otherwise: int) -> int:
    return value if isinstance(value, int) else otherwise


def _take(trace: RankTrace, record: dict, busy: array, calls: dict[int, dict]) -> None:
    """Keeps what a record says."""
    category, name = record.get("cat"), record["name"]
    if category not in ("cpu_op", "user_annotation") and not _is_device(category):
        return
    start_us, arguments = float(record["ts"]), record.get("args") or {}
    end_us = start_us + float(record["dur"])
    if not start_us <= end_us < float("inf"):
        return
    if category in ("kernel", "gpu_memcpy", "gpu_memset"):
        span = Span(name, start_us, end_us, int(arguments.get("stream", record["tid"])))
        span.correlation = arguments.get("correlation", 0)
        if names.DEVICE_COLLECTIVE.search(name):
            _describe(span, arguments)
        trace.kernels.append(span)
        return
    thread = record["tid"]
    if not isinstance(thread, int):
        return
    if category in ("cuda_runtime", "cuda_driver"):
        if names.LAUNCHES.match(name) or names.SYNCHRONISES.match(name) or _waits(name):
            span = Span(name, start_us, end_us, thread)
            span.correlation = arguments.get("correlation", 0)
            trace.runtime.append(span)
        return
    busy.extend((start_us, end_us, thread))
    target = _list_for(trace, name, category)
    if target is not None:
        span = Span(name, start_us, end_us, thread)
        if target is not trace.nodes and target is not trace.steps:
            _describe(span, arguments)
        target.append(span)


def _is_device(category: object) -> bool:
    return category in ("kernel", "gpu_memcpy", "gpu_memset", "cuda_runtime", "cuda_driver")


def _waits(name: str) -> bool:
    return name in names.STREAM_WAITS


def _list_for(trace: RankTrace, name: str, category: str) -> list[Span] | None:
    """Returns the list that an operator or a range belongs to; None of most."""
    if category == "user_annotation":
        if name.startswith(names.GLOO):
            return trace.gloo
        if name.startswith(names.STEP):
            return trace.steps
        if name.startswith(names.UPDATE):
            return trace.updates
        return trace.loads if name.startswith(names.LOADS[0]) or name == names.LOADS[1] else None
    if name.startswith(names.HANDED_OVER):
        plain = name.partition("::")[2].strip("_")
        return None if plain.startswith(names.NOT_HANDED) else trace.handed
    if name.startswith(names.NODE):
        return trace.nodes
    if name in names.COPIED_IN:
        return trace.copied_in
    return trace.copied_out if name == names.COPIED_OUT else None


def _describe(span: Span, arguments: dict) -> None:
    """Notes the size, the group and the number of a collective or a copy."""
    if "In msg nelems" in arguments:
        count = max(arguments["In msg nelems"], arguments.get("Out msg nelems", 0))
        span.item_bytes = names.item_bytes(str(arguments.get("dtype", "")))
        span.size_bytes = float(count * span.item_bytes)
        span.operation = names.collective(str(arguments.get("Collective name", ""))) or ""
        span.group = str(arguments.get(GROUP) or arguments.get("Process Group Name", ""))
        sequence = arguments.get("Seq")
        span.sequence = sequence if isinstance(sequence, int) else None
        return
    dimensions = arguments.get("Input Dims") or ()
    types = arguments.get("Input type") or arguments.get("Input Type") or ()
    span.item_bytes = next(filter(None, (names.item_bytes(str(kind)) for kind in types)), 0)
    span.size_bytes = float(max(map(names.count_elements, dimensions), default=0) * span.item_bytes)
