"""A student's exercises as a check sees them: modules and ranks in a sandbox."""

from __future__ import annotations

import shutil
import socket
import time
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path
from typing import Any

from common.course.sandbox.sandbox import ANSWER_S, Sandbox
from common.course.sandbox.wire import Ended, Peer, Remote
from common.course.tasks import EXERCISES
from common.runtime.processes.ranks import free_port

CALLEE = ("wire", "callee", "confinement", "scratch", "__init__")
SETTLED_S, LONGEST_S = 0.3, 10.0


class Student:
    """The exercises below a part of a sandbox's folder.

    Each check has processes of its own: ``afresh`` ends those of the one before.
    """

    def __init__(self, sandbox: Sandbox, below: str) -> None:
        self.sandbox = sandbox
        self.below = below
        self.peer: Peer | None = None

    def afresh(self) -> None:
        """Ends all processes and deletes all that they wrote."""
        self.peer = None
        self.sandbox.afresh()

    def exercise(self, name: str) -> Remote:
        """Returns a module of ``common/exercises`` in the student's process."""
        return self.module(f"exercise {name}")

    def probe(self, name: str) -> Remote:
        """Returns a module of the checks' own in the student's process."""
        return self.module(f"probe {name}")

    def module(self, name: str) -> Remote:
        """Returns a module of the process that ``exercise`` and ``probe`` share."""
        if self.peer is None:
            self.peer = self.sandbox.start(self.below)
        return self.peer.module(name)

    def another_process(self) -> Peer:
        """Starts one more process."""
        return self.sandbox.start(self.below)

    def onlooker(self) -> Peer:
        """Starts a process for the checks' own modules, in which no exercise is called."""
        return self.another_process()

    def on_ranks(self, ranks: int, timeout_s: float = ANSWER_S) -> Ranks:
        """Starts ranks, which have joined a process group when this returns."""
        return Ranks(self.sandbox, self.below, ranks, timeout_s)


class Ranks:
    """Processes that have joined a process group."""

    def __init__(self, sandbox: Sandbox, below: str, ranks: int, timeout_s: float) -> None:
        self.sandbox = sandbox
        self.world_size = ranks
        group = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": free_port()}
        self.peers = [
            sandbox.start(
                below,
                timeout_s=timeout_s,
                variables={
                    name: str(value)
                    for name, value in {**group, "RANK": rank, "LOCAL_RANK": rank}.items()
                },
            )
            for rank in range(ranks)
        ]
        self.call("begin")

    def call(self, function: str, *arguments: Any, **keywords: Any) -> list[Any]:
        """Calls a function of ``probes.on_ranks`` on all ranks at once.

        Returns:
            what each rank returned, in rank order.

        Raises:
            Raised, Ended: the first rank that failed; the others are cut off.
        """

        def call_on(peer: Peer) -> Any:
            return getattr(peer.module("probe on_ranks"), function)(*arguments, **keywords)

        with ThreadPoolExecutor(len(self.peers)) as pool:
            futures = [pool.submit(call_on, peer) for peer in self.peers]
            waiting = futures
            try:
                finished, waiting = wait(futures, return_when=FIRST_EXCEPTION)
            finally:  # a time limit is raised here, too; the pool then waits for its threads
                if waiting:
                    for peer in self.peers:  # nobody waits for them any more
                        with suppress(OSError):
                            peer.connection.shutdown(socket.SHUT_RDWR)
            failed = [future.exception() for future in finished if future.exception()]
        if failed:
            # That a process has ended says less than what another one raised.
            raise min(failed, key=lambda error: isinstance(error, Ended))
        return [future.result() for future in futures]

    def sent_bytes(self) -> int:
        """Returns the bytes that all ranks together have sent so far."""
        return self.sandbox.sent_bytes()

    def sent_when_quiet(self) -> int:
        """Returns ``sent_bytes`` once nothing has been sent for a while, or after ``LONGEST_S``."""
        until = time.monotonic() + LONGEST_S
        before, sent = -1, self.sent_bytes()
        while sent != before and time.monotonic() < until:
            time.sleep(SETTLED_S)
            before, sent = sent, self.sent_bytes()
        return sent


def lay_out(folder: Path, root: Path) -> None:
    """Writes what a sandbox's first process is made of to ``folder``."""
    source, target = root / "common" / "course" / "sandbox", folder / "callee" / "common"
    (target / "course" / "sandbox").mkdir(parents=True)
    for package in (target, target / "course"):
        (package / "__init__.py").touch()
    for name in CALLEE:
        shutil.copy(source / f"{name}.py", target / "course" / "sandbox")
    readable(folder)


def lay_out_student(
    folder: Path,
    root: Path,
    below: str,
    probes: Path,
    exercise: Callable[[Path], str],
    files: Iterable[Path] | None = None,
) -> None:
    """Writes the packages that a student's process sees to ``folder / below``.

    Args:
        folder: folder of the sandbox.
        root: root of the project, which has ``common/errors.py``.
        below: name of the part.
        probes: folder of the checks' functions that run there.
        exercise: returns the text of an exercise, whose path in the project it gets.
        files: exercises; by default all of the project's.
    """
    target = folder / below
    (target / EXERCISES).mkdir(parents=True)
    (target / "common" / "__init__.py").touch()
    shutil.copy(root / "common" / "errors.py", target / "common")
    for path in files or sorted((root / EXERCISES).glob("*.py")):
        (target / EXERCISES / path.name).write_text(exercise(path))
    shutil.copytree(probes, target / "probes", ignore=shutil.ignore_patterns("__pycache__"))
    readable(target)


def readable(folder: Path) -> None:
    """Lets everybody read a folder and all below."""
    for path in [folder, *folder.rglob("*")]:
        path.chmod(0o755 if path.is_dir() else 0o644)
