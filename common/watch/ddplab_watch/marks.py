"""Clocks: the host's, or events in a GPU's stream, which can be read when the GPU has passed them.

The same as in this project's benchmarks (``common/runtime/timing.py``); the watch must not import
those.
"""

from __future__ import annotations

import time
from typing import Any

import torch


class HostClock:
    """The clock of a CPU: marks are readings of ``perf_counter``, in seconds."""

    def mark(self) -> float:
        """Returns the present moment."""
        return time.perf_counter()

    def passed(self, mark: float) -> bool:
        """Returns True: a moment of the host is past once it is noted."""
        return True

    def wait(self) -> None:
        """Does nothing: nothing runs asynchronously."""

    def elapsed_s(self, start: float, end: float) -> float:
        """Returns the seconds between two marks."""
        return end - start


class CudaClock:
    """The clock of a GPU: marks are events in its current stream.

    Args:
        device: the model's, which need not be the current one.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def mark(self) -> Any:
        """Records an event; it does not wait for the device."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def passed(self, mark: Any) -> bool:
        """Returns True if the device has come to the mark."""
        return mark.query()

    def wait(self) -> None:
        """Blocks until the device has done all that was launched."""
        torch.cuda.synchronize(self.device)

    def elapsed_s(self, start: Any, end: Any) -> float:
        """Returns the seconds between two marks that the device has passed."""
        return start.elapsed_time(end) / 1e3


def clock_of(device: torch.device) -> HostClock | CudaClock:
    """Returns the clock for work on ``device``."""
    return CudaClock(device) if device.type == "cuda" else HostClock()
