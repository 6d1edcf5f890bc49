"""Training runs under torchrun that are watched from outside, so that a rank can be killed at a
chosen moment, and what such runs leave: their losses, their checkpoints, their processes."""

from __future__ import annotations

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
from common.runtime.paths import project_root, search_path
from common.training.checkpoint_files import (
    OLD,
    PARTIAL,
    Damaged,
    check_file,
    finished_checkpoints,
    read_manifest,
)

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
        """Where it saves."""
        return self.folder / "checkpoints"

    def command(self, max_restarts: int = 0) -> list[str]:
        """torchrun with as many restarts, on two ranks of this machine."""
        script = "train_ddp" if self.strategy == "DDP" else "train_fsdp"
        settings = dict(self.settings) | {
            "output_dir": self.folder,
            "checkpoint_dir": self.checkpoint_dir,
            "run_id": "run",
        }
        if self.strategy != "DDP":
            settings["strategy"] = self.strategy
        return [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", str(RANKS), f"--max-restarts={max_restarts}"),
            str(project_root() / "assignments" / "assignment1" / f"{script}.py"),
            *(word for name, value in settings.items() for word in (f"--{name}", str(value))),
            "--no-profile",
        ]

    @property
    def attempts(self) -> list[Path]:
        """The run directories so far, oldest first: run, run-2, run-3 …"""
        found = [path.parent for path in self.folder.glob("run*/config.yaml")]
        return sorted(found, key=lambda path: int(path.name.partition("-")[2] or 1))

    def rows(self) -> pd.DataFrame:
        """The steps of all attempts: attempt (from 1), step, rank and what was computed."""
        tables = [
            read_steps(path).assign(attempt=number) for number, path in enumerate(self.attempts, 1)
        ]
        return pd.concat(tables) if tables else pd.DataFrame(columns=["attempt", "step", "rank"])

    def steps_done(self, attempt: int) -> int:
        """The steps that an attempt has recorded, those it took up among them."""
        run = self.folder / ("run" if attempt == 1 else f"run-{attempt}")
        for path in (run / f"{TABLE}.partial", run / TABLE):
            if path.exists():
                with suppress(FileNotFoundError):  # renamed since
                    whole, _, _ = path.read_bytes().rpartition(b"\n")
                    step = whole.rpartition(b"\n")[2].partition(b",")[0]
                    return int(step) + 1 if step.isdigit() else 0
        return 0

    def being_changed(self, prefixes: tuple[str, ...] = (PARTIAL, OLD)) -> list[str]:
        """Checkpoints that are just being written or deleted, by the names of their folders."""
        if not self.checkpoint_dir.is_dir():
            return []
        return [
            path.name for path in self.checkpoint_dir.iterdir() if path.name.startswith(prefixes)
        ]

    def resumed_from(self, attempt: int) -> int:
        """The step that an attempt went on from; 0 if there was no checkpoint."""
        config = yaml.safe_load((self.attempts[attempt - 1] / "config.yaml").read_text())
        return config["resumed_from_step"] or 0


class Launched:
    """A training that runs."""

    def __init__(self, training: Training, process: subprocess.Popen, mark: str) -> None:
        self.training = training
        self.process = process
        self._mark = mark

    def workers(self) -> dict[int, psutil.Process]:
        """The living ranks' processes by rank."""
        found = {}
        for process in marked_processes(self._mark):
            try:
                found[int(process.environ()["RANK"])] = process
            except (psutil.Error, KeyError):
                continue
        return found

    def wait_for_step(self, step: int, attempt: int = 1) -> bool:
        """Wait until an attempt has done so many steps. False if the training ends before."""
        return self.wait_until(lambda: self.training.steps_done(attempt) >= step)

    def wait_until(self, condition: Callable[[], object]) -> bool:
        """Wait for a condition; False if the training ends before.

        Raises:
            RunFailed: neither happens within five minutes.
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
        """Wait for the end; returns torchrun's exit status."""
        try:
            return self.process.wait(WITHIN_S)
        except subprocess.TimeoutExpired:
            raise RunFailed(f"{self.training.folder}: does not end") from None

    def processes_left(self) -> int:
        """Processes of this launch that are alive; 0 is expected once torchrun has ended."""
        return len(marked_processes(self._mark))


@contextmanager
def launched(training: Training, max_restarts: int = 0) -> Iterator[Launched]:
    """Start a training; when the block is left, it has ended. Its output is added to ``log``."""
    training.folder.mkdir(parents=True, exist_ok=True)
    mark = secrets.token_hex(8)
    variables = {"PATH": search_path(), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    with (
        (training.folder / "log").open("a") as log,
        started(
            *(training.command(max_restarts), mark, variables, 0),
            **{"cwd": project_root(), "stdout": log, "stderr": subprocess.STDOUT},
        ) as process,
    ):
        yield Launched(training, process, mark)


def run_to_the_end(training: Training) -> None:
    """Run it once more. Raises RunFailed if it does not end with status 0."""
    with launched(training) as run:
        status = run.wait()
    if status:
        raise RunFailed(f"{training.folder} ended with status {status}; see its log")


def kill(process: psutil.Process) -> bool:
    """Send SIGKILL; False if the process was gone."""
    try:
        process.send_signal(signal.SIGKILL)
    except psutil.NoSuchProcess:
        return False
    return True


def read_steps(run: Path) -> pd.DataFrame:
    """The table of steps of a run that is complete or was cut off; empty where there is none.

    The numbers are those that were written, to the last bit. A last line without an end is left
    out: the process was killed while it wrote it.
    """
    columns = ["step", "rank", *COMPARED]
    path = next((path for path in (run / TABLE, run / f"{TABLE}.partial") if path.exists()), None)
    lines = path.read_text().split("\n")[:-1] if path else []
    if not lines:
        return pd.DataFrame(columns=columns)
    head, *cells = (line.split(",") for line in lines)
    table = pd.DataFrame(cells, columns=head)[columns]
    return table.astype({"step": int, "rank": int} | dict.fromkeys(COMPARED, float))


def equal_losses(found: pd.DataFrame, reference: pd.DataFrame, first: int = 0) -> bool:
    """Whether all steps from ``first`` on are there on every rank, and all rows are the
    reference's bit for bit, also those of steps that were computed twice."""
    expected = reference.set_index(["step", "rank"])[COMPARED]
    expected = expected[expected.index.get_level_values("step") >= first]
    own = found.set_index(["step", "rank"])[COMPARED]
    if set(own.index) != set(expected.index):
        return False
    return bool((own.to_numpy() == expected.loc[own.index].to_numpy()).all())


def unreadable(folder: Path) -> list[str]:
    """What is wrong with the finished checkpoints of a folder; each file is read and compared."""
    problems = []
    for path in finished_checkpoints(folder):
        try:
            _, files = read_manifest(path)
            for name, record in files.items():
                check_file(path / name, record)
        except Damaged as damage:
            problems.append(f"{path.name}: {damage}")
    return problems
