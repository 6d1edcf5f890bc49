"""Steps as a trace for Perfetto, side by side on the same clock.

A trace is JSON in Chrome's trace event format: complete events (``"ph": "X"``) with ``ts`` and
``dur`` in microseconds, and metadata events (``"ph": "M"``) that name processes and threads.
https://ui.perfetto.dev opens it without anything being sent anywhere. Each pass is a process,
with a thread for computation, one for each all-reduce that may be in flight, and one for copies.
Backward passes start together; what lies around them in a step is shown where it is known, and 0 is
where the first forward pass starts.
Source of the format: "Trace Event Format", the document that Perfetto's pages link to.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from common.perfmodel.ddp.timeline import BackwardTimeline, BucketEvent

COMPUTATION, ALL_REDUCE, COPIES = "computation", "all-reduce", "copies"


@dataclass(frozen=True)
class Around:
    """The parts of a step before and after its backward pass; seconds.

    ``update_s`` is the optimizer and whatever else follows, such as waiting for other ranks.
    """

    forward_s: float
    update_s: float


@dataclass(frozen=True)
class Slice:
    """A box of a timeline: what it shows, and seconds from the start of the backward pass.

    ``kind`` is ``computation``, ``all-reduce`` or ``copies``; ``lane`` counts the all-reduces that
    were in flight when it began. ``event`` is the bucket it belongs to; None for what is left of
    computation after the last gradient, and for what lies around the pass.
    """

    kind: str
    lane: int
    name: str
    start_s: float
    end_s: float
    event: BucketEvent | None = None


@dataclass(frozen=True)
class Box:
    """Something that a lane does; seconds from the beginning of the program."""

    lane: str
    name: str
    start_s: float
    end_s: float


def slices(timeline: BackwardTimeline, around: Around | None = None) -> list[Slice]:
    """Cuts a backward pass into boxes; those of one kind and lane do not overlap.

    Empty boxes are left out. Computation is cut where a bucket was ready; a copy back begins when
    its bucket is reduced, computation is over, and the copy before is done. The forward pass before
    it ends at 0.
    """
    boxes = _computation(timeline)
    if around:
        end_s = timeline.total_s + around.update_s
        boxes.insert(0, Slice(COMPUTATION, 0, "forward pass", -around.forward_s, 0.0))
        boxes.append(Slice(COMPUTATION, 0, "update", timeline.total_s, end_s))
    for lane, event in zip(in_flight_lanes(timeline.events), timeline.events, strict=True):
        name = f"all-reduce of {bucket_name(event)}"
        boxes.append(Slice(ALL_REDUCE, lane, name, event.start_s, event.end_s, event))
    for event, start_s in zip(timeline.events, copy_starts_s(timeline), strict=True):
        name = f"copy {bucket_name(event)} back"
        boxes.append(Slice(COPIES, 0, name, start_s, event.copied_s, event))
    return [box for box in boxes if box.end_s > box.start_s]


def bucket_name(event: BucketEvent) -> str:
    """Returns a bucket's name for readers: ``bucket 1`` is the first to be reduced."""
    return f"bucket {event.index + 1}"


def copy_starts_s(timeline: BackwardTimeline) -> list[float]:
    """Returns the seconds at which each bucket's copy back into its gradients can begin."""
    starts, done_s = [], timeline.compute_end_s
    for event in timeline.events:
        starts.append(max(done_s, event.end_s))
        done_s = max(starts[-1], event.copied_s)
    return starts


def in_flight_lanes(events: Sequence[BucketEvent]) -> list[int]:
    """Assigns to each all-reduce the first lane that is free when it starts; gloo has two."""
    lanes = [0] * len(events)
    free_s: list[float] = []
    for index in sorted(range(len(events)), key=lambda index: events[index].start_s):
        event = events[index]
        lane = next((i for i, end_s in enumerate(free_s) if end_s <= event.start_s), len(free_s))
        free_s[lane : lane + 1] = [event.end_s]  # replaces the lane's end, or adds a lane
        lanes[index] = lane
    return lanes


def trace_json(
    timelines: Mapping[str, BackwardTimeline],
    *,
    parameters: Sequence[str] = (),
    facts: Mapping[str, str] | None = None,
    around: Mapping[str, Around] | None = None,
) -> str:
    """Returns the text of a trace file.

    Args:
        timelines: name of a process of the trace, such as ``predicted`` → its backward pass.
        parameters: names of the gradients that the buckets' members are indices into; a bucket
            without members is that of the same index in the first timeline.
        facts: facts that the file should state (``otherData``): model, cap, hardware.
        around: name of a process → forward pass and update, where they are known.
    """
    around = around or {}
    zero_s = max((step.forward_s for step in around.values()), default=0.0)
    members = [event.members for event in next(iter(timelines.values())).events]
    records: list[dict] = []
    for process, (label, timeline) in enumerate(timelines.items(), start=1):
        boxes = slices(timeline, around.get(label))
        threads = sorted({(_order(box), _thread_name(box)) for box in boxes})
        numbers = {name: 10 * process + number for number, (_, name) in enumerate(threads)}
        records += _metadata(process, label, numbers)
        for box in boxes:
            indices = box.event and (box.event.members or _at(members, box.event.index))
            names = [parameters[index] for index in indices or () if index < len(parameters)]
            ids = {"pid": process, "tid": numbers[_thread_name(box)]}
            complete = _complete(box.kind, box.name, box.start_s + zero_s, box.end_s + zero_s)
            records.append(complete | ids | {"args": _arguments(box, names)})
    return _document(records, facts)


def lanes_json(
    timelines: Mapping[str, Sequence[Box]], *, facts: Mapping[str, str] | None = None
) -> str:
    """Returns the text of a trace file: a process per name of a replay, a thread for each lane."""
    records: list[dict] = []
    number = 0
    for process, (label, boxes) in enumerate(timelines.items(), start=1):
        threads = {lane: number + i for i, lane in enumerate(sorted({b.lane for b in boxes}), 1)}
        number += len(threads)
        records += _metadata(process, label, threads)
        records += [
            _complete(box.name, box.name, box.start_s, box.end_s)
            | {"pid": process, "tid": threads[box.lane]}
            for box in boxes
        ]
    return _document(records, facts)


def _document(records: Sequence[dict], facts: Mapping[str, str] | None) -> str:
    document = {"traceEvents": records, "displayTimeUnit": "ms", "otherData": dict(facts or {})}
    return json.dumps(document, separators=(",", ":"))


def _computation(timeline: BackwardTimeline) -> list[Slice]:
    boxes, begun_s = [], 0.0
    for event in sorted(timeline.events, key=lambda event: event.ready_s):
        name = f"gradients of {bucket_name(event)}"
        boxes.append(Slice(COMPUTATION, 0, name, begun_s, event.ready_s, event))
        begun_s = event.ready_s
    boxes.append(Slice(COMPUTATION, 0, "after the last gradient", begun_s, timeline.compute_end_s))
    return boxes


def _order(box: Slice) -> tuple[int, int]:
    return (COMPUTATION, ALL_REDUCE, COPIES).index(box.kind), box.lane


def _thread_name(box: Slice) -> str:
    return box.kind if box.lane == 0 else f"{box.kind}, in flight {box.lane + 1}"


def _metadata(process: int, label: str, threads: Mapping[str, int]) -> list[dict]:
    def record(name: str, arguments: dict, thread: int = 0) -> dict:
        return {"ph": "M", "name": name, "pid": process, "tid": thread, "args": arguments}

    records = [
        record("process_name", {"name": label}),
        record("process_sort_index", {"sort_index": process}),
    ]
    for name, number in threads.items():
        records.append(record("thread_name", {"name": name}, number))
        records.append(record("thread_sort_index", {"sort_index": number}, number))
    return records


def _complete(category: str, name: str, start_s: float, end_s: float) -> dict:
    """Makes a complete event. Its end is rounded to ns, not its length, so that neighbours meet."""
    start_ns, end_ns = round(start_s * 1e9), round(end_s * 1e9)
    times = {"ts": start_ns / 1e3, "dur": (end_ns - start_ns) / 1e3}
    return {"ph": "X", "cat": category, "name": name, **times}


def _arguments(box: Slice, names: Sequence[str]) -> dict:
    event = box.event
    if event is None:
        return {}
    arguments: dict = {
        "bucket": event.index + 1,
        "size_bytes": event.size_bytes,
        "ready_ms": round(event.ready_s * 1e3, 6),
    }
    if box.kind == ALL_REDUCE:
        arguments["waited_ms"] = round((event.start_s - event.ready_s) * 1e3, 6)
        arguments["gb_per_s"] = round(event.size_bytes / (event.end_s - event.start_s) / 1e9, 6)
    if names:
        arguments["gradients"] = ", ".join(names)
    return arguments


def _at(members: Sequence[tuple[int, ...]], index: int) -> tuple[int, ...]:
    return members[index] if index < len(members) else ()
