"""Starts a process that Ctrl-C interrupts, however the tests themselves were started; waits.

Also finds the processes that are left of it, by their variables.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence

import psutil


def start_interruptible(command: Sequence[str], **options: object) -> subprocess.Popen:
    """Starts a process as a terminal does; ``options`` are those of ``subprocess.Popen``.

    A shell starts background jobs with SIGINT ignored. Children inherit that, and a Python that
    starts so raises no KeyboardInterrupt.
    """

    def heed_ctrl_c() -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    return subprocess.Popen(command, preexec_fn=heed_ctrl_c, **options)


def wait_until(
    ready: Callable[[], object],
    what: Callable[[], object] = lambda: "waited in vain",
    *,
    seconds: float = 60,
) -> None:
    """Waits until ``ready()`` is true; after so many seconds fails with ``what()``."""
    deadline = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < deadline, what()
        time.sleep(0.05)


def living(is_wanted: Callable[[Mapping[str, str]], bool]) -> list[psutil.Process]:
    """Lists the living processes, but other users', with variables of which this is true."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if is_wanted(process.environ()) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found
