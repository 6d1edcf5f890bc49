"""The staff's private files beside a public project: references, hidden tests, keys, fault sets.

An overlay is a folder whose files stand at the same paths as in the project, and come first.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from common.errors import UserError

COPIED = ("common", "tests", "assignments")
NOT_COPIED = shutil.ignore_patterns("__pycache__", ".pytest_cache")


@contextmanager
def with_overlay(root: Path, overlay: Path | None) -> Iterator[Path]:
    """Gives a project in which the overlay's files have taken their places; goes at the end.

    Raises:
        UserError: the overlay is no folder, or has none of the project's folders.
    """
    if overlay is None:
        yield root
        return
    names = [path.name for path in overlay.iterdir()] if overlay.is_dir() else []
    if not set(names) & {*COPIED, "data"}:
        raise UserError(f"--overlay {overlay}: expected a folder with {', '.join(COPIED)} or data")
    with TemporaryDirectory(prefix="ddplab-overlay-") as scratch:
        merged = Path(scratch)
        merged.chmod(0o755)
        for path in root.iterdir():
            if path.name in (*COPIED, *names) and path.is_dir():
                shutil.copytree(path, merged / path.name, ignore=NOT_COPIED)
            elif path.name not in names and not path.name.startswith("."):
                (merged / path.name).symlink_to(path.absolute())
        shutil.copytree(overlay, merged, dirs_exist_ok=True, ignore=NOT_COPIED)
        yield merged
