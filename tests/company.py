"""Keeps other tests away while a test that measures is running.

Tests run in several processes (pytest-xdist). A test marked ``alone`` waits until the others that
are running have ended, and none begins before it has.
"""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class Room:
    """A room that many tests share, or one has for itself; all processes name the same folder."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        # Who waits to be alone holds the door, so that those who share do not slip in for ever.
        self._door = (folder / "door").open("w")
        self._room = (folder / "room").open("w")

    @contextmanager
    def entered(self, alone: bool) -> Iterator[None]:
        """Holds the room, with others or alone; waits for it as long as it takes."""
        fcntl.flock(self._door, fcntl.LOCK_EX)
        try:
            fcntl.flock(self._room, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        finally:
            fcntl.flock(self._door, fcntl.LOCK_UN)
        try:
            yield
        finally:
            fcntl.flock(self._room, fcntl.LOCK_UN)
