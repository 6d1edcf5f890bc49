"""Several scripts, one after another, on the ranks of one torchrun, which import once for all.

torchrun starts this module instead of a script. Each rank takes scripts from a queue: a file to
which ``common.cluster.launch`` adds a line for each. It imports what the script imports, which
takes ten seconds the first time, and forks itself for it: a script still has a process of its own
that has done nothing else. Only for scripts that run on CPUs; CUDA does not outlive a fork.
"""

from __future__ import annotations

import ast
import contextlib
import gc
import importlib
import json
import os
import runpy
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from common.runtime.processes.orphans import die_with_parent
from common.runtime.processes.process_identity import LAUNCHER, has_ended

ENDED = "\x1escript ended"
"""Line that each rank prints after a script that succeeded."""
FIRST_USED = "torch._dynamo"
"""Module that PyTorch imports when an optimizer or DDP is first made."""
FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
END: list[str] = []
"""Entry of the queue after which no other comes."""
POLL_S = 0.05


def program(queue: Path) -> list[str]:
    """Returns the words for torchrun to start."""
    return ["-m", "common.cluster.series", str(queue)]


def add(queue: Path, words: Sequence[object]) -> None:
    """Adds a script, its path and its arguments, to the queue."""
    with queue.open("a") as lines:
        lines.write(json.dumps(list(map(str, words))) + "\n")


def entries(queue: Path) -> Iterator[list[str]]:
    """Yields the scripts in the order in which they were added; waits for each, until END."""
    line = ""
    with queue.open() as lines:
        while True:
            line += lines.readline()
            if not line.endswith("\n"):  # nothing yet, or half of it
                time.sleep(POLL_S)
                continue
            words, line = json.loads(line), ""
            if words == END:
                return
            yield words


def main() -> None:
    """Runs the scripts of a queue; the first that fails ends this rank as it ended itself."""
    die_with_parent()
    if (launcher := os.environ.get(LAUNCHER)) and has_ended(launcher):  # before it was asked
        os._exit(1)
    for words in entries(Path(sys.argv[1])):
        import_for(words[0])
        status = run(words)
        if status < 0:
            with contextlib.suppress(OSError):  # SIGKILL
                signal.signal(-status, signal.SIG_DFL)
            os.kill(os.getpid(), -status)
        if status:
            sys.exit(status)
        os.write(1, f"{ENDED}\n".encode())  # in one piece


def import_for(script: str) -> None:
    """Imports what a script imports, if it is not here yet.

    What is here then is left out of all collections of garbage in the forks. There it would take a
    part of a second each time, and memory: a collection writes into each object that it looks at.
    """
    before = len(sys.modules)
    for name in imported(script):
        with contextlib.suppress(Exception):  # the script will say it
            importlib.import_module(name)
    if "torch" in sys.modules:
        importlib.import_module(FIRST_USED)
    if len(sys.modules) > before:
        gc.collect()
        gc.freeze()


def imported(script: str) -> list[str]:
    """Returns the modules from which a script imports."""
    body = ast.parse(Path(script).read_text()).body
    names = [node.module for node in body if isinstance(node, ast.ImportFrom) and node.module]
    return [name for name in names if name != "__future__"]


def run(words: list[str]) -> int:
    """Runs a script in a fork of this process; returns its exit status, -n after signal n."""
    before = {number: signal.getsignal(number) for number in FORWARDED}
    signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
    child = os.fork()
    if not child:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
        die_with_parent()
        sys.argv = list(words)
        sys.path[0] = str(Path(words[0]).parent)
        runpy.run_path(words[0], run_name="__main__")
        sys.exit()

    def forward(number: int, _: object) -> None:
        with contextlib.suppress(ProcessLookupError):  # it has ended just now
            os.kill(child, number)

    for number in FORWARDED:
        signal.signal(number, forward)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
    try:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


if __name__ == "__main__":
    main()
