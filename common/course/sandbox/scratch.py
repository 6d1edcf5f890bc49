"""The folders that student code may write to, which are empty when a check begins."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path


def empty(folder: Path) -> None:
    """Deletes all that is in a folder; of a link, not what it points to.

    What is mounted below it was there before any student, who can neither change nor delete it.

    Raises:
        OSError: something is left.
    """
    if is_filled(folder):
        # It goes deeper than shutil.rmtree, which needs a stack and a descriptor for each level.
        delete = ["find", str(folder), "-xdev", "-mindepth", "1", "-delete"]
        subprocess.run(delete, stderr=subprocess.DEVNULL)
    if is_filled(folder):
        raise OSError(f"{folder} cannot be emptied")


def is_filled(folder: Path) -> bool:
    """Returns True if there is more in a folder than what is mounted there."""
    return any(not os.path.ismount(path) for path in folder.iterdir())
