"""Ends a training whose loss is no number any more."""

from __future__ import annotations

import math
from collections.abc import Sequence

from common.errors import RunFailed


def require_finite(
    losses: Sequence[float], first: int, advice: str = "lower --lr", what: str = "loss"
) -> None:
    """Raises RunFailed if the last loss is no number; all ranks call it with the same losses.

    One in between may be infinite: in 16 bits the scaler leaves out an update that overflows.

    Args:
        losses: losses of consecutive steps.
        first: the number of the first of these steps.
        advice: the way out, for the message.
        what: what the numbers are.
    """
    if math.isfinite(losses[-1]):
        return
    index = len(losses) - 1
    while index and not math.isfinite(losses[index - 1]):
        index -= 1
    raise RunFailed(
        f"the {what} is {losses[-1]} since step {first + index}: training went apart; {advice}"
    )
