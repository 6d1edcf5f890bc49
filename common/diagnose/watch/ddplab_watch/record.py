"""The file that a rank writes: a line of JSON for each row, appended as the training goes on.

A line is ``{"table": NAME, ...}``. What was written before a rank was killed can be read; a line
that was cut off is the last.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import sys
import threading
from pathlib import Path
from typing import Any

FORMAT = 1
"""Version of the bundle; a reader refuses a later one."""


def say(sentence: str) -> None:
    """Says something on standard error; where that cannot be written, the training goes on."""
    with contextlib.suppress(OSError, ValueError):
        print(f"ddplab-watch: {sentence}", file=sys.stderr, flush=True)


class Record:
    """Rows of one rank, written to its file by a thread of the watch.

    Args:
        path: path of the file; its folder is made with the first row.
        anonymise: hash names of hosts, users and paths.
    """

    def __init__(self, path: Path, anonymise: bool = False) -> None:
        self.path, self.anonymise = path, anonymise
        self.failed = ""
        """Reason why nothing can be written any more; empty while it can."""
        self.window = 0
        """Number of the window that rows are of; each change while the script runs begins one."""
        self._rows: list[dict[str, Any]] = []
        self._lock = threading.Lock()
        self._writing = threading.Lock()
        """Held while the disk is waited for, which ``add`` never does."""

    def add(self, table: str, **row: Any) -> None:
        """Keeps a row until the next ``write``."""
        with self._lock:
            of_window = {"window": self.window} if self.window else {}
            self._rows.append({"table": table, **of_window, **row})

    def unseen(self, what: str, why: str) -> None:
        """Keeps a row that says what cannot be seen here."""
        self.add("unseen", what=what, why=why)

    def name_or_hash(self, text: str) -> str:
        """Returns a name of a host, user or path: as it is, or hashed."""
        if not self.anonymise or not text:
            return text
        return hashlib.blake2s(text.encode(), digest_size=5).hexdigest()

    def write(self) -> None:
        """Appends what was kept to the file. Where that fails, says so once and keeps no more."""
        with self._writing:
            with self._lock:
                rows, self._rows = self._rows, []
            if not rows or self.failed:
                return
            lines = [json.dumps(row, default=str) for row in rows]
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                with self.path.open("a", encoding="utf-8") as file:
                    file.write("\n".join(lines) + "\n")
            except OSError as error:
                self.failed = error.strerror or str(error)
                say(f"{self.path}: {self.failed}; not recorded")
