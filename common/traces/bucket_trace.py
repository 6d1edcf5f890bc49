"""Each bucket of a backward pass under DDP, as a trace of torch.profiler shows it on the CPU.

DDP is watched from outside, without a hook that would change its path. In the thread that runs the
backward pass the trace shows

- each gradient's copy into its bucket, with division (``reducer::mul_out``),
- the moment a bucket is handed over, which is when it is ready (``c10d::allreduce_``); DDP hands
  buckets over in index order,
- each node of autograd, whose last end is the end of computation,
- each gradient's copy out of its bucket, once that is reduced.

In the threads of gloo's process group it shows the all-reduces themselves, from the moment a thread
takes one from the queue. A slower rank is waited for inside of it.
Source of the names: ``Reducer::mark_variable_ready_dense`` and ``finalize_bucket_dense`` in
PyTorch's torch/csrc/distributed/c10d/reducer.cpp, ``AsyncAllreduceWork`` in ProcessGroupGloo.cpp.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from common.errors import UserError
from common.traces.operation_names import COPIED_IN, COPIED_OUT, NODE
from common.traces.profiler_trace import Event

BACKWARD = "ddplab: backward pass"
"""The range that a program puts around ``loss.backward()``."""

BUCKET_FIELDS = (
    *("bucket", "size_bytes", "thread", "copy_in_ms", "launch_ms", "ready_ms", "start_ms"),
    *("end_ms", "copied_ms", "compute_end_ms", "backward_ms"),
)
"""Columns of a bucket in one pass; ms from the pass's start.

``thread``: which of the group's threads reduced it, counted from 0; ``copy_in_ms``: how long the
copies into it took; ``launch_ms``: how long handing it over took; ``compute_end_ms`` and
``backward_ms`` are the pass's.
"""

HANDED_OVER = "c10d::allreduce_"
REDUCED = "gloo:all_reduce"


def bucket_rows(events: Sequence[Event], sizes_bytes: Sequence[int]) -> list[dict]:
    """Finds the buckets of the backward pass in a trace, as rows of BUCKET_FIELDS.

    Args:
        events: events of one rank, from a trace with shapes.
        sizes_bytes: bytes of DDP's buckets, in index order.

    Raises UserError unless there is exactly one pass, with an all-reduce for each bucket.
    """
    passes = [event for event in events if event.kind == "range" and event.name == BACKWARD]
    if len(passes) != 1:
        raise UserError(f"{len(passes)} backward passes in the trace (named {BACKWARD!r}), not one")
    (backward,) = passes
    events = sorted(events, key=lambda event: event.start_us)
    count = len(sizes_bytes)
    inside = [event for event in events if backward.start_us <= event.start_us < backward.end_us]
    on_thread = [event for event in inside if event.thread == backward.thread]
    handed = [event for event in on_thread if event.name == HANDED_OVER][:count]
    reduced = [event for event in inside if event.name == REDUCED][:count]
    if min(len(handed), len(reduced)) < count:
        raise UserError(
            f"the trace shows {len(handed)} buckets handed over and {len(reduced)} reduced, "
            f"DDP has {count}"
        )
    item_bytes = sum(sizes_bytes) / sum(map(elements, reduced))
    reduced = in_bucket_order(reduced, [size / item_bytes for size in sizes_bytes])
    threads = list(dict.fromkeys(event.thread for event in reduced))
    nodes = [event.end_us for event in on_thread if event.name.startswith(NODE)]
    compute_end_us = max(nodes, default=handed[-1].end_us)
    copies = [event for event in on_thread if event.name.startswith(COPIED_OUT)]
    spans_us = copy_spans_us(copies, [size / item_bytes for size in sizes_bytes])
    copied_in = [event for event in on_thread if event.name in COPIED_IN]

    rows: list[dict] = []
    before_us = backward.start_us
    copied_us = compute_end_us
    for index, size in enumerate(sizes_bytes):
        ready_us = handed[index].start_us
        copying = [e for e in copied_in if before_us <= e.start_us < ready_us]
        # A thread notes the end only after it has woken the one that waits for it.
        copying_us = spans_us[index] if index < len(spans_us) else (backward.end_us, 0.0)
        end_us = min(reduced[index].end_us, copying_us[0])
        copied_us = max(copied_us, end_us, copying_us[1])
        start_us = max(ready_us, reduced[index].start_us)
        moments = (ready_us, start_us, end_us, copied_us, compute_end_us)
        times_ms = ((moment - backward.start_us) / 1e3 for moment in (*moments, backward.end_us))
        copy_in_ms = sum(event.end_us - event.start_us for event in copying) / 1e3
        launch_ms = (handed[index].end_us - ready_us) / 1e3
        thread = threads.index(reduced[index].thread)
        values = (index, int(size), thread, copy_in_ms, launch_ms, *times_ms)
        rows.append(dict(zip(BUCKET_FIELDS, values, strict=True)))
        before_us = ready_us
    return rows


def elements(event: Event) -> int:
    """Counts the elements of an operator's input tensors; a scalar, without a shape there, has one.

    >>> elements(Event("gloo:all_reduce", 0, 1, shapes=((3, 4),)))
    12
    """
    return sum(map(prod, event.shapes)) or 1


def in_bucket_order(reduced: Sequence[Event], expected: Sequence[float]) -> list[Event]:
    """Orders all-reduces by bucket: by their start, unless their sizes say otherwise.

    Threads take buckets from one queue in order, but two that start within microseconds of each
    other may be noted the other way round.
    """
    queue = sorted(reduced, key=lambda event: event.start_us)
    ordered = []
    for size in expected:
        fitting = (event for event in queue if abs(elements(event) - size) < 0.5)
        event = next(fitting, queue[0])
        queue.remove(event)
        ordered.append(event)
    return ordered


def copy_spans_us(copies: Sequence[Event], expected: Sequence[float]) -> list[tuple[float, float]]:
    """Finds the span in which each bucket is copied out: by the next copies that fill its size.

    There is none where gradients are views of buckets.
    """
    spans_us: list[tuple[float, float]] = []
    filled, begun_us = 0.0, None
    for copy in sorted(copies, key=lambda event: event.start_us):
        begun_us = copy.start_us if begun_us is None else begun_us
        filled += elements(copy)
        if len(spans_us) < len(expected) and filled > expected[len(spans_us)] - 0.5:
            spans_us.append((begun_us, copy.end_us))
            filled, begun_us = 0.0, None
    return spans_us
