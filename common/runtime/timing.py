"""Clocks that a benchmark can trust on either kind of device.

On the CPU a mark is a reading of the monotonic clock. On CUDA a mark is an event in the current
stream, so that marking does not wait for the device; times are read after one synchronisation.

A GPU that is idle at the first mark waits for Python's launch of what is timed, 15 to 40 µs that
then count as the operation's. ``hold`` keeps the stream busy meanwhile.
"""

from __future__ import annotations

import time
from typing import Any

import torch

LAUNCH_S = 50e-6
"""Seconds in which Python launches one operation and marks its end; more than it usually takes."""
MARK_S = 8e-6
"""Seconds that a hook of Python's takes to mark a moment on CUDA: estimated, not measured."""
LAUNCHES_AHEAD = 1024
"""Launches that CUDA queues; a host that is further ahead of the device has to wait for it."""
FASTEST_CLOCK_HZ = 3e9
"""More than any GPU's clock: cycles at this rate last at least as long as was asked for."""


class HostClock:
    """Marks are clock readings, in seconds."""

    runs_ahead = False
    """Whether work can be launched before it begins."""

    def mark(self, again: float | None = None) -> float:
        """The present moment."""
        return time.perf_counter()

    def hold(self, duration_s: float) -> None:
        """Nothing is launched ahead on the CPU."""

    def wait(self) -> None:
        """Nothing runs asynchronously on the CPU."""

    def elapsed_s(self, start: float, end: float) -> float:
        """Seconds between two marks."""
        return end - start


class CudaClock:
    """Marks are CUDA events; ``wait`` before reading the time between two of them."""

    runs_ahead = True

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def mark(self, again: torch.cuda.Event | None = None) -> torch.cuda.Event:
        """An event recorded in the current stream.

        Args:
            again: an earlier mark that nobody will read any more, to be recorded anew, as making
                an event takes time of its own.
        """
        event = torch.cuda.Event(enable_timing=True) if again is None else again
        event.record()
        return event

    def hold(self, duration_s: float) -> None:
        """Keep the current stream busy for at least so long, while the host launches what follows.

        At most as long as it takes to fill CUDA's queue of launches. Where the GPU's clock is below
        FASTEST_CLOCK_HZ it takes longer, which nothing depends on.
        """
        limited_s = min(duration_s, LAUNCHES_AHEAD * LAUNCH_S)
        torch.cuda._sleep(int(limited_s * FASTEST_CLOCK_HZ))

    def wait(self) -> None:
        """Block until the device has done all that was launched."""
        torch.cuda.synchronize(self.device)

    def elapsed_s(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        """Seconds between two marks, on the device's clock."""
        return start.elapsed_time(end) / 1e3


def clock_for(device: torch.device) -> Any:
    """The clock that is right for work on ``device``."""
    return CudaClock(device) if device.type == "cuda" else HostClock()
