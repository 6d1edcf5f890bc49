"""Runs somebody's script with ``ddplab-watch`` in each of its ranks."""

from __future__ import annotations

import secrets
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from common.cluster.launch import started, threads_per_rank, torchrun, torchrun_logs
from common.errors import UserError
from common.runtime.paths import search_path
from common.runtime.processes.orphans import ANY, ending_with_parent

LOOKED_EVERY_S = 1.0
GRACE_S = 30.0


def check_program(program: Sequence[str]) -> None:
    """Raises UserError where there is no such script, or no module is named."""
    if Path(program[0]).is_dir():
        raise UserError(f"{program[0]} is a folder; nothing follows it, flags come before it")
    if program[0] != "-m" and not Path(program[0]).is_file():
        raise UserError(f"script {program[0]}: no such file")
    if list(program) == ["-m"]:
        raise UserError("-m: the name of a module follows")


def run_watched(
    program: Sequence[str],
    ranks: int,
    variables: dict[str, str],
    *,
    meanwhile: Callable[[], None] = lambda: None,
) -> int:
    """Runs a script in this folder, watched, and waits for it; what it prints is printed.

    Args:
        program: a script or ``-m`` and a module, and its arguments.
        ranks: how many are started here by torchrun; with 1 the script is started by itself.
        variables: variables of the environment, which say how it is watched.
        meanwhile: called now and then while it runs.

    Returns:
        the script's exit status, as a shell would give it.
    """
    logs = torchrun_logs()
    command = [sys.executable, "-m", "ddplab_watch", *program]
    if ranks > 1:
        # A script that is not ours does not ask the kernel to end with torchrun, as our ranks do.
        rank = ending_with_parent([sys.executable, "-u", "-m", "ddplab_watch", *program], ANY)
        command = [sys.executable, "-m", *torchrun(ranks, logs.name), "--no-python", *rank]
        variables = {"OMP_NUM_THREADS": str(threads_per_rank(ranks))} | variables
    mark = secrets.token_hex(8)
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        with started(command, mark, {"PATH": search_path()} | variables, GRACE_S) as process:
            process.stdin.close()
            while True:
                try:
                    status = process.wait(LOOKED_EVERY_S)
                    break
                except subprocess.TimeoutExpired:
                    meanwhile()
    finally:
        signal.signal(signal.SIGTERM, before)
        logs.cleanup()
    return status if status >= 0 else 128 - status
