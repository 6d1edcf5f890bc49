"""The state of the machine during a measurement, judged by its witness."""

from __future__ import annotations

from dataclasses import dataclass

import pandas as pd

from common.judged import DISTURBED, DRIFTING, NOT_WITNESSED, QUIET

WITNESS, RUN = "witness.csv", "run"
"""The witness's table, and the stage of a run's beginning and end in it."""
CROWDED = 0.1
"""Share of the cores from which others disturb, if they had more than was left idle.

Two ranks on two cores: the share is exact to 0.005 (against the sum over all processes, seven spans
of 2 s), and what a system always runs took 0.02. A busy process has 0.33 of the cores, four of them
0.67 to 0.73 (six rounds of ``ddp_benchmark``), and then nothing is idle."""
STOLEN = 0.05
"""Share of the cores from which a hypervisor's other machines disturb; 0.002 to 0.005 were stolen
while the host was calm."""
SLOW = 1.25
"""Times of the fixed computation over their median from which a round was slow: 0.97 to 1.13 were
seen while each process had a core, 0.99 to 1.07 and now and then 1.4 to 2 beside four busy ones."""
OFTEN = 1 / 3
"""Share of the rounds from which what disturbs some disturbs the measurement."""


@dataclass(frozen=True)
class MachineState:
    """What may be said of the machine during a measurement.

    Attributes:
        state: QUIET, DRIFTING, DISTURBED or NOT_WITNESSED.
        reason: what it is judged by, in words; empty for a quiet machine.
    """

    state: str
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.state}: {self.reason}" if self.reason else self.state


def judge_machine(rows: pd.DataFrame) -> MachineState:
    """Judges the rows of ``witness.csv``.

    A round counts as disturbed where other processes crowded its ranks out or a hypervisor gave the
    cores away; by the worst of its hosts. A few such rounds, or a fixed computation that took
    longer at some time, make the machine drifting. What comes before the first round is no
    measurement, and is not judged.

    Args:
        rows: a row per rank and witness (``tables.WITNESS_COLUMNS``); shares may be NaN.
    """
    if rows.empty:
        return MachineState(NOT_WITNESSED)
    rows = rows.assign(turn=rows.groupby("rank").cumcount())
    measured = rows[rows.duplicated(["stage", "rank"])]
    crowded = measured["others_share"] >= measured["idle_share"].clip(lower=CROWDED)
    stolen = measured["steal_share"] >= STOLEN
    causes = [
        _cause(measured, "others_share", crowded, "other processes took {} of the cores"),
        _cause(measured, "steal_share", stolen, "the hypervisor gave {} of the cores away"),
        _slowness(rows[rows["turn"] > 0]),
    ]
    causes = [cause for cause in causes if cause.reason]
    states = {cause.state for cause in causes}
    worst = next((state for state in (DISTURBED, DRIFTING) if state in states), QUIET)
    return MachineState(worst, "; ".join(cause.reason for cause in causes))


def _cause(measured: pd.DataFrame, column: str, bad: pd.Series, words: str) -> MachineState:
    """Judges rounds by a share of the cores: those that have a row that is ``bad``."""
    spans = measured[column].notna().groupby(measured["turn"]).any()
    spoiled = bad.groupby(measured["turn"]).any()[spans]
    if not spoiled.any():
        return MachineState(QUIET)
    worst = measured[bad].groupby("turn")[column].max()
    reason = words.format(f"{worst.mean() * 100:.0f} %")
    if len(spoiled) > 1:
        # Each round is one, and so is what follows the last.
        reason += f" in {spoiled.sum()} of {len(spoiled)} spans"
    return MachineState(DISTURBED if spoiled.mean() >= OFTEN else DRIFTING, reason)


def _slowness(rows: pd.DataFrame) -> MachineState:
    """Judges the times of the fixed computation by their median, for each rank."""
    ratio = rows["witness_ms"] / rows.groupby("rank")["witness_ms"].transform("median")
    if not ratio.max() >= SLOW:  # a watch over somebody's script computes nothing itself
        return MachineState(QUIET)
    slowest = rows.loc[ratio.idxmax()]
    rounds = max(0, slowest["round"])
    when = f"after round {rounds}" if rounds else "before round 1"
    when = "at the end" if slowest["stage"] == RUN else when
    reason = f"the fixed computation took {ratio.max():.1f} times its median {when}"
    return MachineState(DRIFTING, reason)
