"""SIGTERM and SIGUSR1 as requests to stop at the next step, with the work saved."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

REQUESTS = (signal.SIGTERM, signal.SIGUSR1)


@dataclass
class StopRequest:
    """The name of the signal that asked this rank to stop; empty while none did."""

    signal_name: str = ""


@contextmanager
def stop_requests(enabled: bool) -> Iterator[StopRequest]:
    """Yields a request that SIGTERM and SIGUSR1 set, and restores their handlers after the block.

    Unless ``enabled``, nothing sets it, and the signals do what they did before.

    Slurm sends SIGUSR1 where a job asks for it (``#SBATCH --signal=USR1@120``) and SIGTERM before
    it takes the nodes; torchrun passes SIGTERM on, and kills half a minute later.
    """
    request = StopRequest()
    if not enabled:
        yield request
        return

    def note(number: int, frame: FrameType | None) -> None:
        request.signal_name = signal.Signals(number).name

    before = {number: signal.signal(number, note) for number in REQUESTS}
    # The watchdog of ``leave_when_terminated`` would end the rank before it has saved.
    watchdog = signal.set_wakeup_fd(-1)
    try:
        yield request
    finally:
        signal.set_wakeup_fd(watchdog, warn_on_full_buffer=False)
        for number, handler in before.items():
            signal.signal(number, handler)
