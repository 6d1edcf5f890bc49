"""Clocks that a benchmark can trust on either kind of device.

On the CPU a mark is a reading of the monotonic clock. On CUDA a mark is an event in the current
stream, so that marking does not wait for the device; times are read after one synchronisation.

A GPU that is idle at the first mark waits for Python to launch what is timed: 15 to 40 µs that
would count as the operation's. ``hold`` keeps the stream busy meanwhile.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from common.runtime import private

LAUNCH_S = 50e-6
"""Upper bound on the time in which Python launches one operation and marks its end."""
MARK_S = 8e-6
"""Time in which a Python hook marks a moment on CUDA: estimated, not measured."""
LAUNCHES_AHEAD = 1024
"""Launches that CUDA queues; a host that is further ahead of the device has to wait for it."""
FASTEST_CLOCK_HZ = 3e9
"""Upper bound on a GPU's clock: cycles counted at this rate last at least as long as asked for."""


class HostClock:
    """The clock of a CPU: marks are readings of ``perf_counter``, in seconds."""

    runs_ahead = False
    """True if work can be launched before it begins."""

    def mark(self, again: float | None = None) -> float:
        """Returns the present moment, in seconds."""
        return time.perf_counter()

    def hold(self, duration_s: float) -> None:
        """Does nothing, as nothing is launched ahead on the CPU."""

    def wait(self) -> None:
        """Does nothing, as nothing runs asynchronously on the CPU."""

    def has_passed(self, mark: float) -> bool:
        """Returns True, as a moment of the CPU is one of the past."""
        return True

    def elapsed_s(self, start: float, end: float) -> float:
        """Returns the seconds between two marks."""
        return end - start


class CudaClock:
    """The clock of a GPU: marks are CUDA events; ``wait`` comes before reading the time between."""

    runs_ahead = True

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def mark(self, again: torch.cuda.Event | None = None) -> torch.cuda.Event:
        """Records an event in the current stream and returns it.

        Args:
            again: an earlier mark that is not read any more, which is reused, as making an event
                takes time.
        """
        event = torch.cuda.Event(enable_timing=True) if again is None else again
        event.record()
        return event

    def hold(self, duration_s: float) -> None:
        """Keeps the current stream busy for at least ``duration_s``, while the host launches.

        The time is limited to what filling CUDA's queue of launches takes. If the GPU's clock is
        below FASTEST_CLOCK_HZ, the stream is held longer, which does no harm.
        """
        limited_s = min(duration_s, LAUNCHES_AHEAD * LAUNCH_S)
        private.sleep_on_gpu(int(limited_s * FASTEST_CLOCK_HZ))

    def wait(self) -> None:
        """Blocks until the device has done all that was launched."""
        torch.cuda.synchronize(self.device)

    def has_passed(self, mark: torch.cuda.Event) -> bool:
        """Returns True if the device has done all that was before the mark in its stream."""
        return mark.query()

    def elapsed_s(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        """Returns the seconds between two marks, on the device's clock."""
        return start.elapsed_time(end) / 1e3


def clock_for(device: torch.device) -> Any:
    """Returns the clock for work on ``device``."""
    return CudaClock(device) if device.type == "cuda" else HostClock()
