"""Tells a process from all others, so that it can be asked later whether it still runs."""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path

LAUNCHER = "DDPLAB_LAUNCHER"
"""Variable that holds the identity of the process that launched this one."""


def own_identity() -> str:
    """Returns what tells this process from all others: id, creation, PID namespace and host."""
    return f"{os.getpid()}:{_created(os.getpid())}:{_namespace()}:{socket.gethostname()}"


def has_ended(identity: str) -> bool:
    """Returns True if the process of an identity has ended.

    It is False for one that cannot be seen from here: on another host, or in another PID namespace
    (a container, an emulated host). On all hosts the first namespace has the same number.

    Raises:
        ValueError: the text is no identity.
    """
    pid, created, namespace, host = identity.split(":")
    is_near = namespace == str(_namespace()) and host == socket.gethostname()
    return is_near and created != _created(int(pid))


def _namespace() -> int:
    """Returns the number of this process's namespace of processes; 0 where there are none."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


def _created(pid: int) -> str:
    """Returns when a process was created, in a form that a step of the system's clock leaves alone.

    On Linux that is in ticks since the machine was started: field 22 of ``/proc/PID/stat``.
    """
    with contextlib.suppress(OSError):
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
        return stat.rpartition(")")[2].split()[19]  # a program's name may hold spaces
    import psutil  # where there is no /proc

    try:
        return str(psutil.Process(pid).create_time())
    except psutil.Error:
        return "gone"
