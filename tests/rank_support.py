"""Runs a script on real ranks, forked from a server that has imported torch already.

A rank then starts in a tenth of a second instead of seven. It gets torchrun's variables and a port
of its own, and its output goes to files. Tests of the launcher start torchrun itself instead.
"""

from __future__ import annotations

import gc
import multiprocessing
import multiprocessing.forkserver
import os
import runpy
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from common.runtime.ranks import free_port

ASSIGNMENT2 = Path(__file__).resolve().parents[1] / "assignments" / "assignment2"
PRELOADED = ["torch._dynamo", "tyro", "common.benchmarks.selftest"]


@dataclass(frozen=True)
class FinishedRanks:
    """How the ranks of a script ended and what each printed, in rank order."""

    exit_codes: list[int | None]
    stdout: list[str]
    stderr: list[str]

    @property
    def error_line(self) -> str:
        """Returns the one line that all ranks' standard errors hold; fails if there are more."""
        lines = "".join(self.stderr).strip().splitlines()
        assert len(lines) == 1, "\n".join(lines)
        return lines[0]


class RankServer:
    """Forks ranks and waits for them."""

    def __init__(self, folder: Callable[[str], Path]) -> None:
        self._folder = folder
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(PRELOADED)
        with mock.patch.dict(os.environ, OMP_NUM_THREADS="1"):
            multiprocessing.forkserver.ensure_running()

    def run(
        self,
        script: Path,
        *arguments: object,
        ranks: int = 1,
        variables: Mapping[str, str] | Callable[[int, int], Mapping[str, str]] | None = None,
        timeout_s: float = 60,
    ) -> FinishedRanks:
        """Runs ``python script arguments`` on so many ranks at once.

        ``variables`` are added to the environment of every rank. Several ranks are placed by
        torchrun's variables, unless ``variables`` is a function of (rank, port) that places them.
        """
        folder = self._folder(script.stem)
        port = free_port()
        processes = []
        for rank in range(ranks):
            environment = torchrun_variables(rank, ranks, port) if ranks > 1 else {}
            if callable(variables):
                environment = variables(rank, port)
            elif variables:
                environment = environment | dict(variables)
            words = [str(argument) for argument in arguments]
            work = (str(script), words, environment, str(folder / f"rank{rank}"))
            processes.append(self._context.Process(target=_be_a_rank, args=work))
        try:
            for process in processes:
                process.start()
            for process in processes:
                process.join(timeout_s)
        finally:
            for process in processes:
                process.kill()
        stdout, stderr = (
            [_text(folder / f"rank{rank}.{end}") for rank in range(ranks)] for end in ("out", "err")
        )
        return FinishedRanks([process.exitcode for process in processes], stdout, stderr)


def torchrun_variables(rank: int, ranks: int, port: int) -> dict[str, str]:
    """Returns what torchrun sets for one of the ranks on one machine."""
    own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return {name: str(value) for name, value in (own | place).items()}


def _be_a_rank(script: str, arguments: list[str], environment: Mapping, output: str) -> None:
    os.environ.update(environment)
    gc.freeze()  # what the server has imported is shared with it, as long as nothing touches it
    # A process that a fork server began would start its own in the same way, and run the script
    # in each of them.
    multiprocessing.set_start_method(None, force=True)
    for descriptor, end in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{output}.{end}", os.O_WRONLY | os.O_CREAT), descriptor)
    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name="__main__")


def _text(path: Path) -> str:
    """Returns what a rank has written, without what gloo says in torch 2.9 of its connections."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return "".join(line for line in lines if not line.startswith("[Gloo] Rank"))
