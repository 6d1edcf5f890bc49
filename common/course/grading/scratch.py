"""The folders that student code may write to, which are empty when a check begins."""

from __future__ import annotations

import subprocess
from pathlib import Path


def empty(folder: Path) -> None:
    """Deletes all that is in a folder; of a link, not what it points to.

    Raises:
        OSError: something is left.
    """
    if any(folder.iterdir()):
        # It goes deeper than shutil.rmtree, which needs a stack and a descriptor for each level.
        delete = ["find", str(folder), "-mindepth", "1", "-delete"]
        subprocess.run(delete, stderr=subprocess.DEVNULL)
    if any(folder.iterdir()):
        raise OSError(f"{folder} cannot be emptied")
