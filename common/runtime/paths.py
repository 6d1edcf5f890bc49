"""Folders of the project."""

from __future__ import annotations

import os
from pathlib import Path


def project_root() -> Path:
    """The folder that holds common/, assignments/, notebooks/ and data/."""
    return Path(__file__).resolve().parents[2]


def relative_to_project(path: Path | str) -> str:
    """The path as a user would type it from the project's root, where it lies below it."""
    path = Path(path).resolve()
    return (
        str(path.relative_to(project_root())) if path.is_relative_to(project_root()) else str(path)
    )


def search_path() -> str:
    """PATH and the folders of system tools, which a user's PATH often lacks on Debian."""
    return os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])
