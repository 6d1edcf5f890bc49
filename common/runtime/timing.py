"""Clocks that a benchmark can trust on either kind of device.

On the CPU a mark is a reading of the monotonic clock. On CUDA a mark is an event in the current
stream, so that marking does not wait for the device; times are read after one synchronisation.
"""

from __future__ import annotations

import time
from typing import Any

import torch


class HostClock:
    """Marks are clock readings, in seconds."""

    def mark(self) -> float:
        """The present moment."""
        return time.perf_counter()

    def wait(self) -> None:
        """Nothing runs asynchronously on the CPU."""

    def elapsed_s(self, start: float, end: float) -> float:
        """Seconds between two marks."""
        return end - start


class CudaClock:
    """Marks are CUDA events; ``wait`` before reading the time between two of them."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def mark(self) -> torch.cuda.Event:
        """An event recorded in the current stream."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def wait(self) -> None:
        """Block until the device has done all that was launched."""
        torch.cuda.synchronize(self.device)

    def elapsed_s(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        """Seconds between two marks, on the device's clock."""
        return start.elapsed_time(end) / 1e3


def clock_for(device: torch.device) -> Any:
    """The clock that is right for work on ``device``."""
    return CudaClock(device) if device.type == "cuda" else HostClock()
