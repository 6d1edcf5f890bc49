"""Made samples of visits to settings or plans, by two ranks."""

from __future__ import annotations

from collections.abc import Iterable

import pandas as pd


def visits(kind: str, times_ms: dict[str, float], rounds: Iterable[int]) -> pd.DataFrame:
    """Returns visits of two ranks, of which rank 1 is slower by a tenth; rounds drift.

    Args:
        kind: column of the names.
        times_ms: time of a step of rank 1 in the first round, by name.
        rounds: numbers of the rounds.
    """
    rows = [
        {kind: name, "round": round_, "rank": rank, "iteration": iteration}
        | {"step_time_ms": time_ms * (0.9 + 0.1 * rank) * (1 + 0.01 * round_)}
        for name, time_ms in times_ms.items()
        for round_ in rounds
        for rank in (0, 1)
        for iteration in range(2)
    ]
    return pd.DataFrame(rows)
