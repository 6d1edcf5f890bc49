"""Checkpoints that a training run saves and resumes from, with any strategy and number of ranks.

Model and optimizer go through torch.distributed.checkpoint under the names they have without DDP
or FSDP, so that any number of ranks reads what any other wrote. What belongs to the run as a whole
(step, data position, model sizes) is in the manifest; random states are each rank's own.
"""

from __future__ import annotations

import dataclasses
import logging
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException

from common.errors import UserError
from common.exercises.checkpoint_commit import (
    Damaged,
    FileRecord,
    check_checkpoint,
    commit_checkpoint,
    describe_file,
    finished_checkpoints,
    flush,
    start_checkpoint,
)
from common.runtime import torch_internals
from common.runtime.group.process_group import Worker
from common.runtime.paths import relative_to_project
from common.training.checkpoints.files import SavedCheckpoint, prune, remove_leftovers, step_of
from common.training.checkpoints.states import load_states, states_to_write

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Checkpoints:
    """The checkpoints of a run, in one folder that all ranks see. All ranks call every method.

    Args:
        keep: number of the newest intact checkpoints that stay.
        asynchronous: write while training goes on: each rank copies the part of the states that
            it writes, and a thread of it writes the copy. One is written at a time.

    Raises:
        UserError: the folder cannot be written.
    """

    def __init__(self, folder: Path, worker: Worker, keep: int, asynchronous: bool = False) -> None:
        self.folder, self.keep = folder, keep
        self._damaged: set[Path] = set()
        """Checkpoints that ``newest_intact`` found damaged; rank 0 takes out what is written
        anew."""
        # A group of its own: a thread uses it while the trainer uses the others.
        self._group = dist.new_group(backend="gloo")
        self.worker = dataclasses.replace(worker, objects=self._group)
        self._thread = writer_thread(worker.device) if asynchronous else None
        self._writing: Future | None = None
        on_gpu = worker.device.type == "cuda"
        self._stager = torch_internals.stager(on_gpu) if asynchronous else None
        try:
            self._on_main(self._prepare_folder)
        except CannotWrite as error:
            raise UserError(f"checkpoint folder {folder}: {error}") from None

    def _prepare_folder(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        remove_leftovers(self.folder)

    def newest_intact(self) -> SavedCheckpoint | None:
        """Returns the newest checkpoint that is not damaged; None if there is no checkpoint.

        Damaged ones are named in the log and left where they are.

        Raises:
            UserError: there are checkpoints, and all are damaged.
        """
        paths = self._on_main(lambda: finished_checkpoints(self.folder))
        for path in paths:
            problem, saved = self._examine(path)
            if problem is None:
                return saved
            self._damaged.add(path)
            if self.worker.is_main:
                logger.warning("%s is damaged: %s", relative_to_project(path), problem)
        if paths:
            raise UserError(
                f"{self.folder}: none of the {len(paths)} checkpoints is intact; remove them to "
                "start anew, or give another --checkpoint_dir"
            )
        return None

    def _examine(self, path: Path) -> tuple[str | None, SavedCheckpoint | None]:
        """Returns (the fault, None), or (None, the checkpoint); each rank reads a part of it."""
        problem, saved = None, None
        try:
            facts = check_checkpoint(path, self.worker.rank, self.worker.world_size)
            saved = SavedCheckpoint(path, facts)
        except Damaged as damage:
            problem = str(damage)
        problems = [text for text in self.worker.gather(problem) if text]
        return (problems[0], None) if problems else (None, saved)

    def load(
        self, saved: SavedCheckpoint, model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> None:
        """Loads a checkpoint into model and optimizer.

        Random states are restored only if the number of ranks is that of the checkpoint.
        """
        load_states(saved.path, model, optimizer, self._group)
        if saved.facts["world_size"] == self.worker.world_size:
            _set_random_states(torch.load(saved.path / _random_file(self.worker), "cpu"))

    def save(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, facts: Mapping, wait: bool = False
    ) -> None:
        """Saves a checkpoint of step ``facts["step"]``.

        With ``wait``, or if checkpoints are not asynchronous, it is written when this returns.

        Raises:
            UserError: it cannot be written (a full disk), or the one before it could not be;
                finished checkpoints are untouched.
        """
        self.wait()
        facts = {**facts, "world_size": self.worker.world_size}
        states = states_to_write(model, optimizer, self.worker)
        if self._thread is None:
            self._write(states, _random_states(), facts)
            return
        copy = self._stager.stage(states)
        self._writing = self._thread.submit(self._write, copy, _random_states(), facts)
        if wait:
            self.wait()

    def wait(self) -> None:
        """Waits until no checkpoint is being written; raises the error of one that failed."""
        if self._writing is not None:
            writing, self._writing = self._writing, None
            writing.result()

    def _write(self, states: dict, random_states: dict, facts: Mapping) -> None:
        """Writes all files, then on rank 0 the manifest, and renames the folder."""
        partial = None
        try:
            partial = self._on_main(lambda: start_checkpoint(self.folder, facts["step"]))
            dcp.save(states, storage_writer=Writer(partial), process_group=self._group)
            records = self._everywhere(lambda: self._write_own(partial, random_states))
            files = {name: record for part in records for name, record in part.items()}
            self._on_main(lambda: self._finish(partial, facts, files))
        except (CannotWrite, CheckpointException) as error:
            if self.worker.is_main and partial:
                shutil.rmtree(partial, ignore_errors=True)
            raise self._explained(error, facts["step"]) from None

    def _write_own(self, partial: Path, random_states: dict) -> dict[str, FileRecord]:
        """Writes this rank's random states; returns the size and CRC of all files it wrote."""
        random_file = partial / _random_file(self.worker)
        torch.save(random_states, random_file)
        flush(random_file)
        paths = [random_file, *partial.glob(f"__{self.worker.rank}_*.distcp")]
        if self.worker.is_main:
            paths.append(partial / ".metadata")
        return {path.name: describe_file(path) for path in paths}

    def _finish(self, partial: Path, facts: Mapping, files: Mapping[str, FileRecord]) -> None:
        commit_checkpoint(partial, facts, files)
        self._damaged = {path for path in self._damaged if step_of(path) != facts["step"]}
        prune(self.folder, self.keep, newest=facts["step"], damaged=self._damaged)

    def _explained(self, error: BaseException, step: int) -> UserError:
        if isinstance(error, CheckpointException):
            error = next(cause for cause, _ in error.failures.values())
        kept = [p for p in finished_checkpoints(self.folder) if p not in self._damaged]
        last = f"the last good one is {kept[0].name}" if kept else "there is none before it"
        return UserError(f"checkpoint of step {step} in {self.folder}: {reason_of(error)}; {last}")

    def _everywhere(self, action: Callable[[], T]) -> list[T]:
        """Returns the results of all ranks; raises CannotWrite on all if one fails."""
        result, reason = None, None
        try:
            result = action()
        except (OSError, RuntimeError) as error:
            reason = reason_of(error)
        outcomes = self.worker.gather((result, reason))
        for _, reason in outcomes:
            if reason:
                raise CannotWrite(reason)
        return [result for result, _ in outcomes]

    def _on_main(self, action: Callable[[], T]) -> T:
        """Calls ``action`` on rank 0 only; returns its result on all ranks."""
        return self._everywhere(action if self.worker.is_main else lambda: None)[0]


def writer_thread(device: torch.device) -> ThreadPoolExecutor:
    """Makes a pool of one thread whose current device is ``device``.

    In a new thread the current device is GPU 0. Code that asks for it would make a context of half
    a GB on GPU 0, from every rank.
    """
    if device.type != "cuda":
        return ThreadPoolExecutor(1)
    return ThreadPoolExecutor(1, initializer=torch.cuda.set_device, initargs=(device,))


class CannotWrite(Exception):
    """A failure to write a file; the message is the reason in a few words."""


class Writer(dcp.FileSystemWriter):
    """A file writer that fails with the system's error, as no context reaches the other ranks."""

    def write_data(self, *arguments: object) -> object:
        """Writes as the base class does; raises the system's error in place of torch's."""
        try:
            return super().write_data(*arguments)
        except RuntimeError as error:
            raise system_error(error) from None


def system_error(error: BaseException) -> BaseException:
    """Returns the system's error (a full disk) behind ``error``; if there is none, ``error``.

    An error of torch's file writer only says at which byte it noticed.
    """
    return error.__context__ if isinstance(error.__context__, OSError) else error


def reason_of(error: BaseException) -> str:
    """Returns the system's words for an error, or the first line of its message."""
    error = system_error(error)
    return getattr(error, "strerror", None) or (str(error).splitlines() or [repr(error)])[0]


def _random_file(worker: Worker) -> str:
    return f"random-{worker.rank}.pt"


def _random_states() -> dict[str, Tensor]:
    """Returns the states of torch's generators; nothing else draws numbers in training."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def _set_random_states(states: Mapping[str, Tensor]) -> None:
    torch.set_rng_state(states["cpu"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
