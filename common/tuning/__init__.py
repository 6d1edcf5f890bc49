"""The best DDP settings for anyone's model: measured, predicted, and verified by real steps."""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    """Imports ``tune`` when it is asked for: reading a recommendation needs no torch."""
    if name == "tune":
        from common.tuning.tuner import tune

        return tune
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
