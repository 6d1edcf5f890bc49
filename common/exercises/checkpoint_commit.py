"""A1.6: checkpoints of which a power cut leaves each whole or absent, and the newest whole one.

::

    checkpoints/step-00000050/manifest.json    what the run says of itself; size, CRC of each file
                              …                other files
                .partial-00000100              being written
                .old-step-00000050             being deleted

A checkpoint is written under the name ``.partial-…``, flushed to disk, and renamed when its
manifest is complete; an old one is renamed to ``.old-…`` before it is deleted. So a folder called
``step-…`` is one that was written to its end, and the manifest's checksums show later damage. A
rename of a folder happens as a whole, or not at all; everything else may be cut off in its middle.
What a file holds is on disk once the file has been flushed. A rename is on disk once the folder in
which it happened has been: until then a power cut may undo it.
"""

from __future__ import annotations

import json
import os
import shutil
import zlib
from collections.abc import Mapping
from pathlib import Path

MANIFEST = "manifest.json"
FINISHED, PARTIAL, OLD = "step-", ".partial-", ".old-"
PIECE_BYTES = 2**24

FileRecord = tuple[int, int]
"""Size in bytes and CRC-32."""


class Damaged(Exception):
    """A checkpoint that is not what was written; the message names the file and its fault."""


def finished_checkpoints(folder: Path) -> list[Path]:
    """Returns the folders of finished checkpoints, newest first."""
    found = [path for path in folder.glob(f"{FINISHED}*") if path.name[len(FINISHED) :].isdigit()]
    return sorted(found, key=lambda path: int(path.name[len(FINISHED) :]), reverse=True)


def start_checkpoint(folder: Path, step: int) -> Path:
    """Makes an empty folder for the checkpoint of ``step`` and returns its path."""
    partial = folder / f"{PARTIAL}{step:08d}"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    return partial


def flush(path: Path) -> None:
    """Waits until a file, or a rename in a folder, is on disk (fsync)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def describe_file(path: Path) -> FileRecord:
    """Computes the size in bytes and the CRC-32 of a file."""
    size, crc = 0, 0
    with path.open("rb") as file:
        while piece := file.read(PIECE_BYTES):
            size += len(piece)
            crc = zlib.crc32(piece, crc)
    return size, crc


def commit_checkpoint(partial: Path, facts: Mapping, files: Mapping[str, FileRecord]) -> Path:
    """Makes a checkpoint of a folder of ``start_checkpoint``, whose files are written and flushed.

    Writes the manifest, flushes it, and renames the folder. A checkpoint of the same step is
    replaced: a run left it and was then resumed from an earlier one. When it returns, a power cut
    takes nothing of the checkpoint away any more.

    Args:
        partial: the folder.
        facts: what the run says of itself, of JSON's types.
        files: the record of each file, by its name.

    Returns:
        the checkpoint's final path.
    """
    # BEGIN SOLUTION A1.6
    # The manifest has a CRC of its own: a changed digit in it is still JSON.
    content = {"facts": dict(facts), "files": dict(files)}
    text = json.dumps(content, indent=1, sort_keys=True)
    (partial / MANIFEST).write_text(json.dumps({"crc": zlib.crc32(text.encode()), "content": text}))
    flush(partial / MANIFEST)
    flush(partial)
    final = partial.with_name(f"{FINISHED}{partial.name[len(PARTIAL) :]}")
    if final.exists():
        remove_checkpoint(final)
    partial.rename(final)
    flush(final.parent)
    return final
    # END SOLUTION


def remove_checkpoint(path: Path) -> None:
    """Deletes a checkpoint; what a power cut in between leaves is whole, or not called ``step-…``.

    Nothing of it remains.
    """
    # BEGIN SOLUTION A1.6
    old = path.with_name(f"{OLD}{path.name}")
    shutil.rmtree(old, ignore_errors=True)
    path.rename(old)
    flush(path.parent)  # or files might be gone before the name is
    shutil.rmtree(old, ignore_errors=True)
    # END SOLUTION


def read_manifest(path: Path) -> tuple[dict, dict[str, FileRecord]]:
    """Reads a checkpoint's facts, and the records of its files, which are not read themselves.

    Both are as ``commit_checkpoint`` got them.

    Raises:
        Damaged: there is no manifest, or it has been changed.
    """
    # BEGIN SOLUTION A1.6
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
    return content["facts"], files
    # END SOLUTION


def check_file(path: Path, expected: FileRecord) -> None:
    """Raises Damaged if a file is missing, shorter or longer, or has other bytes.

    The message has the file's name, as everywhere.
    """
    # BEGIN SOLUTION A1.6
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
    # END SOLUTION


def check_checkpoint(path: Path, rank: int = 0, ranks: int = 1) -> dict:
    """Reads a checkpoint through and returns its facts.

    Args:
        path: its folder.
        rank, ranks: each of several ranks reads its part of the files: every file is read by one
            of them, and no rank reads more than one file more than another. All read the manifest.

    Raises:
        Damaged: it is not what was written.
    """
    # BEGIN SOLUTION A1.6
    facts, files = read_manifest(path)
    for name in sorted(files)[rank::ranks]:
        check_file(path / name, files[name])
    return facts
    # END SOLUTION


def newest_whole(folder: Path) -> Path | None:
    """Returns the newest checkpoint that is not damaged, or None."""
    # BEGIN SOLUTION A1.6
    for path in finished_checkpoints(folder):
        try:
            check_checkpoint(path)
        except Damaged:
            continue
        return path
    return None
    # END SOLUTION
