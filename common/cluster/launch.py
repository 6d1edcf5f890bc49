"""Starts a script on ranks of this machine or of emulated hosts, and leaves nothing behind."""

from __future__ import annotations

import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

import psutil

from common.cluster import emulated, series
from common.cluster.emulated import RANK_PREFIX, EmulatedCluster
from common.errors import RunFailed, UserError
from common.runtime.machine.environment import usable_cores
from common.runtime.paths import project_root, relative_to_project, search_path
from common.runtime.processes.child import new_log
from common.runtime.processes.orphans import ending_with_parent
from common.runtime.processes.process_identity import LAUNCHER, has_ended, own_identity

MARK = "DDPLAB_LAUNCH_ID"
GRACE_S, EMULATED_GRACE_S = 10, 12
"""Time in which ranks of this machine, or an emulated cluster, may end by themselves."""


def threads_per_rank(ranks: int, cores: int | None = None) -> int:
    """Returns a fair OMP_NUM_THREADS: the number of cores over that of ranks, at least 1."""
    return max(1, (cores or usable_cores()) // ranks)


def launch(
    script: Path,
    arguments: Sequence[str],
    ranks: int,
    log: Path,
    *,
    hosts: EmulatedCluster | None = None,
    on_output: Callable[[str], None] = lambda line: None,
) -> None:
    """Runs ``script`` on ``ranks`` local ranks, or on emulated hosts, and waits for it.

    torchrun chooses a free port; what the ranks print goes to ``log`` and, line by line, to
    ``on_output``. After success, failure or an exception here (Ctrl-C) no process is left.

    Raises:
        UserError: a rank refused its settings (the message is its own), or the log cannot be
            written.
        RunFailed: a rank died.
    """
    script, log = script.absolute(), log.absolute()
    error_file = log.with_suffix(".error")
    program = [str(script), *arguments]
    with new_log(log) as output, _ranks(program, ranks, error_file, hosts) as process:
        _pass_on(process, output, on_output)
        status = process.wait()
    if status:
        raise _failure(script.name, ranks, log, error_file)


class Series:
    """Scripts that run one after another on the same ranks, made by ``launch_series``."""

    def __init__(
        self, process: subprocess.Popen, ranks: int, queue: Path, error_file: Path
    ) -> None:
        self._process = process
        self._ranks = ranks
        self._queue = queue
        self._error_file = error_file
        self._names: deque[str] = deque()

    def add(self, script: Path | str, *arguments: object) -> None:
        """Adds a script, which begins when those before it have ended."""
        self._names.append(Path(script).name)
        series.add(self._queue, [script, *arguments])

    def wait(self, log: Path, on_output: Callable[[str], None] = lambda line: None) -> None:
        """Waits for the first script that was not waited for; raises what ``launch`` does.

        After a failure no script is run any more.
        """
        name = self._names.popleft()
        with new_log(log) as output:
            if _pass_on(self._process, output, on_output, ends=self._ranks):
                return
        self._process.wait()
        raise _failure(name, self._ranks, log, self._error_file)


@contextmanager
def launch_series(ranks: int, *, hosts: EmulatedCluster | None = None) -> Iterator[Series]:
    """Yields ranks of this machine, or of emulated ``hosts``, for scripts one after another.

    The ranks are started, and links probed, once. What the scripts import is imported once, which
    for each of them would take ten seconds; each still runs in a process of its own (``series``).
    Each script is waited for, as nobody else reads what it prints. If an exception leaves the
    block, what runs is ended.
    """
    with tempfile.TemporaryDirectory(prefix="ddplab-series-") as folder:
        queue, error_file = Path(folder) / "queue", Path(folder) / "error"
        queue.touch()
        with _ranks(series.program(queue), ranks, error_file, hosts) as process:
            yield Series(process, ranks, queue, error_file)
            series.add(queue, series.END)


@contextmanager
def _ranks(
    program: Sequence[str], ranks: int, error_file: Path, hosts: EmulatedCluster | None
) -> Iterator[subprocess.Popen]:
    """Runs the program on ranks of this machine or of emulated hosts; yields their launcher."""
    variables = {
        "PATH": search_path(),
        "OMP_NUM_THREADS": str(threads_per_rank(ranks)),
        "PYTHONUNBUFFERED": "1",
        "DDPLAB_ERROR_FILE": str(error_file),
    }
    with torchrun_logs() as logs:
        command = [sys.executable, "-m", *torchrun(ranks, logs), *program]
        if hosts:
            command = emulated.command(hosts, program)
        with started(
            command,
            mark=secrets.token_hex(8),
            variables=variables,
            grace_s=GRACE_S,
            cwd=project_root(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        ) as process:
            yield process


def torchrun(ranks: int, logs: str) -> list[str]:
    """Returns the words that start ranks of this machine, behind ``python -m``."""
    words = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return [*words, "--log-dir", logs]


def torchrun_logs() -> tempfile.TemporaryDirectory:
    """Makes the folder of torchrun's logs, which it would leave behind."""
    return tempfile.TemporaryDirectory(prefix="ddplab-torchrun-", ignore_cleanup_errors=True)


def _pass_on(
    process: subprocess.Popen, output: TextIO, on_output: Callable[[str], None], ends: int = 0
) -> bool:
    """Passes on what ranks print; returns True once ``ends`` of them have ended a script.

    Ranks that meet in every script end it before any of them ends the next.
    """
    for line in process.stdout:
        if series.ENDED in line:
            ends -= 1
            if not ends:
                return True
            continue
        output.write(line)
        output.flush()
        on_output(re.sub(RANK_PREFIX, "", line.rstrip()))
    return False


def _failure(script: str, ranks: int, log: Path, error_file: Path) -> UserError | RunFailed:
    """Returns the error for ranks that failed, in their own words where they left some."""
    if error_file.exists():
        message = error_file.read_text()
        error_file.unlink()
        return UserError(message)
    return RunFailed(f"{script} on {ranks} ranks: {_cause(log)}; log: {relative_to_project(log)}")


@contextmanager
def started(
    command: Sequence[str], mark: str, variables: Mapping[str, str], grace_s: float, **options
) -> Iterator[subprocess.Popen]:
    """Yields a process that, with all it started, has ended when the block is left.

    The processes carry ``mark`` in their environment. If the block is left by an exception they
    are told to stop, by SIGINT and by the end of their standard input; those still alive after
    ``grace_s`` are killed.
    """
    tempfile.gettempdir()  # torchrun and its ranks need it: what is wrong with it is said here
    process = subprocess.Popen(
        ending_with_parent(command),
        env=os.environ | variables | {MARK: mark, LAUNCHER: own_identity()},
        stdin=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
        **options,
    )
    try:
        yield process
        process.wait()
    except BaseException:
        process.send_signal(signal.SIGINT)
        raise
    finally:
        process.stdin.close()
        end_marked_processes(mark, grace_s if process.poll() is None else 0)
        process.wait()


def emulate(cluster: EmulatedCluster, program: Sequence[str]) -> int:
    """Runs ``program`` (a script or ``-m`` and a module, and its flags) on emulated hosts.

    What the ranks print goes to this process's own output. Returns torchrun's exit status.

    Raises:
        UserError: the script does not exist, or this machine cannot emulate hosts.
    """
    if program[0] != "-m" and not Path(program[0]).is_file():
        raise UserError(f"script {program[0]}: no such file")
    end_orphaned_clusters()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    mark = secrets.token_hex(8)
    command = emulated.command(cluster, program)
    with started(command, mark, {"PATH": search_path()}, EMULATED_GRACE_S) as process:
        status = process.wait()
    if status < 0:
        raise RunFailed(f"the emulated cluster was ended by {signal.Signals(-status).name}")
    return status


def end_orphaned_clusters() -> int:
    """Ends what is left of launches whose launcher is gone; returns the number of processes.

    The kernel leaves nothing in the usual case. This finds clusters that are just ending, or that
    hang in doing so. A launcher in another process namespace (a container) cannot be seen from
    here, so what it started is left alone.
    """
    orphans: Counter[str] = Counter()
    for _, variables in processes():
        with suppress(KeyError, ValueError):  # no rank
            if has_ended(variables[LAUNCHER]):
                orphans[variables[MARK]] += 1
    for mark in orphans:
        end_marked_processes(mark, 0)
    return orphans.total()


def end_marked_processes(mark: str, grace_s: float) -> None:
    """Waits up to ``grace_s`` for the processes that carry ``mark`` to end, then kills the rest.

    Ctrl-C while it waits ends the waiting, not the killing.
    """
    deadline = time.monotonic() + grace_s
    try:
        while marked_processes(mark) and time.monotonic() < deadline:
            time.sleep(0.1)
    finally:
        alive = marked_processes(mark)
        for process in alive:
            with suppress(psutil.NoSuchProcess):  # as was wanted
                process.kill()
        psutil.wait_procs(alive, timeout=5)


def marked_processes(mark: str) -> list[psutil.Process]:
    """Returns the living processes whose environment carries the launch's mark."""
    marked = [process for process, variables in processes() if variables.get(MARK) == mark]
    return [process for process in marked if process.pid != os.getpid()]


def processes() -> Iterator[tuple[psutil.Process, dict[str, str]]]:
    """Yields the living processes whose variables can be read, which are not another user's."""
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            variables = process.environ()
            if process.status() != psutil.STATUS_ZOMBIE:
                yield process, variables


def _cause(log: Path) -> str:
    """Returns the line of the log that says most about why a launch failed.

    torchrun names the rank that failed first and its signal; an exception's last line says more
    than that a rank left with status 1.
    """
    text = log.read_text()
    first = re.search(r"Root Cause.*?(Signal \d+ \(SIG\w+\)) received", text, flags=re.S)
    if first and "SIGTERM" not in first[1]:
        return f"a rank died of {first[1]}"
    lines = [re.sub(RANK_PREFIX, "", line) for line in text.splitlines()]
    raised = [line for line in lines if re.match(r"(\w+\.)*\w+(Error|Exception): ", line)]
    failures = [line.removeprefix("failed: ") for line in lines if line.startswith("failed: ")]
    return next((causes[0] for causes in (raised, failures) if causes), "a rank died")
