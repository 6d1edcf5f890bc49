"""Checkpoint folders: each is complete or absent, has checksums, and only the newest few stay.

::

    checkpoints/step-00000050/manifest.json    step, data position, model; size and CRC of each file
                              .metadata, __0_0.distcp …    torch.distributed.checkpoint's
                              random-0.pt …    random states of each rank
                stopped            the step of the checkpoint that a run was told to stop with

A checkpoint is written as ``.partial-…``, flushed, and renamed when its manifest is complete; an
old one is renamed to ``.old-…`` before it is deleted. So a folder called ``step-…`` is one that was
written to its end, and the manifest's checksums show later damage.
"""

from __future__ import annotations

import json
import os
import shutil
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from common.runtime.run_directory import write_atomically

MANIFEST = "manifest.json"
FINISHED, PARTIAL, OLD = "step-", ".partial-", ".old-"
STOPPED = "stopped"
PIECE_BYTES = 2**24

FileRecord = tuple[int, int]
"""Size in bytes and CRC-32."""


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
        ranks = self.facts["world_size"]
        return f"{self.facts['strategy']} on {ranks} rank{'s' if ranks > 1 else ''}"


class Damaged(Exception):
    """A checkpoint that is not what was written; the message names the file and its fault."""


def finished_checkpoints(folder: Path) -> list[Path]:
    """Returns the folders of finished checkpoints, newest first."""
    found = [path for path in folder.glob(f"{FINISHED}*") if path.name[len(FINISHED) :].isdigit()]
    return sorted(found, key=lambda path: int(path.name[len(FINISHED) :]), reverse=True)


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


def start_checkpoint(folder: Path, step: int) -> Path:
    """Makes an empty folder for the checkpoint of ``step`` and returns its path."""
    partial = folder / f"{PARTIAL}{step:08d}"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    return partial


def describe_file(path: Path) -> FileRecord:
    """Computes the size in bytes and the CRC-32 of a file."""
    size, crc = 0, 0
    with path.open("rb") as file:
        while piece := file.read(PIECE_BYTES):
            size += len(piece)
            crc = zlib.crc32(piece, crc)
    return size, crc


def finish_checkpoint(partial: Path, facts: Mapping, files: Mapping[str, FileRecord]) -> Path:
    """Writes the manifest, flushes, and renames the folder to its final path, which it returns.

    A checkpoint of the same step is replaced: a run left it and was then resumed from an earlier
    one.
    """
    content = {"facts": dict(facts), "files": dict(files)}
    text = json.dumps(content, indent=1, sort_keys=True)
    crc = zlib.crc32(text.encode())
    write_atomically(partial / MANIFEST, json.dumps({"crc": crc, "content": text}))
    final = partial.with_name(f"{FINISHED}{partial.name[len(PARTIAL) :]}")
    if final.exists():
        remove_checkpoint(final)
    partial.rename(final)
    flush(final.parent)
    return final


def remove_checkpoint(path: Path) -> None:
    """Deletes a checkpoint, renamed first: a kill in between leaves no half under its name."""
    old = path.with_name(f"{OLD}{path.name}")
    shutil.rmtree(old, ignore_errors=True)
    path.rename(old)
    shutil.rmtree(old, ignore_errors=True)


def prune(folder: Path, keep: int) -> None:
    """Deletes all but the ``keep`` newest checkpoints."""
    for path in finished_checkpoints(folder)[keep:]:
        remove_checkpoint(path)


def flush(path: Path) -> None:
    """Waits until a file, or a rename in a folder, is on disk (fsync)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_manifest(path: Path) -> tuple[SavedCheckpoint, dict[str, FileRecord]]:
    """Reads the manifest of the checkpoint in ``path``: the checkpoint, and its files' records.

    The files themselves are not read.

    Raises:
        Damaged: there is no manifest, or it has been changed.
    """
    try:
        outer = json.loads((path / MANIFEST).read_text())
        intact = zlib.crc32(outer["content"].encode()) == outer["crc"]
    except FileNotFoundError:
        raise Damaged(f"{MANIFEST} is missing") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        intact = False
    if not intact:
        raise Damaged(f"{MANIFEST} has been changed")
    content = json.loads(outer["content"])
    files = {name: (size, crc) for name, (size, crc) in content["files"].items()}
    return SavedCheckpoint(path, content["facts"]), files


def check_file(path: Path, expected: FileRecord) -> None:
    """Raises Damaged if a file is missing, shorter or longer, or has other bytes."""
    size, crc = expected
    try:
        found_size = path.stat().st_size
        if found_size != size:
            raise Damaged(f"{path.name} has {found_size:,} of {size:,} bytes")
        found = describe_file(path)
    except FileNotFoundError:
        raise Damaged(f"{path.name} is missing") from None
    except OSError as error:
        raise Damaged(f"{path.name} cannot be read: {error.strerror}") from None
    if found != (size, crc):
        raise Damaged(f"{path.name} has been changed")
