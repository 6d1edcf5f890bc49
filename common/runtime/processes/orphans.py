"""Children that end with their parent, so that no process is left behind (Linux).

A child asks the kernel for this itself. A rank that torchrun started does so in its own code. Other
commands are started by this file (``ending_with_parent``), which asks and then becomes the command.
``preexec_fn`` would ask between fork and exec, in a copy of a process whose threads, CUDA's among
them, may hold locks that nobody releases there; without it subprocess can use vfork, too.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

PR_SET_PDEATHSIG = 1
ANY = 0
"""Stands for a parent that is not known yet."""
_START = [sys.executable, "-I", "-S", os.path.abspath(__file__)]


def die_with_parent() -> None:
    """Makes the kernel kill this process when its parent ends; does nothing except on Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def ending_with_parent(command: Sequence[str], parent: int | None = None) -> list[str]:
    """Returns a command that runs ``command`` and ends with its parent, by default this process.

    With ``ANY`` that is whoever starts it, such as torchrun. Except on Linux it is ``command``
    itself. Both are one process: the Python that asks the kernel is replaced by the command.
    """
    if sys.platform != "linux":
        return list(command)
    return [*_START, str(os.getpid() if parent is None else parent), *command]


def _become(parent: int, command: Sequence[str]) -> None:
    """Replaces this process by ``command``, unless ``parent`` ended before the kernel was asked."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # what a shell starts in the background ignores it
    if parent not in (os.getppid(), ANY):
        os._exit(1)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"{command[0]}: {error.strerror}")


if __name__ == "__main__":
    _become(int(sys.argv[1]), sys.argv[2:])
