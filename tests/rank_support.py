"""Runs a script on real ranks, forked from a process that has imported torch already.

A rank then starts in a tenth of a second instead of seven. It gets torchrun's variables and a port
of its own, and its output goes to files. Tests of the launcher start torchrun itself instead.

All workers of pytest-xdist share that process, the server. Whoever needs it first starts it; each
keeps a connection to it, and when the last connection closes, as it does however a worker ends,
the server ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import importlib
import json
import multiprocessing
import os
import resource
import runpy
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from multiprocessing.connection import Connection, wait
from pathlib import Path

from common.runtime import script
from common.runtime.machine import witness
from common.runtime.processes.ranks import free_port

ASSIGNMENT2 = Path(__file__).resolve().parents[1] / "assignments" / "assignment2"
PRELOADED = tuple(os.environ.get("RANKS_PRELOADED", "").split()) or (
    "torch._dynamo",
    "tyro",
    "transformers.models.bert.modeling_bert",
    "common.benchmarks.selftest",
    "common.training.texts.text_trainer",
)
"""What ranks use, or those of them that run here."""
POLL_S = 0.5


@dataclass(frozen=True)
class FinishedRanks:
    """How the ranks of a script ended and what each printed, in rank order."""

    exit_codes: list[int]
    stdout: list[str]
    stderr: list[str]

    def lines(self, rank: int = 0) -> list[dict]:
        """Returns the JSON objects that a rank printed, one a line."""
        return [json.loads(line) for line in self.stdout[rank].splitlines() if line[:1] == "{"]

    @property
    def error_line(self) -> str:
        """Returns the one line that all ranks' standard errors hold; fails if there are more."""
        lines = "".join(self.stderr).strip().splitlines()
        assert len(lines) == 1, "\n".join(lines)
        return lines[0]


@dataclass(frozen=True)
class RankWork:
    """What a rank is to do, and where."""

    script: str
    arguments: list[str]
    environment: dict[str, str]
    output: str
    working_directory: str
    module_path: list[str]


class RankServer:
    """Has ranks forked by the server that is reached in ``shared``, and waits for them.

    Attributes:
        cpu_s: Processor seconds of the ranks so far, and of the server's start if it was ours.
        process: The server, if this process started it.
    """

    def __init__(self, folder: Callable[[str], Path], shared: Path) -> None:
        self._folder = folder
        self._address = str(shared / "ranks")
        self.cpu_s = 0.0
        self.process: subprocess.Popen | None = None
        with Path(f"{self._address}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            # A server that has just lost its last connection ends without a word to the next.
            while (kept := self._connected()) is None:
                self._start()
        self._kept = kept

    def _connected(self) -> Connection | None:
        """Returns a connection that keeps the server, or nothing if there is none."""
        try:
            connection = _connect(self._address)
            started_cpu_s = connection.recv()
        except (OSError, EOFError):
            return None
        self.cpu_s += started_cpu_s if self.process else 0.0
        return connection

    def _start(self) -> None:
        Path(self._address).unlink(missing_ok=True)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(self._address)
            listener.listen()
            descriptor = listener.fileno()
            program = f"import sys; sys.path[:] = {sys.path}; import rank_support as ranks; ranks."
            kept = {name: value for name, value in os.environ.items() if "PYTEST_" not in name}
            self.process = subprocess.Popen(
                [sys.executable, "-c", f"{program}serve({descriptor}, {PRELOADED})"],
                pass_fds=[descriptor],
                env=kept | {"OMP_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for the tests
            )

    def run(
        self,
        script: Path,
        *arguments: object,
        ranks: int = 1,
        variables: Mapping[str, str] | Callable[[int, int], Mapping[str, str]] | None = None,
        timeout_s: float = 100,
    ) -> FinishedRanks:
        """Runs ``python script arguments`` on so many ranks at once.

        ``variables`` are added to the environment of every rank. Several ranks are placed by
        torchrun's variables, unless ``variables`` is a function of (rank, port) that places them.
        """
        folder = self._folder(script.stem)
        port = free_port()
        work = []
        for rank in range(ranks):
            environment = torchrun_variables(rank, ranks, port) if ranks > 1 else {}
            if callable(variables):
                environment = dict(variables(rank, port))
            elif variables:
                environment = environment | dict(variables)
            work.append(_work(script, arguments, environment, str(folder / f"rank{rank}")))
        with _connect(self._address) as connection:
            connection.recv()
            connection.send((work, timeout_s))
            exit_codes, cpu_s = connection.recv()
        self.cpu_s += cpu_s
        stdout, stderr = (
            [_text(folder / f"rank{rank}.{end}") for rank in range(ranks)] for end in ("out", "err")
        )
        return FinishedRanks(exit_codes, stdout, stderr)

    def succeed(self, script: Path, *arguments: object, **how: object) -> FinishedRanks:
        """Runs a script as ``run`` does; fails unless all ranks end with status 0."""
        done = self.run(script, *arguments, **how)
        assert not any(done.exit_codes), "\n".join(done.stderr)
        return done

    def start(self, script: Path, *arguments: object) -> Connection:
        """Starts ``python script arguments`` in a process that ends with the connection."""
        connection = _connect(self._address)
        connection.recv()
        output = str(self._folder(script.stem) / "rank0")
        connection.send(([_work(script, arguments, {}, output)], inf))
        return connection

    def end(self, connection: Connection) -> None:
        """Closes the connection of a process that was started, and counts its time if it ended."""
        with connection, contextlib.suppress(EOFError, ConnectionError):
            if connection.poll(2 * POLL_S):
                self.cpu_s += connection.recv()[1]


def _work(
    script: Path, arguments: Sequence[object], environment: dict[str, str], output: str
) -> RankWork:
    return RankWork(
        script=str(script),
        arguments=[str(argument) for argument in arguments],
        environment=environment,
        output=output,
        working_directory=os.getcwd(),
        module_path=sys.path,
    )


def torchrun_variables(rank: int, ranks: int, port: int) -> dict[str, str]:
    """Returns what torchrun sets for one of the ranks on one machine."""
    own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return {name: str(value) for name, value in (own | place).items()}


def _connect(address: str) -> Connection:
    client = socket.socket(socket.AF_UNIX)
    try:
        client.connect(address)
    except OSError:
        client.close()
        raise
    return Connection(client.detach())


def serve(listening: int, preloaded: Sequence[str]) -> None:
    """Imports modules, then forks a process for each connection, until the last has closed."""
    gc.disable()
    for name in preloaded:
        with contextlib.suppress(Exception):  # a student's mistake is for the ranks to report
            importlib.import_module(name)
    script.SAID_S = 0  # no torchrun ends the others where one has left
    witness.PIECES = 1  # how fast a machine is that other tests run on nobody asks
    gc.freeze()
    gc.enable()
    cpu_s = time.process_time()
    context = multiprocessing.get_context("fork")
    served: list[multiprocessing.Process] = []
    with socket.socket(fileno=listening) as listener:
        while True:
            ready = wait([listener, *(process.sentinel for process in served)], POLL_S)
            if listener in ready:
                client, _ = listener.accept()
                with client:
                    served.append(context.Process(target=_run_for, args=(client, listener, cpu_s)))
                    served[-1].start()
            served = [process for process in served if process.is_alive()]
            if not served:
                os._exit(0)  # without what libraries have to say at an exit


def _run_for(client: socket.socket, listener: socket.socket, cpu_s: float) -> None:
    """Forks the ranks that a client asks for and tells it how they ended; ends with the client."""
    os.setpgid(0, 0)
    listener.close()
    connection = Connection(client.detach())
    with contextlib.suppress(EOFError, ConnectionError):
        connection.send(cpu_s)
        work, timeout_s = connection.recv()
        context = multiprocessing.get_context("fork")
        ranks = [context.Process(target=_be_a_rank, args=(each,)) for each in work]
        for process in ranks:
            process.start()
        deadline = time.monotonic() + timeout_s
        # What a rank has forked may hold its sentinel open: it is not relied upon.
        while alive := [process for process in ranks if process.is_alive()]:
            if connection in wait([connection, *(process.sentinel for process in alive)], POLL_S):
                os.killpg(0, signal.SIGKILL)  # the client has ended
            if time.monotonic() > deadline:
                for process in alive:
                    process.kill()
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        codes = [process.exitcode for process in ranks]
        connection.send((codes, used.ru_utime + used.ru_stime))


def _be_a_rank(work: RankWork) -> None:
    os.environ.update(work.environment)
    os.chdir(work.working_directory)
    sys.path[:] = work.module_path
    multiprocessing.set_start_method(None, force=True)  # the script's to choose
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for descriptor, end in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{work.output}.{end}", os.O_WRONLY | os.O_CREAT), descriptor)
    sys.argv = [work.script, *work.arguments]
    runpy.run_path(work.script, run_name="__main__")


def _text(path: Path) -> str:
    """Returns what a rank has written, without what gloo says in torch 2.9 of its connections."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return "".join(line for line in lines if not line.startswith("[Gloo] Rank"))
