"""Words around numbers, as every sentence of the project has them."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """Returns a number with its noun: ``1 rank``, ``2 ranks``, ``1,024 ranks``."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
