"""Start a script on several ranks of this machine with torchrun, and leave nothing behind."""

from __future__ import annotations

import os
import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

from common.errors import RunFailed, UserError
from common.runtime.environment import usable_cores
from common.runtime.orphans import die_with_parent
from common.runtime.paths import project_root, relative_to_project

MARK = "DDPLAB_LAUNCH_ID"


def threads_per_rank(ranks: int, cores: int | None = None) -> int:
    """OMP_NUM_THREADS that shares the cores fairly: their number over that of ranks, at least 1."""
    return max(1, (cores or usable_cores()) // ranks)


def launch(
    script: Path,
    arguments: Sequence[str],
    ranks: int,
    log: Path,
    *,
    on_output: Callable[[str], None] = lambda line: None,
    grace_s: float = 10,
) -> None:
    """Run ``script`` on ``ranks`` local ranks and wait for it.

    torchrun chooses a free port; what the ranks print goes to ``log`` and, line by line, to
    ``on_output``. After success, failure or an exception here (Ctrl-C) no process is left: each
    carries a mark in its environment and those still alive after ``grace_s`` are killed.

    Raises:
        UserError: a rank refused its settings (the message is its own), or the log cannot be
            written.
        RunFailed: a rank died.
    """
    mark = secrets.token_hex(8)
    script, log = script.absolute(), log.absolute()
    try:
        output = log.open("w")
    except OSError as error:
        raise UserError(f"log {log}: {error.strerror}") from None
    error_file = log.with_suffix(".error")
    environment = os.environ | {
        "OMP_NUM_THREADS": str(threads_per_rank(ranks)),
        "PYTHONUNBUFFERED": "1",
        "DDPLAB_ERROR_FILE": str(error_file),
        MARK: mark,
    }
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *("--nproc-per-node", str(ranks), str(script), *arguments),
    ]
    process = subprocess.Popen(
        command,
        cwd=project_root(),
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
        preexec_fn=die_with_parent,
    )
    try:
        with output:
            for line in process.stdout:
                output.write(line)
                output.flush()
                on_output(line.rstrip())
        status = process.wait()
    except BaseException:
        process.send_signal(signal.SIGINT)
        raise
    finally:
        end_marked_processes(mark, grace_s if process.poll() is None else 0)
    if status and error_file.exists():
        message = error_file.read_text()
        error_file.unlink()
        raise UserError(message)
    if status:
        raise RunFailed(
            f"{script.name} on {ranks} ranks: {_cause(log)}; log: {relative_to_project(log)}"
        )


def end_marked_processes(mark: str, grace_s: float) -> None:
    """Wait up to ``grace_s`` for the processes that carry ``mark`` to end, then kill the rest.

    Ctrl-C while it waits ends the waiting, not the killing.
    """
    deadline = time.monotonic() + grace_s
    try:
        while marked_processes(mark) and time.monotonic() < deadline:
            time.sleep(0.1)
    finally:
        alive = marked_processes(mark)
        for process in alive:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs(alive, timeout=5)


def marked_processes(mark: str) -> list[psutil.Process]:
    """Living processes whose environment carries the launch's mark."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.Error, OSError):
            continue
    return [process for process in found if process.pid != os.getpid()]


def _cause(log: Path) -> str:
    """The line of the log that says most about why a launch failed.

    torchrun names the rank that failed first and its signal; an exception's last line says more
    than that a rank left with status 1.
    """
    text = log.read_text()
    first = re.search(r"Root Cause.*?(Signal \d+ \(SIG\w+\)) received", text, flags=re.S)
    if first and "SIGTERM" not in first[1]:
        return f"a rank died of {first[1]}"
    lines = text.splitlines()
    raised = [line for line in lines if re.match(r"(\w+\.)*\w+(Error|Exception): ", line)]
    said = [line.removeprefix("failed: ") for line in lines if line.startswith("failed: ")]
    return next((found[0] for found in (raised, said) if found), "a rank died")
