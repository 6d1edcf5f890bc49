"""Readers of the small files of /proc, /sys and /etc; what cannot be read is None, never 0."""

from __future__ import annotations

from pathlib import Path

ROOT = Path("/")


def read_text(path: Path) -> str | None:
    """Returns a file's text without the blanks around it; None where it cannot be read."""
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return None


def read_integer(path: Path, base: int = 10) -> int | None:
    """Returns a file's only number; None where it cannot be read or is none."""
    try:
        return int(read_text(path) or "", base)
    except ValueError:
        return None


def read_fields(path: Path) -> dict[str, int]:
    """Returns a file of lines ``name number``, as cgroups write their statistics."""
    pairs = (line.split() for line in (read_text(path) or "").splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}
