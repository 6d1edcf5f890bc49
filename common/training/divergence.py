"""Ends a training whose loss is no number any more."""

from __future__ import annotations

import math
from collections.abc import Sequence

from common.errors import RunFailed


def require_finite(losses: Sequence[float], first: int, advice: str = "lower --lr") -> None:
    """Raises RunFailed if the last loss is no number; all ranks call it with the same losses.

    One in between may be infinite: in 16 bits the scaler leaves out an update that overflows.

    Args:
        losses: losses of consecutive steps.
        first: the number of the first of these steps.
        advice: what to try.
    """
    if math.isfinite(losses[-1]):
        return
    place = len(losses) - 1
    while place and not math.isfinite(losses[place - 1]):
        place -= 1
    raise RunFailed(
        f"the loss is {losses[-1]} since step {first + place}: training went apart; {advice}"
    )
