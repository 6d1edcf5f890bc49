"""No process is left behind: on Linux a child can ask to end with its parent.

A rank that torchrun started asks by itself. A command that knows nothing of this is started by this
file (``ending_with_parent``), which asks and then becomes the command. ``preexec_fn`` would ask
between fork and exec, in a copy of a process whose threads, CUDA's among them, may hold locks that
nobody releases there; without it subprocess can use vfork, too.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Let the kernel end this process when the one that started it is gone. Elsewhere nothing."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def ending_with_parent(command: Sequence[str]) -> list[str]:
    """The command that runs ``command`` until this process is gone; elsewhere ``command`` itself.

    Both are one process: the Python that asks the kernel is replaced by the command.
    """
    if sys.platform != "linux":
        return list(command)
    return [sys.executable, "-I", "-S", os.path.abspath(__file__), str(os.getpid()), *command]


def _become(parent: int, command: Sequence[str]) -> None:
    """Replace this process by ``command``, unless ``parent`` has ended before it could ask."""
    die_with_parent()
    if os.getppid() != parent:
        os._exit(1)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"{command[0]}: {error.strerror}")


if __name__ == "__main__":
    _become(int(sys.argv[1]), sys.argv[2:])
