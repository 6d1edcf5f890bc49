"""Files that a user names: by themselves, by a folder, or through the standard input."""

from __future__ import annotations

import os
import re
import stat
import sys
from collections.abc import Collection, Hashable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from common.errors import UserError
from common.traces.logs.text_lines import GZIP, MOST_BYTES

STDIN, STDIN_NAME = "-", "standard input"
LAST_NUMBER = re.compile(r"\d+(?=\D*$)")


@contextmanager
def named_files(paths: Sequence[Path], left_out: Collection[str] = ()) -> Iterator[dict[Path, str]]:
    """Yields the files that paths name: file → its name in messages.

    A folder stands for all that is in it and below it. ``-`` is the standard input, of which a copy
    is made, up to the bound of a text.

    Args:
        paths: files, folders and ``-``.
        left_out: names of files in folders that are left out.

    Raises:
        UserError: a path does not exist, or is a device or a pipe.
    """
    files: dict[Path, str] = {}
    with TemporaryDirectory(prefix="ddplab-read-") as scratch:
        for path in paths:
            if str(path) == STDIN:
                files[_copy_of_input(Path(scratch))] = STDIN_NAME
            elif path.is_dir():
                inside = (p for p in sorted(path.rglob("*")) if not p.is_dir())
                files |= {p: str(p.relative_to(path)) for p in inside if p.name not in left_out}
            elif path.is_file():
                files[path] = path.name
            elif path.exists():
                raise UserError(
                    f"{path}: a device or a pipe; name a file, or - for what is piped in"
                )
            else:
                raise UserError(f"{path}: no such file or folder")
        yield files


def _copy_of_input(folder: Path) -> Path:
    mode = os.fstat(sys.stdin.fileno()).st_mode
    if stat.S_ISCHR(mode) and not sys.stdin.isatty():
        raise UserError("-: the standard input is a device; pipe a file or a log into it")
    start = sys.stdin.buffer.peek(2)[:2]
    path, remaining = folder / (STDIN_NAME + ".gz" * (start == GZIP)), MOST_BYTES
    with path.open("wb") as file:
        while remaining > 0 and (octets := sys.stdin.buffer.read(min(2**20, remaining))):
            remaining -= file.write(octets)
    return path


def of_one_job(members: Sequence[tuple[Path, set[Hashable]]]) -> tuple[list[int], list[int]]:
    """Tells the files of one job from those of others, where two have the same rank.

    Jobs are told apart by folders, or by what stands in names before the rank. The job with most
    files counts; where neither tells, none does.

    Args:
        members: per file its path, and what only one file of a job can hold, such as its rank.

    Returns:
        numbers of the files that count, and of the others.
    """
    everything = list(range(len(members)))
    for key in (
        lambda path: None,
        lambda path: path.parent,
        lambda path: (path.parent, LAST_NUMBER.split(path.name)[0]),
    ):
        jobs: dict[object, list[int]] = {}
        for index, (path, _) in enumerate(members):
            jobs.setdefault(key(path), []).append(index)
        sets = [[members[index][1] for index in job] for job in jobs.values()]
        if all(len(set().union(*job)) == sum(map(len, job)) for job in sets):  # all are apart
            chosen = max(jobs.values(), key=len, default=[])
            return chosen, [index for index in everything if index not in chosen]
    return [], everything
