"""Words around numbers, as every sentence of the project has them."""

from __future__ import annotations

from numbers import Integral


def counted(number: float, noun: str) -> str:
    """Returns a number with its noun: ``1 rank``, ``2 ranks``, ``1,024 ranks``, ``0.5 cores``."""
    text = f"{number:,}" if isinstance(number, Integral) else f"{number:,.3g}"
    plural = "es" if noun.endswith(("ss", "tch")) else "s"
    return f"{text} {noun}{'' if number == 1 else plural}"


def size_text(size_bytes: float) -> str:
    """Formats a size in the largest binary unit that fits: ``64 KiB``, ``1.5 MiB``."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if size_bytes >= unit:
            return f"{digits(size_bytes / unit)} {name}"
    return f"{size_bytes:g} B"


def digits(value: float) -> str:
    """Formats a number with three digits that count, and an exponent only where it is below 1e-4.

    >>> digits(16822547.2), digits(212.94), digits(0.01277)
    ('16,800,000', '213', '0.0128')
    """
    rounded = float(f"{value:.3g}")
    return f"{rounded:,.0f}" if abs(rounded) >= 100 else f"{value:.3g}"
