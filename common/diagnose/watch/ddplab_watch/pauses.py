"""Counts interruptions of a training: garbage collection, recompilation, the allocator."""

from __future__ import annotations

import gc
import os
import sys
import time
from typing import Any

import torch


class Pauses:
    """Counts and times between two calls of ``taken``.

    Args:
        device: device of the model, whose allocator is asked.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.collecting_s = 0.0
        self._began: float | None = None
        self._before = self._counted()

    def install(self) -> None:
        """Begins to listen to the garbage collector."""
        gc.callbacks.append(self._collecting)

    def remove(self) -> None:
        """Stops listening."""
        if self._collecting in gc.callbacks:
            gc.callbacks.remove(self._collecting)

    def _collecting(self, phase: str, _: dict) -> None:
        if phase == "start":
            self._began = time.perf_counter()
        elif self._began is not None:
            self.collecting_s += time.perf_counter() - self._began
            self._began = None

    def taken(self) -> dict[str, float]:
        """Returns collecting_time_ms, recompilations and allocator_retries since the last call."""
        before, self._before = self._before, self._counted()
        collecting_s, self.collecting_s = self.collecting_s, 0.0
        counts = {name: count - before[name] for name, count in self._before.items()}
        return {"collecting_time_ms": collecting_s * 1e3, **counts}

    def _counted(self) -> dict[str, int]:
        return {"recompilations": _compiled_frames(), "allocator_retries": _retries(self.device)}


def _compiled_frames() -> int:
    """Returns how often torch.compile has compiled so far."""
    utils: Any = sys.modules.get("torch._dynamo.utils")
    if utils is None:
        return 0
    counters = getattr(utils, "counters", {})
    return int(counters["stats"]["unique_graphs"]) if "stats" in counters else 0


def _retries(device: torch.device) -> int:
    """Returns how often the CUDA allocator had to give memory back and ask again."""
    if device.type != "cuda":
        return 0
    return int(torch.cuda.memory_stats(device).get("num_alloc_retries", 0))


class Memory:
    """The process's memory; its file stays open, as opening it takes ten times the reading.

    Args:
        device: device of the model.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.page_bytes = os.sysconf("SC_PAGE_SIZE")
        try:
            self.file: int | None = os.open("/proc/self/statm", os.O_RDONLY)
        except OSError:
            self.file = None

    def read(self) -> dict[str, int]:
        """Returns resident_bytes, and allocated_bytes and reserved_bytes on the GPU; else 0."""
        resident = 0
        if self.file is not None:
            resident = int(os.pread(self.file, 64, 0).split()[1]) * self.page_bytes
        on_gpu = self.device.type == "cuda"
        read = {"resident_bytes": resident, "allocated_bytes": 0, "reserved_bytes": 0}
        if on_gpu:
            read["allocated_bytes"] = torch.cuda.memory_allocated(self.device)
            read["reserved_bytes"] = torch.cuda.memory_reserved(self.device)
        return read

    def close(self) -> None:
        """Closes the file."""
        if self.file is not None:
            os.close(self.file)
            self.file = None
