"""Checkpoints as folders: whole or not there, every byte accounted for, the newest few kept.

::

    checkpoints/step-00000050/manifest.json    step, data position, model; size and CRC of each file
                              .metadata, __0_0.distcp …    torch.distributed.checkpoint's
                              random-0.pt …    random states of each rank
                stopped            the step of the checkpoint that a run was told to stop with

A checkpoint is written as ``.partial-…``, flushed, and renamed when its manifest is complete; an
old one is renamed to ``.old-…`` before it is deleted. So a folder called ``step-…`` is one that was
written to its end, and the manifest tells whether it still is what was written.
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
        """Steps that were done."""
        return self.facts["step"]

    @property
    def position(self) -> int:
        """Tokens that were consumed."""
        return self.facts["position"]

    @property
    def origin(self) -> str:
        """What wrote it, such as ``DDP on 2 ranks``."""
        ranks = self.facts["world_size"]
        return f"{self.facts['strategy']} on {ranks} rank{'s' if ranks > 1 else ''}"


class Damaged(Exception):
    """A checkpoint that is not what was written; says how."""


def finished_checkpoints(folder: Path) -> list[Path]:
    """The folders of finished checkpoints, newest first."""
    found = [path for path in folder.glob(f"{FINISHED}*") if path.name[len(FINISHED) :].isdigit()]
    return sorted(found, key=lambda path: int(path.name[len(FINISHED) :]), reverse=True)


def mark_stopped(folder: Path, step: int) -> None:
    """Leave word that the run was told to stop and is saved, for those who hear of it only as of
    a failure: torchrun's exit status is 1 whatever that of its ranks (sbatch/rendezvous.sh).
    """
    write_atomically(folder / STOPPED, f"{step}\n")


def remove_leftovers(folder: Path) -> None:
    """Remove what a run that was killed was just writing or deleting, and word of a stop."""
    (folder / STOPPED).unlink(missing_ok=True)
    for prefix in (PARTIAL, OLD):
        for path in folder.glob(f"{prefix}*"):
            shutil.rmtree(path, ignore_errors=True)


def start_checkpoint(folder: Path, step: int) -> Path:
    """An empty folder to write the checkpoint of ``step`` into."""
    partial = folder / f"{PARTIAL}{step:08d}"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    return partial


def describe_file(path: Path) -> FileRecord:
    """Size and CRC-32 of a file."""
    size, crc = 0, 0
    with path.open("rb") as file:
        while piece := file.read(PIECE_BYTES):
            size += len(piece)
            crc = zlib.crc32(piece, crc)
    return size, crc


def finish_checkpoint(partial: Path, facts: Mapping, files: Mapping[str, FileRecord]) -> Path:
    """Write the manifest, flush, and give the folder its final name, which is returned.

    One of the same step, left by a run that was then resumed from an earlier one, is replaced.
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
    """Delete a checkpoint; killed in the middle, no half of one is left under its name."""
    old = path.with_name(f"{OLD}{path.name}")
    shutil.rmtree(old, ignore_errors=True)
    path.rename(old)
    shutil.rmtree(old, ignore_errors=True)


def prune(folder: Path, keep: int) -> None:
    """Delete all but the ``keep`` newest checkpoints."""
    for path in finished_checkpoints(folder)[keep:]:
        remove_checkpoint(path)


def flush(path: Path) -> None:
    """Make sure that a file, or a rename in a folder, is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_manifest(path: Path) -> tuple[SavedCheckpoint, dict[str, FileRecord]]:
    """The checkpoint that ``path`` holds and its files, which are not looked at yet.

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
    """Raise Damaged for a file that is missing, shorter or longer, or has other bytes."""
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
