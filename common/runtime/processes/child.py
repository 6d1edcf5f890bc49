"""A child process for a measurement: its allocator is fresh, and a crash ends only the child."""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TextIO

from common.errors import naming_os_errors
from common.runtime.paths import project_root
from common.runtime.processes.orphans import ending_with_parent

RANK_VARIABLES = re.compile(
    r"RANK|WORLD_SIZE|(LOCAL|GROUP|ROLE)_(RANK|NAME|WORLD_SIZE)|MASTER_(ADDR|PORT)|TORCHELASTIC_.*"
    r"|DDPLAB_ERROR_FILE|SLURM_(PROCID|LOCALID|NODEID|NTASKS|NPROCS|NTASKS_PER_NODE|STEP_.*)"
)
"""Variables that torchrun, Slurm and ``common.cluster.launch`` set for a rank, not its children."""
_running: set[subprocess.Popen] = set()
"""Children of ``run_child`` that have not ended."""


@dataclass(frozen=True)
class ChildExit:
    """The end of a child.

    Attributes:
        status: exit status, negative after a signal.
        log: file of the child's standard error.
        timeout_s: seconds after which it was ended; None where it ended by itself.
    """

    status: int
    log: Path
    timeout_s: float | None = None

    @property
    def reason(self) -> str:
        """Returns the reason of the failure in one line; empty if the child did not fail."""
        if self.status == 0:
            return ""
        if self.timeout_s is not None:
            return f"no end after {self.timeout_s:g} s"
        if self.status < 0:
            name = signal.Signals(-self.status).name
            guess = ": the kernel ran out of memory?" if name == "SIGKILL" else ""
            return f"killed by {name}{guess}"
        lines = self.log.read_text(errors="replace").splitlines()
        raised = [line for line in lines if re.match(r"(\w+\.)*\w+(Error|Exception|Exit)\b", line)]
        lines = raised or [line for line in lines if line.strip()]
        return lines[-1].strip() if lines else f"exit status {self.status}"


def run_child(
    module: str,
    arguments: Sequence[str],
    log: Path,
    on_output: Callable[[str], None] = lambda line: None,
    *,
    folder: Path | None = None,
    environment: Mapping[str, str] = os.environ,
    timeout_s: float | None = None,
) -> ChildExit:
    """Runs ``python -m module`` in ``folder`` (by default the project's) and waits for it.

    Its standard output goes line by line to ``on_output``, its standard error to ``log``. The child
    is no rank, even if this process is one. It ends with this process (on Linux even if that is
    killed), and before an exception here, such as Ctrl-C, is passed on. Its environment is this
    process's, or the one that is given. After ``timeout_s`` it is killed with its process group.

    Raises:
        UserError: the log cannot be written.
    """
    with new_log(log) as errors:
        process = subprocess.Popen(
            ending_with_parent([sys.executable, "-m", module, *arguments]),
            env=_without_rank(environment) | {"PYTHONUNBUFFERED": "1"},
            cwd=folder or project_root(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            errors="replace",
            start_new_session=True,  # Ctrl-C reaches this process alone, which then ends the child
        )
        with process.stdout, ended_after(process, timeout_s) as is_over:
            _running.add(process)
            try:
                for line in process.stdout:
                    on_output(line.rstrip())
                status = process.wait()
                return ChildExit(status, log, timeout_s if is_over.is_set() else None)
            except BaseException:
                kill_group(process)
                process.wait()
                raise
            finally:
                _running.discard(process)


def run_forked(
    module: str,
    arguments: Sequence[str],
    log: Path,
    on_output: Callable[[str], None] = lambda line: None,
) -> ChildExit:
    """Runs a module's ``main()`` as ``run_child`` does, in a fork of a process that imported it.

    That process imports once for all children, and does nothing else: a child starts with what an
    import leaves.

    Raises:
        UserError: the log cannot be written.
    """
    new_log(log).close()
    forks = multiprocessing.get_context("forkserver")
    forks.set_forkserver_preload([module])
    receiving, sending = forks.Pipe(duplex=False)
    variables = _without_rank(os.environ)
    child = forks.Process(
        target=_become, args=(module, arguments, variables, log.absolute(), sending)
    )
    child.start()
    sending.close()
    try:
        with open(os.dup(receiving.fileno()), errors="replace") as lines:
            for line in lines:
                on_output(line.rstrip())
        child.join()
        return ChildExit(child.exitcode, log)
    except BaseException:
        kill_group(child)
        child.kill()  # it may lead no group yet
        child.join()
        raise
    finally:
        receiving.close()


def new_log(log: Path) -> TextIO:
    """Opens an empty log for what a child prints."""
    with naming_os_errors(f"log {log}"):
        return log.open("w")


def _without_rank(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables of a child, which is no rank."""
    return {k: v for k, v in environment.items() if not RANK_VARIABLES.fullmatch(k)}


def _become(
    module: str,
    arguments: Sequence[str],
    variables: Mapping[str, str],
    log: Path,
    output: Connection,
) -> None:
    """Makes a fork the child of ``run_forked``, and calls the module's ``main()``."""
    os.setsid()
    threading.Thread(
        target=_end_with, args=(multiprocessing.parent_process(),), daemon=True
    ).start()
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(project_root())
    os.dup2(output.fileno(), 1)
    output.close()
    os.dup2(os.open(log, os.O_WRONLY), 2)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)
    sys.argv = [module, *arguments]
    sys.exit(importlib.import_module(module).main())


def _end_with(caller: multiprocessing.process.BaseProcess) -> None:
    """Kills this process and its group once the caller has ended, however that came."""
    caller.join()
    os.killpg(0, signal.SIGKILL)


@contextlib.contextmanager
def ended_after(process: subprocess.Popen, timeout_s: float | None) -> Iterator[threading.Event]:
    """Kills a process's group if the block takes longer; yields the event that it has."""
    is_over = threading.Event()

    def end() -> None:
        is_over.set()
        kill_group(process)

    timer = threading.Timer(timeout_s or 0.0, end)
    timer.daemon = True
    if timeout_s is not None:
        timer.start()
    try:
        yield is_over
    finally:
        timer.cancel()


def end_children() -> None:
    """Kills all children of ``run_child``, which other threads wait for."""
    for process in list(_running):
        kill_group(process)


def kill_group(process: subprocess.Popen | multiprocessing.Process) -> None:
    """Kills a process that leads a group and all of the group, the workers of torch.compile too."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
