"""Training runs under torchrun that are watched from outside, so that a rank can be killed at a
chosen moment, and what such runs leave: their losses, their checkpoints, their processes."""

from __future__ import annotations

import io
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import psutil
import yaml

from common.cluster.launch import marked_processes, started
from common.errors import RunFailed
from common.exercises.checkpoint_commit import (
    OLD,
    PARTIAL,
    Damaged,
    check_checkpoint,
    finished_checkpoints,
)
from common.runtime.paths import project_root, search_path
from common.runtime.records.study import whole_lines
from common.training.config import DDP_STRATEGIES

RANKS = 2
TABLE = "training-steps.csv"
COMPARED = ["loss", "gradient_norm"]
WITHIN_S = 300.0
POLL_S = 0.001


@dataclass(frozen=True)
class Training:
    """A training command. All its attempts are run directories below ``folder``."""

    strategy: str
    settings: Mapping[str, object]
    folder: Path

    @property
    def checkpoint_dir(self) -> Path:
        """Returns the folder that all attempts save to and resume from."""
        return self.folder / "checkpoints"

    def command(self, max_restarts: int = 0) -> list[str]:
        """Returns the torchrun command, for two ranks of this machine and ``max_restarts``."""
        script = "train_ddp" if self.strategy in DDP_STRATEGIES else "train_fsdp"
        settings = dict(self.settings) | {
            "output_dir": self.folder,
            "checkpoint_dir": self.checkpoint_dir,
            "run_id": "run",
            "strategy": self.strategy,
        }
        return [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            str(RANKS),
            f"--max-restarts={max_restarts}",
            str(project_root() / "assignments" / "assignment1" / f"{script}.py"),
            *(word for name, value in settings.items() for word in (f"--{name}", str(value))),
            "--no-profile",
        ]

    @property
    def attempts(self) -> list[Path]:
        """Returns the run directories so far, oldest first: run, run-2, run-3 …"""
        folders = [path.parent for path in self.folder.glob("run*/config.yaml")]
        return sorted(folders, key=lambda path: int(path.name.partition("-")[2] or 1))

    def rows(self) -> pd.DataFrame:
        """Reads the steps of all attempts: attempt (from 1), step, rank, loss and gradient_norm."""
        tables = [
            read_steps(path).assign(attempt=number) for number, path in enumerate(self.attempts, 1)
        ]
        return pd.concat(tables) if tables else pd.DataFrame(columns=["attempt", "step", "rank"])

    def steps_done(self, attempt: int) -> int:
        """Returns the number of the last step that an attempt has recorded, counted from 1.

        The steps before the checkpoint that it resumed from count, too; 0 if it has recorded none.
        """
        run = self.folder / ("run" if attempt == 1 else f"run-{attempt}")
        for path in (run / f"{TABLE}.partial", run / TABLE):
            if path.exists():
                with suppress(FileNotFoundError):  # renamed since
                    # The last whole line decides: what follows it is still being written. Its first
                    # cell is the step, or the column's name where there is no row yet.
                    lines, _, _ = path.read_bytes().rpartition(b"\n")
                    step = lines.rpartition(b"\n")[2].partition(b",")[0]
                    return int(step) + 1 if step.isdigit() else 0
        return 0

    def being_changed(self, prefixes: tuple[str, ...] = (PARTIAL, OLD)) -> list[str]:
        """Returns the names of the checkpoint folders that are just being written or deleted."""
        if not self.checkpoint_dir.is_dir():
            return []
        return [
            path.name for path in self.checkpoint_dir.iterdir() if path.name.startswith(prefixes)
        ]

    def resumed_step(self, attempt: int) -> int:
        """Returns the step that an attempt resumed from; 0 if there was no checkpoint."""
        config = yaml.safe_load((self.attempts[attempt - 1] / "config.yaml").read_text())
        return config["resumed_from_step"] or 0


class Launched:
    """A training under way, with its torchrun process."""

    def __init__(self, training: Training, process: subprocess.Popen, mark: str) -> None:
        self.training = training
        self.process = process
        self._mark = mark

    def workers(self) -> dict[int, psutil.Process]:
        """Returns the processes of the ranks that are alive, by rank."""
        processes = {}
        for process in marked_processes(self._mark):
            try:
                processes[int(process.environ()["RANK"])] = process
            except (psutil.Error, KeyError):  # gone, or no rank
                continue
        return processes

    def wait_for_step(self, step: int, attempt: int = 1) -> bool:
        """Waits until an attempt has done ``step`` steps. False if the training ends before."""
        return self.wait_until(lambda: self.training.steps_done(attempt) >= step)

    def wait_until(self, condition: Callable[[], object]) -> bool:
        """Waits for a condition; returns False if the training ends before.

        Raises RunFailed: neither happens within five minutes.
        """
        deadline = time.monotonic() + WITHIN_S
        while not condition():
            if self.process.poll() is not None:
                return False
            if time.monotonic() > deadline:
                raise RunFailed(f"{self.training.folder}: nothing happens for {WITHIN_S:.0f} s")
            time.sleep(POLL_S)
        return True

    def wait(self) -> int:
        """Waits for the end; returns torchrun's exit status.

        Raises RunFailed: it does not end within five minutes.
        """
        try:
            return self.process.wait(WITHIN_S)
        except subprocess.TimeoutExpired:
            raise RunFailed(f"{self.training.folder}: does not end") from None

    def processes_left(self) -> int:
        """Counts this launch's processes that are alive; 0 is right once torchrun has ended."""
        return len(marked_processes(self._mark))


@contextmanager
def launched(training: Training, max_restarts: int = 0) -> Iterator[Launched]:
    """Starts a training; when the block is left, it has ended. Its output is added to ``log``."""
    training.folder.mkdir(parents=True, exist_ok=True)
    mark = secrets.token_hex(8)
    variables = {"PATH": search_path(), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    with (
        (training.folder / "log").open("a") as log,
        started(
            command=training.command(max_restarts),
            mark=mark,
            variables=variables,
            grace_s=0,
            cwd=project_root(),
            stdout=log,
            stderr=subprocess.STDOUT,
        ) as process,
    ):
        yield Launched(training, process, mark)


def run_to_the_end(training: Training) -> None:
    """Runs a training to its end. Raises RunFailed if it does not end with status 0."""
    with launched(training) as run:
        status = run.wait()
    if status:
        raise RunFailed(f"{training.folder} ended with status {status}; see its log")


def kill(process: psutil.Process) -> bool:
    """Sends SIGKILL; returns False if the process was gone."""
    try:
        process.send_signal(signal.SIGKILL)
    except psutil.NoSuchProcess:
        return False
    return True


def read_steps(run: Path) -> pd.DataFrame:
    """Reads the steps of a run that is complete or was cut off; empty where there is no table.

    The numbers are those that were written, to the last bit.
    """
    columns = ["step", "rank", *COMPARED]
    lines = whole_lines(run / TABLE) or ",".join(columns)
    table = pd.read_csv(io.StringIO(lines), usecols=columns, dtype=str)[columns]
    return table.astype({"step": int, "rank": int} | dict.fromkeys(COMPARED, float))


def equal_losses(losses: pd.DataFrame, reference: pd.DataFrame, first: int = 0) -> bool:
    """Returns True if all steps from ``first`` on have the reference's numbers on every rank.

    No step may be missing, and all rows must be equal bit for bit, also those of steps that were
    computed twice.
    """
    expected = reference.set_index(["step", "rank"])[COMPARED]
    expected = expected[expected.index.get_level_values("step") >= first]
    computed = losses.set_index(["step", "rank"])[COMPARED]
    if set(computed.index) != set(expected.index):
        return False
    return bool((computed.to_numpy() == expected.loc[computed.index].to_numpy()).all())


def unreadable(folder: Path) -> list[str]:
    """Checks every file of a folder's finished checkpoints; returns a line per damaged one."""
    problems = []
    for path in finished_checkpoints(folder):
        try:
            check_checkpoint(path)
        except Damaged as damage:
            problems.append(f"{path.name}: {damage}")
    return problems
