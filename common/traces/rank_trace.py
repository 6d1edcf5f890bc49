"""What one rank's trace holds that decides when its steps end: the facts that a replay is made of.

Read record by record (``trace_stream``); what decides nothing is dropped at once, so that a trace
of any size fits. A trace that breaks off is read up to there, unless a GPU did something in it.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from common.errors import UserError, naming
from common.traces import operation_names as names
from common.traces.profiler_trace import KINDS, NO_KERNELS, entered
from common.traces.trace_stream import head_of, records_of

RANK_IN_NAME = re.compile(r"(\d+)(?=\D*$)")
GROUP = "Process Group Ranks"
UNORDERED = "among what the device did, which is in no order of time"


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
        rank, world_size, host_name: who it is, as in ``Who``.
        steps: the profiler's steps.
        busy: [n, 3], start, end and thread of all operators and ranges of the host.
        handed: operators that hand a collective over.
        gloo: collectives in gloo's threads.
        copied_in, copied_out: DDP's copies into buckets and out of them.
        nodes: ends of autograd's nodes: [n, 2], start and end.
        updates, loads: ranges of the optimizer, and of a loader.
        nccl: collectives that the host handed to NCCL.
        runtime: calls of the device's runtime that launch, wait or let a stream wait.
        kernels: what the device does; ``thread`` is the stream.
        last_us: when the last operator of the host began, or collective of gloo.
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
    nccl: list[Span] = field(default_factory=list)
    runtime: list[Span] = field(default_factory=list)
    kernels: list[Span] = field(default_factory=list)
    last_us: float = 0.0
    note: str = ""

    @property
    def on_device(self) -> bool:
        """Returns True if the trace has kernels of a GPU."""
        return bool(self.kernels)

    def unlaunched(self) -> str:
        """Returns a note on kernels without a launch that is known; empty where all have one."""
        launched = {span.correlation for span in self.runtime if names.LAUNCHES.match(span.name)}
        count = sum(kernel.correlation not in launched for kernel in self.kernels)
        about = f"{self.path}: {count} of {len(self.kernels)} kernels have no launch that is known"
        return f"{about}, and are left out" if count else ""

    def lists(self) -> Iterator[list[Span]]:
        """Yields all lists of spans."""
        for value in vars(self).values():
            if isinstance(value, list):
                yield value


class Who(NamedTuple):
    """Whose a trace is.

    Attributes:
        rank: its rank; where the trace does not name it, the last number of its file's name.
        is_named: whether the trace itself names it.
        world_size: ranks of the job; 0 where the trace does not say.
        host_name: its host; empty where the trace does not say.
        has_device: whether the trace has devices, whose records come after those of the host.
    """

    rank: int
    is_named: bool
    world_size: int
    host_name: str
    has_device: bool


def who_of(path: Path) -> Who:
    """Reads whose a trace is. Raises UserError for a file that is no trace."""
    head = head_of(path)
    about = head.get("distributedInfo")
    about = about if isinstance(about, dict) else {}
    rank, world_size = about.get("rank"), about.get("world_size")
    is_named = isinstance(rank, int)
    if not is_named:
        match = RANK_IN_NAME.search(path.name)
        rank = int(match[1]) if match else 0
    world_size = world_size if isinstance(world_size, int) else 0
    has_device = bool(head.get("deviceProperties"))
    return Who(rank, is_named, world_size, str(head.get("host_name", "")), has_device)


def read_rank_trace(path: Path) -> RankTrace:
    """Reads one rank's trace.

    Raises UserError for a file that is no trace, has no step of the profiler, or lacks a part of
    what a GPU did.
    """
    who = who_of(path)
    trace = RankTrace(path, who.rank, who.world_size, who.host_name)
    busy = array("d")
    try:
        for record in records_of(path):
            if record.get("ph") == "X" and "dur" in record:
                _take(trace, record, busy)
    except UserError as error:
        if not trace.steps and not len(busy):
            raise
        trace.note = str(error)
    except (TypeError, ValueError, AttributeError, KeyError):
        raise UserError(f"{path}: not a trace of torch.profiler") from None
    if trace.note and (trace.kernels or trace.runtime or who.has_device):
        raise UserError(f"{trace.note}, {UNORDERED}")
    if trace.nccl and not trace.kernels:
        raise UserError(trace.note or f"{path}: {NO_KERNELS}")
    for spans in trace.lists():
        spans.sort(key=lambda span: span.start_us)
    with naming(path):
        trace.steps = entered([s for s in trace.steps if s.end_us > s.start_us], _last_us(trace))
    if not trace.steps:
        raise UserError(
            f"{path}: no steps; give the profiler a schedule and call its step() after each"
        )
    table = np.frombuffer(busy).reshape(-1, 3) if len(busy) else np.zeros((0, 3))
    trace.busy = table[np.argsort(table[:, 0], kind="stable")]
    if trace.note:  # the step in which a trace breaks off is not a whole one
        trace.steps = [step for step in trace.steps if step.end_us <= trace.last_us]
    return trace


def _last_us(trace: RankTrace) -> float:
    """Returns when the host began the last operator, or launched the last kernel."""
    if not trace.kernels:
        return trace.last_us or float("inf")
    kernels = {kernel.correlation for kernel in trace.kernels}
    launches = [span.start_us for span in trace.runtime if span.correlation in kernels]
    return max(launches, default=float("inf"))


def _take(trace: RankTrace, record: dict, busy: array) -> None:
    """Keeps what a record says."""
    category, name = record.get("cat"), record["name"]
    if category not in KINDS:
        return
    start_us, arguments = float(record["ts"]), record.get("args") or {}
    end_us = start_us + float(record["dur"])
    if not start_us <= end_us < float("inf"):
        return
    if KINDS[category] == "kernel":
        span = Span(name, start_us, end_us, int(arguments.get("stream", record["tid"])))
        span.correlation = arguments.get("correlation", 0)
        if names.DEVICE_COLLECTIVE.search(name):
            _describe(span, arguments)
        trace.kernels.append(span)
        return
    thread = record["tid"]
    if not isinstance(thread, int):
        return
    if KINDS[category] == "launch":
        is_wait = names.SYNCHRONISES.match(name) or name in names.STREAM_WAITS
        if is_wait or names.LAUNCHES.match(name):
            span = Span(name, start_us, end_us, thread)
            span.correlation = arguments.get("correlation", 0)
            trace.runtime.append(span)
        return
    busy.extend((start_us, end_us, thread))
    if category == "cpu_op" or name.startswith(names.GLOO):
        trace.last_us = max(trace.last_us, start_us)
    target = _list_for(trace, name, category)
    if target is not None:
        span = Span(name, start_us, end_us, thread)
        if target is not trace.nodes and target is not trace.steps:
            _describe(span, arguments)
        target.append(span)


def _list_for(trace: RankTrace, name: str, category: str) -> list[Span] | None:
    """Returns the list that an operator or a range belongs to; None of most."""
    if category == "user_annotation":
        if name.startswith(names.GLOO):
            return trace.gloo
        if name.startswith(names.NCCL):
            return trace.nccl
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
