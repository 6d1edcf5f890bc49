"""Writes, replaces and removes checkpoints, and dies before one of its file operations.

``commit_worker.py EXERCISE FOLDER DIES_AT``: EXERCISE is the file of A1.6, FOLDER has a checkpoint
of step 1, and DIES_AT counts operations from 1. What it wrote and did not flush is cut off, as by a
power cut. It prints ``done`` when nothing is left to do.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

OPERATIONS = ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "shutil.rmtree")


def exercise(path: str):
    """Load a file as the module of the exercise."""
    spec = importlib.util.spec_from_file_location("checkpoint_commit", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def die_before(number: int, folder: Path) -> set[int]:
    """Let this process die before its ``number``-th operation on files in the folder.

    Returns the inodes of the files that have been flushed; it grows.
    """
    flushed = {path.stat().st_ino for path in folder.rglob("*")}  # these have long been on disk
    fsync = os.fsync
    count = 0

    def note_flushed(descriptor: int) -> None:
        fsync(descriptor)
        flushed.add(os.fstat(descriptor).st_ino)

    def look(event: str, arguments: tuple) -> None:
        nonlocal count
        if event not in OPERATIONS:
            return
        # rmtree names what it deletes relative to a folder that it has opened.
        inside = event in ("os.remove", "os.rmdir") and not str(arguments[0]).startswith("/")
        if not inside and not str(arguments[0]).startswith(str(folder)):
            return
        count += 1
        if count == number:
            count = -(10**9)  # what follows are not the exercise's
            lose_what_was_not_flushed(folder, flushed)
            os._exit(9)

    os.fsync = note_flushed
    sys.addaudithook(look)
    return flushed


def lose_what_was_not_flushed(folder: Path, flushed: set[int]) -> None:
    for path in folder.rglob("*"):
        if path.is_file() and path.stat().st_ino not in flushed:
            os.truncate(path, path.stat().st_size // 2)


def write(commit, folder: Path, step: int, content: bytes) -> Path:
    """Write a checkpoint of one file, as a trainer does."""
    partial = commit.start_checkpoint(folder, step)
    path = partial / "weights.bin"
    path.write_bytes(content)
    commit.flush(path)
    files = {path.name: commit.describe_file(path)}
    return commit.commit_checkpoint(partial, {"step": step}, files)


if __name__ == "__main__":
    commit, folder = exercise(sys.argv[1]), Path(sys.argv[2])
    flushed = die_before(int(sys.argv[3]), folder)
    old = write(commit, folder, 2, b"two" * 50)
    write(commit, folder, 3, b"three" * 50)
    write(commit, folder, 3, b"three again" * 50)
    commit.remove_checkpoint(old)
    lose_what_was_not_flushed(folder, flushed)  # the power is cut when all is done
    print("done", flush=True)
