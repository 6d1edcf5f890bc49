"""Clocks that can be trusted on either kind of device: the host's, or events in a GPU's stream.

On the CPU a mark is a reading of the monotonic clock. On CUDA a mark is an event in the current
stream, so that marking does not wait for the device; the time between two is read when the GPU has
passed them.

A GPU that is idle at the first mark waits for Python to launch what is timed: 15 to 40 µs that
would count as the operation's. ``hold`` keeps the stream busy meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch

from ddplab_watch import torch_internals

LAUNCH_S = 50e-6
"""Upper bound on the time in which Python launches one operation and marks its end."""
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

    def passed(self, mark: float) -> bool:
        """Returns True: a moment of the host is past once it is noted."""
        return True

    def wait(self) -> None:
        """Does nothing: nothing runs asynchronously."""

    def hold(self, duration_s: float) -> None:
        """Does nothing: nothing is launched ahead."""

    def beside(self) -> AbstractContextManager:
        """Returns a context that changes nothing: there are no streams."""
        return nullcontext()

    def elapsed_s(self, start: float, end: float) -> float:
        """Returns the seconds between two marks."""
        return end - start


class CudaClock:
    """The clock of a GPU: marks are events in its current stream.

    Args:
        device: device of the work, which need not be the current one.
        sleep: keeps the current stream busy for so many cycles of the GPU's clock; by default
            where this version of torch can.
    """

    runs_ahead = True

    def __init__(
        self, device: torch.device, sleep: Callable[[int], None] = torch_internals.sleep_on_gpu
    ) -> None:
        self.device, self.sleep = device, sleep
        self._beside: torch.cuda.Stream | None = None

    def mark(self, again: torch.cuda.Event | None = None) -> torch.cuda.Event:
        """Records an event and returns it; it does not wait for the device.

        Args:
            again: an earlier mark that is not read any more, which is reused, as making an event
                takes time.
        """
        event = torch.cuda.Event(enable_timing=True) if again is None else again
        event.record(torch.cuda.current_stream(self.device))
        return event

    def passed(self, mark: torch.cuda.Event) -> bool:
        """Returns True if the device has come to the mark."""
        return mark.query()

    def wait(self) -> None:
        """Blocks until the device has done all that was launched."""
        torch.cuda.synchronize(self.device)

    def hold(self, duration_s: float) -> None:
        """Keeps the current stream busy for at least ``duration_s``, while the host launches.

        The time is limited to what filling CUDA's queue of launches takes. If the GPU's clock is
        below FASTEST_CLOCK_HZ, the stream is held longer, which does no harm.
        """
        limited_s = min(duration_s, LAUNCHES_AHEAD * LAUNCH_S)
        with torch.cuda.device(self.device):
            self.sleep(int(limited_s * FASTEST_CLOCK_HZ))

    def beside(self) -> AbstractContextManager:
        """Returns a context in which a stream of the clock's own is the current one."""
        if self._beside is None:
            self._beside = torch.cuda.Stream(self.device)
        return torch.cuda.stream(self._beside)

    def elapsed_s(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        """Returns the seconds between two marks that the device has passed."""
        return start.elapsed_time(end) / 1e3


Clock = HostClock | CudaClock
Mark = float | torch.cuda.Event


def clock_of(
    device: torch.device, sleep: Callable[[int], None] = torch_internals.sleep_on_gpu
) -> Clock:
    """Returns the clock for work on ``device``; ``sleep`` as for ``CudaClock``."""
    return CudaClock(device, sleep) if device.type == "cuda" else HostClock()
