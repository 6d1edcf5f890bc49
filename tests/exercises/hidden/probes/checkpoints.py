"""Checkpoints of a student's in scratch: writing, dying before an operation, damage, and looks."""

from __future__ import annotations

import ctypes
import os
import struct
from pathlib import Path

OPERATIONS = ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "shutil.rmtree")


def begin(folder: str, step: int) -> str:
    """Starts a checkpoint; returns the path of its folder."""
    from common.exercises import checkpoint_commit as commit

    return str(commit.start_checkpoint(Path(folder), step))


def finish(path: str, facts: dict, contents: dict[str, bytes]) -> str:
    """Writes files into a checkpoint that has begun and commits it; returns its path."""
    from common.exercises import checkpoint_commit as commit

    partial, files = Path(path), {}
    for name, content in contents.items():
        (partial / name).write_bytes(content)
        commit.flush(partial / name)
        files[name] = commit.describe_file(partial / name)
    return str(commit.commit_checkpoint(partial, facts, files))


def write(folder: str, step: int, contents: dict[str, bytes]) -> str:
    """Writes a checkpoint of these files, as a trainer does; returns its path."""
    return finish(begin(folder, step), {"step": step}, contents)


def take_away(path: str) -> None:
    """Deletes a checkpoint."""
    from common.exercises import checkpoint_commit as commit

    commit.remove_checkpoint(Path(path))


def read(path: str) -> dict:
    """Returns what a checkpoint says of itself, by both ways to hear it, and its files' records."""
    from common.exercises import checkpoint_commit as commit

    facts, files = commit.read_manifest(Path(path))
    return {"facts": facts, "files": files, "checked": commit.check_checkpoint(Path(path))}


def write_until_death(folder: str, number: int) -> str:
    """Writes, replaces and removes checkpoints, and dies before the ``number``-th file operation.

    As by a power cut, what it wrote and did not flush is cut off then, and what it renamed has its
    old name, in its old folder, if neither of the two folders was flushed afterwards. Returns
    ``done`` if nothing is left to do before.
    """
    disk = Disk(Path(folder), number)
    disk.watch()
    old = write(folder, 2, {"weights.bin": b"two" * 50})
    write(folder, 3, {"weights.bin": b"three" * 50})
    write(folder, 3, {"weights.bin": b"three again" * 50})
    take_away(old)
    write(folder, 4, {"weights.bin": b"four" * 50})
    disk.lose()  # the power is cut when all is done
    return "done"


class Disk:
    """What of a folder would be there after a power cut before its ``number``-th operation."""

    def __init__(self, folder: Path, number: int) -> None:
        self.folder, self.number, self.count = folder, number, 0
        # These have long been on disk.
        self.flushed = {path.stat().st_ino for path in (folder, *folder.rglob("*"))}
        self.renamed: list[tuple[tuple[int, str], tuple[int, str]]] = []
        """Renames that may be undone: number of the folder, and name in it, before and after."""

    def watch(self) -> None:
        """Lets this process die before the operation, from now on."""
        import sys

        fsync = os.fsync

        def note_flushed(descriptor: int) -> None:
            fsync(descriptor)
            number = os.fstat(descriptor).st_ino
            self.flushed.add(number)
            self.renamed = [
                rename for rename in self.renamed if number not in (rename[0][0], rename[1][0])
            ]

        os.fsync = note_flushed
        sys.addaudithook(self.look)

    def look(self, event: str, arguments: tuple) -> None:
        """Counts an operation of the exercise's that begins."""
        if event not in OPERATIONS or self.count < 0:
            return
        # rmtree names what it deletes relative to a folder that it has opened.
        inside = event in ("os.remove", "os.rmdir") and not str(arguments[0]).startswith("/")
        if not inside and not str(arguments[0]).startswith(str(self.folder)):
            return
        self.count += 1
        if self.count == self.number:
            self.count = -1  # what follows are not the exercise's
            self.lose()
            os._exit(9)
        if event == "os.rename":
            paths = (Path(str(name)) for name in arguments[:2])
            before, after = ((path.parent.stat().st_ino, path.name) for path in paths)
            self.renamed.append((before, after))

    def lose(self) -> None:
        """Cuts files in half that are not on disk, and undoes renames that are not."""
        self.count = -1
        folders = {path.stat().st_ino: path for path in (self.folder, *self.folder.rglob("*"))}
        for ends in reversed(self.renamed):
            before, after = (folders.get(number, self.folder) / name for number, name in ends)
            if after.exists() and not before.exists():
                after.rename(before)
        for path in self.folder.rglob("*"):
            if path.is_file() and path.stat().st_ino not in self.flushed:
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


EVENTS = {
    0x2: "modify",
    0x8: "close",
    0x40: "leave",
    0x80: "enter",
    0x100: "create",
    0x200: "delete",
}
"""Bit of each event in <sys/inotify.h>; at a rename the old name leaves and the new one enters."""


class Watched:
    """What the kernel says that somebody does in folders, in its order (inotify)."""

    HEAD = struct.Struct("iIII")
    NON_BLOCKING = 0o4000

    def __init__(self) -> None:
        self.libc = ctypes.CDLL(None, use_errno=True)
        self.descriptor = self.libc.inotify_init1(self.NON_BLOCKING)
        self.names: dict[int, str] = {}

    def add(self, path: str, name: str) -> None:
        """Watches one folder more, whatever it will be called."""
        number = self.libc.inotify_add_watch(self.descriptor, path.encode(), sum(EVENTS))
        if number < 0:
            raise OSError(ctypes.get_errno(), f"{path} cannot be watched")
        self.names[number] = name

    def read(self) -> list[list[str]]:
        """Returns the folder, event and file of each since the last time."""
        try:
            content = os.read(self.descriptor, 2**20)
        except BlockingIOError:
            return []
        events, position = [], 0
        while position < len(content):
            number, mask, _, length = self.HEAD.unpack_from(content, position)
            position += self.HEAD.size
            name = content[position : position + length].rstrip(b"\0").decode()
            position += length
            kind = next((word for bit, word in EVENTS.items() if mask & bit), "")
            if kind:
                events.append([self.names[number], kind, name])
        return events


WATCHED: list[Watched] = []


def watch(path: str, name: str) -> None:
    """Watches a folder, besides those before, and calls it by a name."""
    if not WATCHED:
        WATCHED.append(Watched())
    WATCHED[0].add(path, name)


def events() -> list[list[str]]:
    """Returns what has been done in the watched folders, and forgets them."""
    watched = WATCHED.pop()
    happened = watched.read()
    os.close(watched.descriptor)
    return happened
