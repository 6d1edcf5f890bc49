"""The gate: a change is only predicted by a replay that gives the measured steps back."""

from __future__ import annotations

from dataclasses import dataclass

import pandas as pd

from common.errors import UserError
from common.perfmodel.replay.engine import Replayed
from common.samples import slowest_rank

LIMIT = 0.05
"""Largest error of the replayed step, as a share of the measured one."""


@dataclass(frozen=True, eq=False)
class Gate:
    """Steps of a replay beside the measured ones.

    Attributes:
        steps: a row for each step, by its number: measured_s, replayed_s, of the slowest rank.
        worst: sentence on the rank and step that is furthest off.
    """

    steps: pd.DataFrame
    worst: str

    @property
    def measured_s(self) -> float:
        """Returns the mean measured step."""
        return float(self.steps["measured_s"].mean())

    @property
    def replayed_s(self) -> float:
        """Returns the mean replayed step."""
        return float(self.steps["replayed_s"].mean())

    @property
    def error(self) -> float:
        """Returns the error of the mean step."""
        return self.replayed_s / self.measured_s - 1

    @property
    def within(self) -> int:
        """Returns the number of steps that come out within the limit by themselves."""
        errors = self.steps["replayed_s"] / self.steps["measured_s"] - 1
        return int((errors.abs() <= LIMIT).sum())

    @property
    def is_open(self) -> bool:
        """Returns True if the mean step comes out within the limit."""
        return abs(self.error) <= LIMIT

    def check(self) -> None:
        """Raises UserError, saying where it is off the most, for a replay that is off."""
        if not self.is_open:
            raise UserError(
                f"the replay is off: a step of {self.measured_s * 1e3:.4g} ms comes out as "
                f"{self.replayed_s * 1e3:.4g} ms ({self.error:+.1%}, at most {LIMIT:.0%}); "
                f"{self.worst}. So no change is predicted from this trace"
            )


def gate_of(replayed: Replayed) -> Gate:
    """Returns how well a program as it is gives its steps back."""
    steps = replayed.steps()
    errors = (steps["replayed_s"] / steps["measured_s"] - 1).abs()
    row = steps.loc[errors.idxmax()]
    worst = (
        f"the furthest off is step {int(row['step'])} of rank {int(row['rank'])}, "
        f"{row['replayed_s'] * 1e3:.4g} for {row['measured_s'] * 1e3:.4g} ms"
    )
    return Gate(slowest(steps), worst)


def slowest(steps: pd.DataFrame) -> pd.DataFrame:
    """Returns the slowest rank's time of each step, by its number."""
    return slowest_rank(steps, ["measured_s", "replayed_s"], by=["step"])
