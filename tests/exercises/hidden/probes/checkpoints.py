"""Checkpoints of a student's in scratch: writing, dying before an operation, damage, and a look."""

from __future__ import annotations

import os
from pathlib import Path

OPERATIONS = ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "shutil.rmtree")


def write(folder: str, step: int, contents: dict[str, bytes]) -> str:
    """Writes a checkpoint of these files, as a trainer does; returns its path."""
    from common.exercises import checkpoint_commit as commit

    partial = commit.start_checkpoint(Path(folder), step)
    files = {}
    for name, content in contents.items():
        (partial / name).write_bytes(content)
        commit.flush(partial / name)
        files[name] = commit.describe_file(partial / name)
    return str(commit.commit_checkpoint(partial, {"step": step}, files))


def write_until_death(folder: str, number: int) -> str:
    """Writes, replaces and removes checkpoints, and dies before the ``number``-th file operation.

    What it wrote and did not flush is cut off then, as by a power cut. Returns ``done`` if nothing
    is left to do before.
    """
    from common.exercises import checkpoint_commit as commit

    flushed = die_before(number, Path(folder))
    old = write(folder, 2, {"weights.bin": b"two" * 50})
    write(folder, 3, {"weights.bin": b"three" * 50})
    write(folder, 3, {"weights.bin": b"three again" * 50})
    commit.remove_checkpoint(Path(old))
    lose_what_was_not_flushed(Path(folder), flushed)  # the power is cut when all is done
    return "done"


def die_before(number: int, folder: Path) -> set[int]:
    """Lets this process die before its ``number``-th operation on files in the folder.

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
    import sys

    sys.addaudithook(look)
    return flushed


def lose_what_was_not_flushed(folder: Path, flushed: set[int]) -> None:
    """Cuts files in half that are not on disk."""
    for path in folder.rglob("*"):
        if path.is_file() and path.stat().st_ino not in flushed:
            os.truncate(path, path.stat().st_size // 2)


def newest(folder: str) -> str | None:
    """Returns the name of the checkpoint that the student's code finds."""
    from common.exercises import checkpoint_commit as commit

    found = commit.newest_whole(Path(folder))
    return None if found is None else found.name


def complaints(path: str, ranks: int = 1) -> list[str]:
    """Returns for each of several ranks what it says of a checkpoint."""
    from common.exercises import checkpoint_commit as commit

    return [complaint(commit.check_checkpoint, Path(path), rank, ranks) for rank in range(ranks)]


def complaint_about_manifest(path: str) -> str:
    """Returns what reading a checkpoint's manifest says."""
    from common.exercises import checkpoint_commit as commit

    return complaint(commit.read_manifest, Path(path))


def complaint(function, *arguments: object) -> str:
    """Returns the exception of a call, or nothing."""
    try:
        function(*arguments)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def files_of(folder: str) -> dict[str, bytes]:
    """Returns all files below a folder; of a folder without any its name and a slash."""
    root = Path(folder)
    found = {}
    for path in sorted(root.rglob("*")):
        name = str(path.relative_to(root))
        if path.is_file():
            found[name] = path.read_bytes()
        elif not any(path.iterdir()):
            found[f"{name}/"] = b""
    return found


def put(folder: str, files: dict[str, bytes]) -> None:
    """Writes files below a folder; a name that ends in a slash is a folder."""
    for name, content in files.items():
        path = Path(folder) / name
        if name.endswith("/"):
            path.mkdir(parents=True, exist_ok=True)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)


def remove(path: str) -> None:
    """Deletes a file."""
    Path(path).unlink()
