"""A student's exercises as a check sees them: modules and ranks in a sandbox."""

from __future__ import annotations

import functools
import shutil
import socket
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.course.sandbox.outside import await_ends, measured
from common.course.sandbox.sandbox import Sandbox
from common.course.sandbox.wire import Ended, Peer, Remote
from common.course.tasks import EXERCISES
from common.runtime.processes.ranks import free_port

if TYPE_CHECKING:
    from common.course.sandbox.exchange import Exchange

CALLEE = ("wire", "callee", "confinement", "judged_group", "scratch", "__init__")
LONGEST_END_S = 20


class Student:
    """The exercises below a part of a sandbox's folder.

    Each check has processes of its own: ``afresh`` ends those of the one before.
    """

    def __init__(self, sandbox: Sandbox, below: str) -> None:
        self.sandbox = sandbox
        self.below = below
        self.peer: Peer | None = None
        self.without_bytes = 0
        """Memory that was taken before the process of ``exercise`` and ``probe`` began."""

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
            self.without_bytes = self.sandbox.private_bytes()
            self.peer = self.sandbox.start(self.below)
        return self.peer.module(name)

    def measured(self) -> AbstractContextManager[list[int]]:
        """Measures the memory of the student's processes in a block; see ``outside.measured``."""
        return measured(self.sandbox.private_bytes)

    def put_by_bytes(self) -> int:
        """Returns the memory that the process has besides that of one without an exercise.

        What it took before a measurement it could give back meanwhile.
        """
        nbytes = self.sandbox.private_bytes() - self.without_bytes
        return nbytes - idle_bytes(self.sandbox, self.below)

    def another_process(self) -> Peer:
        """Starts one more process."""
        return self.sandbox.start(self.below)

    def onlooker(self) -> Peer:
        """Starts a process for the checks' own modules, in which no exercise is called."""
        return self.another_process()

    def on_ranks(self, ranks: int, offers: Collection[str] | None = None) -> Ranks:
        """Starts ranks whose exchange is this process's; ``offers`` as of ``Exchange``."""
        from common.course.sandbox.exchange import Exchange  # imports torch

        return Ranks(self.sandbox, self.below, ranks, Exchange(offers))

    def over_gloo(self, ranks: int) -> Ranks:
        """Starts ranks that exchange over gloo, on the network of the sandbox."""
        return Ranks(self.sandbox, self.below, ranks, None)


class Ranks:
    """Processes that have joined a process group.

    Args:
        sandbox: where they are started.
        below: part of the sandbox's folder that has their packages.
        ranks: number of processes.
        exchange: passes on what they send each other; None for gloo.
    """

    def __init__(self, sandbox: Sandbox, below: str, ranks: int, exchange: Exchange | None) -> None:
        self.sandbox, self.below = sandbox, below
        self.without_bytes = sandbox.private_bytes()
        self.world_size = ranks
        self.exchange = exchange
        group = dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(ranks))
        group["MASTER_PORT"] = str(free_port())
        numbers = [dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank)) for rank in range(ranks)]
        self.peers = [sandbox.start(below, variables=group | rank) for rank in numbers]
        if exchange is None:
            self.call("begin")
        else:
            names = ("launch", "wait", "has_come")
            bound = [
                {name: functools.partial(getattr(exchange, name), rank) for name in names}
                for rank in range(ranks)
            ]
            self.call_each("begin", [(functions,) for functions in bound])

    def call(self, function: str, *arguments: Any) -> list[Any]:
        """Calls ``call_each`` with the same arguments for all ranks."""
        return self.call_each(function, [arguments] * len(self.peers))

    def call_each(self, function: str, arguments: Sequence[tuple]) -> list[Any]:
        """Calls a function of ``probes.on_ranks`` on all ranks at once.

        Args:
            function: name of the function.
            arguments: each rank's, in rank order.

        Returns:
            what each rank returned, in rank order.

        Raises:
            Raised, Ended: the first rank that failed; the others are cut off.
        """

        def call_on(peer: Peer, arguments: tuple) -> Any:
            return getattr(peer.module("probe on_ranks"), function)(*arguments)

        with ThreadPoolExecutor(len(self.peers)) as pool:
            futures = [
                pool.submit(call_on, peer, its)
                for peer, its in zip(self.peers, arguments, strict=True)
            ]
            waiting = futures
            try:
                finished, waiting = wait(futures, return_when=FIRST_EXCEPTION)
            finally:  # a time limit is raised here, too; the pool then waits for its threads
                if waiting:
                    if self.exchange is not None:
                        self.exchange.abandon()
                    for peer in self.peers:  # nobody waits for them any more
                        with suppress(OSError):  # gone already
                            peer.connection.shutdown(socket.SHUT_RDWR)
            failed = [future.exception() for future in finished if future.exception()]
        if failed:
            # That a process has ended says less than what another one raised.
            raise min(failed, key=lambda error: isinstance(error, Ended))
        return [future.result() for future in futures]

    def idle_bytes(self) -> int:
        """Returns what the memory would be if there were no exercise in the processes."""
        return self.without_bytes + self.world_size * idle_bytes(self.sandbox, self.below)

    @contextmanager
    def meetings(self) -> Iterator[tuple[Callable[[], None], list[Met]]]:
        """Yields a function in which all ranks wait for each other, and what was measured there.

        Their memory is measured between meetings, too, again and again.
        """
        from common.course.sandbox.exchange import LONGEST_S

        met: list[Met] = []
        with measured(self.sandbox.private_bytes) as memory:

            def measure() -> None:
                nbytes = self.sandbox.private_bytes()
                met.append(Met(nbytes, max(*memory, nbytes), len(self.exchange.log)))
                memory[:] = [0]

            barrier = threading.Barrier(self.world_size, measure, LONGEST_S)
            yield lambda: barrier.wait() and None, met


@dataclass(frozen=True)
class Met:
    """What was measured when all ranks waited for each other.

    Attributes:
        nbytes: memory of all ranks together, in bytes.
        peak_bytes: most of it since the meeting before.
        operations: number of operations that they had launched.
    """

    nbytes: int
    peak_bytes: int
    operations: int


def idle_bytes(processes: Sandbox, below: str) -> int:
    """Starts a process in which no exercise is; returns its memory when it has ended.

    Raises:
        Ended: it has not ended, so that what is measured next would have its memory.
    """
    before, others = processes.private_bytes(), processes.processes()
    peer = processes.start(below)
    peer.module("probe models")
    nbytes = processes.private_bytes() - before
    started = [process for process in processes.processes() if process not in others]
    peer.connection.close()
    if not await_ends(started, LONGEST_END_S):
        raise Ended(f"a process is still there {LONGEST_END_S} s after its end")
    return nbytes


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
