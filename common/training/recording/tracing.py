"""Some steps of a run under torch.profiler: a trace per rank, and the tables read from it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pandas as pd
import torch
from torch.profiler import ProfilerActivity, profile, schedule

from common.runtime.records.recorder import Recorder
from common.traces import step_overlap

TRACE = "rank{rank}.json.gz"
COLLECTIVE_COLUMNS = ("rank", "step", "operation", "size_bytes", "count")


def silence_profiler(device: torch.device) -> None:
    """Silences the profiler on a CPU, where a PyTorch built for CUDA reports the lack of a GPU."""
    if device.type == "cpu":
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")


@contextmanager
def traced_steps(
    path: Path | None, device: torch.device, wait: int, warmup: int, active: int
) -> Iterator[Callable[[], bool]]:
    """Traces ``active`` steps into ``path``, after ``wait`` steps and ``warmup`` more.

    Yields a function to call at the end of each step. It returns True if the profiler was on in
    that step, which makes the step slower than others. Without a path nothing is traced.
    """
    if path is None:
        yield lambda: False
        return
    silence_profiler(device)
    path.parent.mkdir(parents=True, exist_ok=True)
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    steps = 0

    def step_done() -> bool:
        nonlocal steps
        profiler.step()
        steps += 1
        # The step after the last traced one pays for writing the trace.
        return wait < steps <= wait + warmup + active + 1

    with profile(
        activities=activities,
        schedule=schedule(wait=wait, warmup=warmup, active=active, repeat=1),
        on_trace_ready=lambda profiler: profiler.export_chrome_trace(str(path)),
        record_shapes=True,
    ) as profiler:
        yield step_done


def write_trace_tables(recorder: Recorder, trace: Path, steps: range) -> bool:
    """Writes step-overlap.csv and step-collectives.csv from the traces of all ranks.

    All ranks call it. The tables are empty if there are no traces.

    Args:
        trace: this rank's trace, which does not exist if the run ended before it was traced.
        steps: the training steps since the profiler began to count; what came after the last
            one is no step.

    Returns:
        True if there were traces.
    """
    overlap = recorder.stream("step-overlap.csv", ("rank", *step_overlap.COLUMNS))
    collectives = recorder.stream("step-collectives.csv", COLLECTIVE_COLUMNS)
    if not trace.is_file():
        overlap.write([])
        collectives.write([])
        return False
    overlap.write(_of_training(step_overlap.read_step_overlap(trace), steps))
    collectives.write(_of_training(step_overlap.collectives_of(trace), steps))
    return True


def _of_training(table: pd.DataFrame, steps: range) -> list[dict]:
    """Returns the table's rows, with the trace's step numbers replaced by those of training."""
    numbered = table.assign(step=table["step"] + steps.start)
    return numbered[numbered["step"] < steps.stop].to_dict("records")
