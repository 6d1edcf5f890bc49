"""Reads the trace that torch.profiler exports: its operators, ranges, launches and kernels.

The trace is the Chrome format that https://ui.perfetto.dev shows. It is all that the attribution of
time needs, so a trace of another machine or program can be read as well as a fresh one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from common.errors import UserError
from common.traces.operation_names import GLOO, STEP
from common.traces.trace_stream import records_of

Shapes = tuple[tuple[int, ...], ...]

KINDS = {
    "cpu_op": "operator",
    "user_annotation": "range",
    "cuda_runtime": "launch",
    "cuda_driver": "launch",
    "kernel": "kernel",
    "gpu_memcpy": "kernel",
    "gpu_memset": "kernel",
}
"""Kinds of events by their category in the trace; all others are left out."""

MOST_SHAPES = 6
NO_KERNELS = "collectives of NCCL and no kernels: profile with ProfilerActivity.CUDA"


@dataclass(frozen=True)
class Event:
    """An event of a trace.

    Attributes:
        name: name such as ``aten::addmm``, ``forward`` or a kernel's name.
        start_us, end_us: microseconds from an origin that all events of a trace share.
        thread: thread of the host; for kernels the device's stream.
        shapes: shapes of the input tensors (operators only), in order.
        kind: ``operator``, ``range`` (named by the program), ``launch`` (the host hands a kernel
            to the device) or ``kernel`` (the device computes, copies or fills).
        correlation: a number that a launch and its kernels share; 0 for others.
    """

    name: str
    start_us: float
    end_us: float
    thread: int = 0
    shapes: Shapes = ()
    kind: str = "operator"
    correlation: int = 0


def read_trace(path: Path) -> list[Event]:
    """Reads the events of a trace, which may be compressed (.gz), by start and then longest first.

    Raises UserError for a file that is no trace.
    """
    return events_of(records_of(path))


def events_of(records: Iterable[dict]) -> list[Event]:
    """Returns the events that the records of a trace show, by start and then longest first."""
    spans = [record for record in records if record.get("cat") in KINDS and "dur" in record]
    origin_us = min((record["ts"] for record in spans), default=0.0)
    events = [_event(record, origin_us) for record in spans]
    return sorted(events, key=lambda event: (event.start_us, -event.end_us))


def step_ranges(events: Sequence[Event]) -> list[Event]:
    """Returns the profiler's steps on the host in order of time; none if it was told of none.

    Raises UserError where two steps have one number, as those of several processes have.
    """
    kernels = {event.correlation for event in events if event.kind == "kernel"}
    if kernels:
        begun = [e.start_us for e in events if e.kind == "launch" and e.correlation in kernels]
    else:
        begun = [e.start_us for e in events if e.kind == "operator" or e.name.startswith(GLOO)]
    ranges = [e for e in events if e.kind == "range" and e.name.startswith(STEP)]
    return entered(ranges, max(begun, default=float("inf")))


def entered(steps: Sequence, last_us: float) -> list:
    """Returns the profiler's steps in order of time, without one that the loop never entered.

    Where a loop ends inside of the profiler's window, one more was opened, and nothing is in it:
    ``last_us`` is when the host's last operator, or launch of a kernel, began.

    Raises UserError where two steps have one number, as those of several processes have.
    """
    if len({step.name for step in steps}) < len(steps):
        raise UserError("two steps of one number in one file: export a trace per rank")
    ordered = sorted(steps, key=lambda step: step.start_us)
    return ordered[:-1] if len(ordered) > 1 and ordered[-1].start_us > last_us else ordered


def _event(record: dict, origin_us: float) -> Event:
    arguments = record.get("args", {})
    kind = KINDS[record["cat"]]
    start_us = record["ts"] - origin_us
    return Event(
        name=record["name"],
        start_us=start_us,
        end_us=start_us + record["dur"],
        thread=arguments.get("stream", 0) if kind == "kernel" else record["tid"],
        shapes=tensor_shapes(arguments.get("Input Dims", ())),
        kind=kind,
        correlation=arguments.get("correlation", 0) if kind in ("launch", "kernel") else 0,
    )


def tensor_shapes(dimensions: Sequence) -> Shapes:
    """Returns the shapes of the tensors among an operator's inputs, those inside lists included.

    Scalars, which have no dimensions, and whatever is no tensor are left out.
    """
    shapes: list[tuple[int, ...]] = []
    for item in dimensions:
        if item and all(isinstance(size, int) for size in item):
            shapes.append(tuple(item))
        elif item and not isinstance(item, str):
            shapes.extend(tensor_shapes(item))
    return tuple(shapes)


def shapes_text(shapes: Shapes) -> str:
    """Returns shapes as a table shows them: ``256x768 768x256``; of long lists only a number."""
    if len(shapes) > MOST_SHAPES:
        return f"{len(shapes)} tensors"
    return " ".join("x".join(map(str, shape)) for shape in shapes)
