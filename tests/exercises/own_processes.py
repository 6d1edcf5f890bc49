"""This project's own exercises for the checks, without a sandbox.

A check calls the modules themselves, in this process. Its ranks are processes forked from the
tests' server, which are called as those in a sandbox are. ``Student`` is the interface of both.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import inspect
import json
import socket
import struct
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
from rank_support import RankServer

from common.course.sandbox import callee
from common.course.sandbox.outside import await_ends, measured, private_bytes
from common.course.sandbox.sandbox import ANSWER_S, VARIABLES
from common.course.sandbox.scratch import empty
from common.course.sandbox.student import Student
from common.course.sandbox.wire import Peer, Raised

M_MMAP_THRESHOLD = -3
"""Number of the setting in glibc's malloc.h, which is read from a variable only at exec."""


class OwnProcesses:
    """Processes with exercises of one's own; what ``Student`` and ``Ranks`` need of a sandbox.

    Args:
        folder: has a folder ``common`` in each of its parts, and a part for what is written.
        server: forks them.

    Attributes:
        answer_s: longest time to an answer.
    """

    answer_s = ANSWER_S

    def __init__(self, folder: Path, server: RankServer) -> None:
        self.folder = folder
        self.scratch = folder / "scratch"
        self.scratch.mkdir()
        self._server = server
        self._processes: list[psutil.Process] = []
        self._kept: list[Connection] = []

    @property
    def scratch_inside(self) -> str:
        """Returns the folder that exercises may write to."""
        return str(self.scratch)

    def start(
        self, below: str, *, timeout_s: float = 0.0, variables: dict[str, str] | None = None
    ) -> Peer:
        """Starts a process with the exercises of a part; see ``Sandbox.start``."""
        place = {"folder": str(self.folder / below), "scratch": self.scratch_inside}
        place["variables"] = VARIABLES | (variables or {})
        address = self.folder / "peer"
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(address))
            listener.listen()
            try:
                self._kept.append(self._server.start(Path(__file__), address, json.dumps(place)))
                ours, _ = listener.accept()
            finally:  # a test's time limit may end the wait
                address.unlink()
        who = ours.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        self._processes.append(psutil.Process(struct.unpack("3i", who)[0]))
        ours.settimeout(timeout_s or self.answer_s)
        return Peer(ours)

    def afresh(self) -> None:
        """Ends all processes and deletes what they wrote."""
        for process in self._processes:  # each has a session of its own
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        for connection in self._kept:
            self._server.end(connection)
        await_ends(self._processes, ANSWER_S)
        self._kept.clear()
        self._processes.clear()
        empty(self.scratch)

    def still(self) -> contextlib.AbstractContextManager[None]:
        """Stops nobody: one's own code takes no time from others."""
        return contextlib.nullcontext()

    def processes(self) -> list[psutil.Process]:
        """Returns the processes."""
        return [*self._processes]

    def private_bytes(self) -> int:
        """Returns the memory of all processes together that they share with nobody."""
        return private_bytes(self._processes)


class OwnStudent(Student):
    """The exercises of this project: modules of this process, and ranks with the same."""

    def module(self, name: str) -> Own:
        """Returns a module of this process."""
        return Own(callee.modules(name))

    def measured(self) -> contextlib.AbstractContextManager[list[int]]:
        """Measures the memory of this process."""
        return measured(lambda: private_bytes([psutil.Process()]))

    def put_by_bytes(self) -> int:
        """Returns 0: this process has much that is no exercise's."""
        return 0

    def onlooker(self) -> OwnStudent:
        """Returns this process, which nobody's code tampers with."""
        return self


class Own:
    """A module whose functions raise what is heard of a student's."""

    def __init__(self, module: ModuleType) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._module, name)
        return _heard(found) if inspect.isfunction(found) else found


def _heard(function: Callable) -> Callable:
    @functools.wraps(function)
    def call(*arguments: Any, **keywords: Any) -> Any:
        try:
            return function(*arguments, **keywords)
        except Exception as error:
            raise Raised(f"{type(error).__name__}: {error}") from error

    return call


def main() -> None:
    """Serves a connection with the exercises of a part, which the server may have imported."""
    address, place = sys.argv[1], json.loads(sys.argv[2])
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, int(VARIABLES["MALLOC_MMAP_THRESHOLD_"]))
    for name in list(sys.modules):
        if name.startswith("common.exercises"):
            del sys.modules[name]
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(address)
    callee.be_called(connection, "none", 0, **place)


if __name__ == "__main__":
    main()
