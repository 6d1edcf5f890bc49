"""Some steps of a run under torch.profiler, as one trace per rank."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, schedule

TRACE = "rank{rank}.json.gz"


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
