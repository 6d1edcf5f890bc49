"""Folders of the project."""

from __future__ import annotations

import os
from pathlib import Path


def project_root() -> Path:
    """Returns the folder that holds common/, assignments/, notebooks/ and data/."""
    return Path(__file__).resolve().parents[2]


def relative_to_project(path: Path | str) -> str:
    """Returns a path below the project's root relative to it; any other path is made absolute."""
    path = Path(path).resolve()
    return (
        str(path.relative_to(project_root())) if path.is_relative_to(project_root()) else str(path)
    )


def search_path() -> str:
    """Returns PATH with the folders of system tools, which a user's PATH often lacks on Debian."""
    return os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])
