"""How much memory a rank needs: of each step, and of one step to the byte."""

from __future__ import annotations

import contextlib
import itertools
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from common.training.tracing import silence_profiler

STATUS, CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")
RESET_PEAK = "5"  # proc(5): set the peak resident set size to the present one
WATCHED = "watched step"


class PeakMemory:
    """The most memory in use during a step.

    On a GPU what the caching allocator handed out; on a CPU the process's resident memory, with
    all that Python and its libraries take, where the system tells it.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def start(self) -> None:
        """Forget what was before."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            return
        with contextlib.suppress(OSError):  # else the peak is that of the process up to now
            CLEAR_REFS.write_text(RESET_PEAK)

    def peak_bytes(self) -> int | None:
        """Since the start, in bytes; None where the system does not tell."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        try:
            lines = STATUS.read_text().splitlines()
        except OSError:
            return None
        kib = [line.split()[1] for line in lines if line.startswith("VmHWM:")]
        return int(kib[0]) * 1024 if kib else None


class AllocationWatch:
    """Follows every allocation on a CPU from its start to the end of one step.

    The CPU's allocator keeps no counters, but tells the profiler of all it does. Watched from
    before the model is built, nothing that a strategy keeps from step to step is left out.
    """

    def __init__(self) -> None:
        silence_profiler(torch.device("cpu"))
        self._profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        self._profiler.start()
        self._step = None

    def start_step(self) -> None:
        """The step whose peak is wanted begins."""
        self._step = record_function(WATCHED)
        self._step.__enter__()

    def finish(self) -> int:
        """End the step and the watching; the most bytes that were allocated during the step."""
        self._step.__exit__(None, None, None)
        self._profiler.stop()
        events = self._profiler.profiler.kineto_results.events()
        began = next(event.start_ns() for event in events if event.name() == WATCHED)
        memory = sorted(
            (event for event in events if event.name() == "[memory]"), key=lambda e: e.start_ns()
        )
        totals = itertools.accumulate(event.nbytes() for event in memory)
        during = [
            total for total, event in zip(totals, memory, strict=True) if event.start_ns() >= began
        ]
        return max(during)
