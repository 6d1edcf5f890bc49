"""A child process for a measurement: its allocator is fresh, and a crash ends only the child."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from common.errors import UserError
from common.runtime.paths import project_root
from common.runtime.processes.orphans import ending_with_parent

RANK_VARIABLES = re.compile(
    r"RANK|WORLD_SIZE|(LOCAL|GROUP|ROLE)_(RANK|NAME|WORLD_SIZE)|MASTER_(ADDR|PORT)|TORCHELASTIC_.*"
    r"|DDPLAB_ERROR_FILE|SLURM_(PROCID|LOCALID|NODEID|NTASKS|NPROCS|NTASKS_PER_NODE|STEP_.*)"
)
"""Variables that torchrun, Slurm and ``common.cluster.launch`` set for a rank, not its children."""


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
        lines = self.log.read_text().splitlines()
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
    environment: Mapping[str, str] | None = None,
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
    environment = os.environ if environment is None else environment
    variables = {k: v for k, v in environment.items() if not RANK_VARIABLES.fullmatch(k)}
    try:
        errors = log.open("w")
    except OSError as error:
        raise UserError(f"log {log}: {error.strerror}") from None
    with errors:
        process = subprocess.Popen(
            ending_with_parent([sys.executable, "-m", module, *arguments]),
            env=variables | {"PYTHONUNBUFFERED": "1"},
            cwd=folder or project_root(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            errors="replace",
            start_new_session=True,  # Ctrl-C reaches this process alone, which then ends the child
        )
        with process.stdout, ended_after(process, timeout_s) as is_over:
            try:
                for line in process.stdout:
                    on_output(line.rstrip())
                status = process.wait()
                return ChildExit(status, log, timeout_s if is_over.is_set() else None)
            except BaseException:
                kill_group(process)
                process.wait()
                raise


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


def kill_group(process: subprocess.Popen) -> None:
    """Kills a process that leads a group and all of the group, the workers of torch.compile too."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
