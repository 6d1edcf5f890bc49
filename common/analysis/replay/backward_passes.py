"""Backward passes of a rank as its trace shows them: gradients, when each was ready, buckets."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from common.analysis.replay.lanes import (
    MainThread,
    RankLanes,
    bucket_copies,
    main_thread,
    numbered_steps,
)
from common.traces import operation_names as names
from common.traces.rank_trace import RankTrace, Span


@dataclass(eq=False)
class Pass:
    """A backward pass of one rank; seconds from its start, in the order of the gradients.

    Attributes:
        sizes: bytes of the gradients.
        ready_s: when each was ready, without copies and launches.
        buckets: number of gradients of each bucket.
        handed: calls that handed the buckets over.
        begin_us, end_us: the pass as it was, with the exchange, on the trace's clock.
        copied_in_s, launched_s, copied_out_s: seconds of copies and launches.
    """

    sizes: list[float] = field(default_factory=list)
    ready_s: list[float] = field(default_factory=list)
    buckets: list[int] = field(default_factory=list)
    handed: list[Span] = field(default_factory=list)
    begin_us: float = 0.0
    end_us: float = 0.0
    copied_in_s: float = 0.0
    launched_s: float = 0.0
    copied_out_s: float = 0.0


def passes_of(part: RankLanes) -> dict[int, Pass]:
    """Finds the backward pass of each step of a rank; steps without buckets have none."""
    trace = part.trace
    device = _DeviceTimes(trace) if trace.on_device else None
    main = None if device else main_thread(trace)
    handed = trace.handed
    of_step: dict[int, list[tuple[Span, list[Span], list[Span]]]] = defaultdict(list)
    ranges = numbered_steps(trace)
    starts = [span.start_us for _, span in ranges]
    steps = {call.step for call in part.calls}
    for index, (inside, outside) in bucket_copies(trace, handed).items():
        position = bisect_left(starts, handed[index].start_us) - 1
        if position >= 0 and ranges[position][0] in steps:
            of_step[position].append((handed[index], inside, outside))
    passes = {}
    for position, buckets in of_step.items():
        until_us = ranges[position][1].end_us
        nodes = [n for n in trace.nodes if starts[position] <= n.start_us < until_us]
        nodes = _of_last_pass(nodes, sum(len(inside) for _, inside, _ in buckets))
        if nodes:
            passes[ranges[position][0]] = _pass(nodes, buckets, device, main)
    return passes


def _of_last_pass(nodes: Sequence[Span], gradients: int) -> Sequence[Span]:
    """Returns the nodes of the last micro-batch of a step, which alone copies its gradients.

    Each micro-batch accumulates every gradient once. Where that does not come out, others are
    accumulated too, and the step is taken as one.
    """
    accumulated = [node for node in nodes if names.ACCUMULATES in node.name]
    passes, beyond = divmod(len(accumulated), gradients)
    before = 0 if beyond else gradients * max(0, passes - 1)
    since_us = accumulated[before - 1].end_us if before else -np.inf
    return [node for node in nodes if node.start_us >= since_us]


class _DeviceTimes:
    """Times at which the device does what the host launched in a stretch of time."""

    def __init__(self, trace: RankTrace) -> None:
        launched = {k.correlation: k for k in trace.kernels if not k.size_bytes}
        pairs = sorted(
            (span.start_us, launched[span.correlation].start_us, launched[span.correlation].end_us)
            for span in trace.runtime
            if span.correlation in launched
        )
        self.table = np.array(pairs).reshape(-1, 3)

    def of(self, span: Span) -> tuple[float, float, float]:
        """Returns start, end and work of the kernels launched in a span; its own without any."""
        first, last = np.searchsorted(self.table[:, 0], [span.start_us, span.end_us])
        rows = self.table[first:last, 1:]
        if not len(rows):
            return span.start_us, span.end_us, 0.0
        return float(rows[:, 0].min()), float(rows[:, 1].max()), float(np.diff(rows, axis=1).sum())


def _pass(
    nodes: Sequence[Span],
    buckets: Sequence[tuple[Span, list[Span], list[Span]]],
    device: _DeviceTimes | None,
    main: MainThread | None,
) -> Pass:
    """Makes a pass from its nodes and buckets, as (handed over, copies in, copies out)."""

    def times(span: Span) -> tuple[float, float, float]:
        if device:
            return device.of(span)
        return span.start_us, span.end_us, span.end_us - span.start_us

    made = Pass()
    begin_us = last_us = times(nodes[0])[0]
    spent_us = 0.0
    for handed, inside, outside in buckets:
        made.buckets.append(len(inside))
        made.handed.append(handed)
        for copy in inside:
            start_us, end_us, work_us = times(copy)
            made.sizes.append(copy.size_bytes or -work_us)
            made.ready_s.append((start_us - begin_us - spent_us) / 1e6)
            spent_us += work_us
            made.copied_in_s += work_us / 1e6
            last_us = max(last_us, end_us)
        launch_us = handed.end_us - handed.start_us
        made.launched_s += launch_us / 1e6
        spent_us += launch_us
        last_us = max([last_us, *(times(copy)[1] for copy in outside)])
    made.copied_out_s = _copied_out_us(buckets, main) / 1e6
    compute_end_us = max(times(node)[1] for node in nodes[-8:])
    made.begin_us, made.end_us = begin_us, max(last_us, compute_end_us)
    return made


def _copied_out_us(
    buckets: Sequence[tuple[Span, list[Span], list[Span]]], main: MainThread | None
) -> float:
    """Returns how long the host copies buckets out, with what it does for that between copies.

    On a CPU that is without the wait for each bucket; on a GPU the host does not wait there.
    """
    before_us, total_us = buckets[-1][0].end_us, 0.0
    for _, _, outside in buckets:
        if outside:
            paused_us = 0.0
            if main:
                since_us, until_us = main.longest_pause(before_us, outside[0].start_us)
                paused_us = until_us - since_us
            total_us += max(0.0, outside[-1].end_us - before_us - paused_us)
            before_us = outside[-1].end_us
    return total_us
