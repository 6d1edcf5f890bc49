"""The sandbox's first process: ``python -m common.course.sandbox.callee CONTROL ISOLATION USER``.

It imports what takes long, takes away what is not for exercises, and forks a process for each
connection that comes through its control socket. There a student's functions are called. It reads
nothing that a student's code writes.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import socket
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path
from types import ModuleType

from common.course.sandbox import confinement
from common.course.sandbox.scratch import empty
from common.course.sandbox.wire import Peer

PRELOADED = (
    "numpy",
    "pandas",
    "torch.distributed",
    "torch._dynamo",
    "torch.testing",
    "common.course.sandbox.judged_group",
)
PACKAGES = {"exercise": "common.exercises", "probe": "probes"}
SCRATCH = (Path("/tmp"), Path("/dev/shm"))
"""Folders of a root of its own that student code may write to."""
NAMESPACES = ("namespaces", "user namespaces")
REAPED_EVERY_S = 0.2
GONE_S = 15.0
"""Upper bound on waiting for killed processes; below what the other side waits for an answer."""


def main() -> None:
    """Serves the control socket until it is closed."""
    control = socket.socket(fileno=int(sys.argv[1]))
    isolation, uid = sys.argv[2], int(sys.argv[3])
    for name in PRELOADED:
        importlib.import_module(name)
    confinement.withhold()
    if isolation in NAMESPACES:
        confinement.hide_files()
    confinement.protect_this_process()
    control.send(b"ready")
    control.settimeout(REAPED_EVERY_S)
    while True:
        try:
            message, descriptors, _, _ = socket.recv_fds(control, 2**16, 1)
        except TimeoutError:
            reap()
            continue
        if not message:
            sweep(isolation, uid)
            return
        wanted = json.loads(message)
        if "folder" in wanted:
            if os.fork() == 0:
                control.close()
                be_called(socket.socket(fileno=descriptors[0]), isolation, uid, **wanted)
            os.close(descriptors[0])
        else:
            sweep(isolation, uid)
            control.send(b"swept")


def reap() -> None:
    """Lets go of processes that have ended."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:  # there are none
        pass


def sweep(isolation: str, uid: int) -> None:
    """Ends all processes of students, waits until they are gone, and deletes what they wrote.

    A process that was killed is there, with its memory, until it has run once more.
    """
    deadline = time.monotonic() + GONE_S
    while True:
        kill_all(isolation, uid)
        reap()
        if time.monotonic() > deadline or not are_left(isolation, uid):
            break
        time.sleep(0.01)
    if isolation in NAMESPACES:
        for folder in SCRATCH:
            empty(folder)


def kill_all(isolation: str, uid: int) -> None:
    """Kills all processes of students."""
    if isolation in NAMESPACES:
        with suppress(ProcessLookupError):  # all of this namespace but its first, which this is
            os.kill(-1, signal.SIGKILL)
    elif isolation == "other user":
        if (killer := os.fork()) == 0:
            try:
                os.setresuid(uid, uid, 0)
                os.kill(-1, signal.SIGKILL)
            finally:
                os._exit(0)
        os.waitpid(killer, 0)
    else:
        for child in children():
            os.kill(child, signal.SIGKILL)


def are_left(isolation: str, uid: int) -> bool:
    """Returns True while a process of a student is there."""
    if isolation == "other user":  # orphans, too, which are nobody's children here
        return any(user_of(path) == uid for path in Path("/proc").glob("[0-9]*"))
    return bool(children())


def user_of(process: Path) -> int | None:
    """Returns the real user of a process below /proc; None for one that has gone."""
    try:
        lines = (process / "status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith("Uid:")), None)


def children() -> list[int]:
    """Returns the processes that this one has forked and that have not been let go."""
    path = Path(f"/proc/self/task/{os.getpid()}/children")
    return [int(word) for word in path.read_text().split()] if path.exists() else []


def be_called(
    connection: socket.socket,
    isolation: str,
    uid: int,
    folder: str,
    scratch: str,
    variables: dict,
) -> None:
    """Serves one connection with the exercises and probes below ``folder``, then ends."""
    status = 1
    try:
        os.setsid()
        if isolation != "none":
            confinement.confine(None if isolation == "user namespaces" else uid)
        os.environ.update(variables)
        os.chdir(scratch)
        sys.path.insert(0, folder)
        sys.modules["common"].__path__[:] = [f"{folder}/common"]  # not this program's own
        sys.dont_write_bytecode = True
        Peer(connection, modules).serve()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def modules(name: str) -> ModuleType:
    """Returns ``exercise NAME`` or ``probe NAME``."""
    kind, _, module = name.partition(" ")
    return importlib.import_module(f"{PACKAGES[kind]}.{module}")


if __name__ == "__main__":
    main()
