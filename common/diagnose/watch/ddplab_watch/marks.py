"""Clocks: the host's, or events in a GPU's stream, which can be read when the GPU has passed them.

The same as in this project's benchmarks (``common/runtime/timing.py``); the watch must not import
those.
"""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from ddplab_watch import private

LAUNCH_S = 50e-6
"""Upper bound on the time in which Python launches one operation and marks its end."""
FASTEST_CLOCK_HZ = 3e9
"""Upper bound on a GPU's clock: cycles counted at this rate last at least as long as asked for."""


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

    def hold(self, launches: int) -> None:
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
        device: the model's, which need not be the current one.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._beside: Any = None

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

    def hold(self, launches: int) -> None:
        """Keeps the current stream busy while the host launches so many operations.

        Else an idle GPU waits for each of them, and what Python takes to launch it is measured.
        """
        with torch.cuda.device(self.device):
            private.sleep_on_gpu(int(launches * LAUNCH_S * FASTEST_CLOCK_HZ))

    def beside(self) -> AbstractContextManager:
        """Returns a context in which a stream of the watch's own is the current one."""
        if self._beside is None:
            self._beside = torch.cuda.Stream(self.device)
        return torch.cuda.stream(self._beside)

    def elapsed_s(self, start: Any, end: Any) -> float:
        """Returns the seconds between two marks that the device has passed."""
        return start.elapsed_time(end) / 1e3


def clock_of(device: torch.device) -> HostClock | CudaClock:
    """Returns the clock for work on ``device``."""
    return CudaClock(device) if device.type == "cuda" else HostClock()
