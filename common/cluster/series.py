"""Several scripts, one after another, on the ranks of one torchrun, which import once for all.

torchrun starts this module instead of a script. Each rank imports what the scripts import, which
takes ten seconds, and forks itself for each of them: a script still has a process of its own that
has done nothing else. Only for scripts that run on CPUs; CUDA does not outlive a fork.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import json
import os
import runpy
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from common.runtime.orphans import die_with_parent

ENDED = "\x1escript ended"
"""Line that each rank prints after a script that succeeded."""
FIRST_USED = "torch._dynamo"
"""Module that PyTorch imports when an optimizer or DDP is first made."""
FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


def program(scripts: Sequence[Sequence[str]]) -> list[str]:
    """Returns the words for torchrun to start; each script is its path and its arguments."""
    return ["-m", "common.cluster.series", json.dumps([list(map(str, words)) for words in scripts])]


def main() -> None:
    """Runs the scripts; the first that fails ends this rank as it ended itself."""
    die_with_parent()
    scripts = json.loads(sys.argv[1])
    for name in dict.fromkeys(name for words in scripts for name in imported(words[0])):
        with contextlib.suppress(Exception):  # the script will say it
            importlib.import_module(name)
    if "torch" in sys.modules:
        importlib.import_module(FIRST_USED)
    for words in scripts:
        status = run(words)
        if status < 0:
            with contextlib.suppress(OSError):  # SIGKILL
                signal.signal(-status, signal.SIG_DFL)
            os.kill(os.getpid(), -status)
        if status:
            sys.exit(status)
        os.write(1, f"{ENDED}\n".encode())  # in one piece


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
