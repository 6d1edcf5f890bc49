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
    """Returns a file of lines ``name number`` (cgroups) or ``name: number unit`` (meminfo)."""
    lines = (line.split() for line in (read_text(path) or "").splitlines())
    return {
        words[0].removesuffix(":"): int(words[1])
        for words in lines
        if len(words) > 1 and words[1].isdigit()
    }


def read_memory_bytes(root: Path = ROOT) -> tuple[int | None, int | None]:
    """Returns the bytes of the host's memory that are available, and all there are."""
    kib = read_fields(root / "proc/meminfo")
    available, total = (kib.get(name) for name in ("MemAvailable", "MemTotal"))
    return available and available * 1024, total and total * 1024
