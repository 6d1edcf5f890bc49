"""The folder of a run's checkpoints: what is on disk, what is left over, and what goes.

How one is committed and read is exercise A1.6. Beside the checkpoints lies ``stopped``, the step of
the one that a run was told to stop with.
"""

from __future__ import annotations

import shutil
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from common.exercises.checkpoint_commit import (
    FINISHED,
    OLD,
    PARTIAL,
    finished_checkpoints,
    remove_checkpoint,
)
from common.runtime.records.run_directory import write_atomically
from common.runtime.wording import counted

STOPPED = "stopped"


@dataclass(frozen=True)
class SavedCheckpoint:
    """A checkpoint on disk and what its manifest says of the run."""

    path: Path
    facts: Mapping

    @property
    def step(self) -> int:
        """Returns the number of steps that were done."""
        return self.facts["step"]

    @property
    def position(self) -> int:
        """Returns the number of tokens that all ranks had consumed."""
        return self.facts["position"]

    @property
    def origin(self) -> str:
        """Returns the strategy and ranks that wrote it, such as ``DDP on 2 ranks``."""
        return f"{self.facts['strategy']} on {counted(self.facts['world_size'], 'rank')}"


def mark_stopped(folder: Path, step: int) -> None:
    """Writes the file that says that the run was told to stop, and saved its work at ``step``.

    sbatch/rendezvous.sh needs the file, as torchrun's exit status is 1 whatever that of its ranks.
    """
    write_atomically(folder / STOPPED, f"{step}\n")


def remove_leftovers(folder: Path) -> None:
    """Removes what a killed run was writing or deleting, and the file of ``mark_stopped``."""
    (folder / STOPPED).unlink(missing_ok=True)
    for prefix in (PARTIAL, OLD):
        for path in folder.glob(f"{prefix}*"):
            shutil.rmtree(path, ignore_errors=True)


def step_of(path: Path) -> int:
    """Returns the number of steps in a finished checkpoint's name."""
    return int(path.name[len(FINISHED) :])


def prune(folder: Path, keep: int, newest: int, damaged: Collection[Path]) -> None:
    """Deletes the checkpoints that have ``keep`` newer intact ones.

    A damaged one does not count, and is deleted like any other. One of a later step than
    ``newest`` was damaged when the run resumed from before it; it stays until the run has come that
    far, as it may be the disk that could not be read for a while.

    Args:
        newest: step of the checkpoint that was just written.
        damaged: checkpoints that the run found damaged when it began and has not replaced.
    """
    written = [path for path in finished_checkpoints(folder) if step_of(path) <= newest]
    intact = [path for path in written if path not in damaged]
    for path in written:
        if len(intact) >= keep and step_of(path) < step_of(intact[keep - 1]):
            remove_checkpoint(path)
