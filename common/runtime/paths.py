"""Folders of the project."""

from __future__ import annotations

import os
import subprocess
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


def git(root: Path, *arguments: str, timeout_s: float | None = None) -> subprocess.CompletedProcess:
    """Runs git in a project, which may be another user's: its code runs here anyway.

    Raises:
        OSError, subprocess.TimeoutExpired: there is no git, or it takes longer.
    """
    command = ["git", "-C", str(root), "-c", f"safe.directory={root.resolve()}", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)


def search_path() -> str:
    """Returns PATH with the folders of system tools, which a user's PATH often lacks on Debian."""
    return os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])
