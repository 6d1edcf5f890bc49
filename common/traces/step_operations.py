"""Takes the communication of a trace's steps apart by operation: gathers, scatters, all-reduces.

Read from a trace of torch.profiler as ``step_overlap`` does: NCCL's kernels on a GPU, gloo's ranges
on a CPU. Gloo scatters by an all-reduce; where the program asks for reduce-scatters and for no
all-reduce, its all-reduces are those.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import pandas as pd

from common.tables import TRACE_OPERATION_COLUMNS
from common.traces.operation_names import GLOO, collective
from common.traces.profiler_trace import Event
from common.traces.step_overlap import INTERVALS, Activity, StepWindow, kernel_kind

COLUMNS = TRACE_OPERATION_COLUMNS[1:]
GATHER, SCATTER, ADD = "all_gather", "reduce_scatter", "all_reduce"


def step_operations(
    events: Sequence[Event], windows: Sequence[StepWindow], activity: Activity
) -> pd.DataFrame:
    """Returns a row per step and operation.

    Columns: step, operation (``all_gather``, ``reduce_scatter``, ``all_reduce``, …; ``other`` where
    the name does not tell), calls (that began in the step), communication_ms, exposed_ms (without
    computation). Time of several operations at once counts for each.
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
            spans = INTERVALS.union([(event.start_us, event.end_us) for event in occurrences])
            spans = INTERVALS.intersection(spans, step)
            exposed = INTERVALS.difference(spans, activity.computation)
            calls = sum(window.start_us <= event.start_us < window.end_us for event in occurrences)
            if calls or len(spans):
                times_us = INTERVALS.length(spans), INTERVALS.length(exposed)
                rows.append((window.step, name, calls, *(time / 1e3 for time in times_us)))
    return pd.DataFrame(rows, columns=list(COLUMNS))


def _communicates(event: Event, on_device: bool) -> bool:
    if on_device:
        return event.kind == "kernel" and kernel_kind(event.name) == "communication"
    return event.kind == "range" and event.name.startswith(GLOO)


def _only_scatters(events: Sequence[Event]) -> bool:
    """Returns True if the program asked for reduce-scatters and for no all-reduce."""
    calls = {event.name for event in events if event.name.startswith("c10d::")}
    return any("reduce_scatter" in name for name in calls) and "c10d::allreduce_" not in calls
