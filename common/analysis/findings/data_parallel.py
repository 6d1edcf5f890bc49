"""Finds the speedup of DDP (assignment 1), and its losses."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from common.analysis.data_parallel.strategy_times import exchange_cost, open_strategies
from common.analysis.findings.finding import MEASURED, Found, Question, span
from common.analysis.runs import Run
from common.errors import UserError


def speedup_of_ddp(folder: Path) -> Found:
    """Finds DDP's speedup over one device at the fewest micro-batches, and where the rest went.

    With ``local``, the same computation without an exchange, the loss is split: what slower
    computation costs, and what the exchange adds.
    """
    strategies = open_strategies(folder)
    table = strategies.summary()
    rows = table[(table["strategy"] == "DDP") & table["speedup"].notna()]
    if rows.empty:
        raise UserError("no step of DDP beside one of a single device")
    row = rows.sort_values("accumulation").iloc[0]
    ranks = strategies.ranks
    cost = exchange_cost(strategies).set_index("accumulation")
    lost = ""
    if row["accumulation"] in cost.index:
        own = cost.loc[row["accumulation"]]
        lost = (
            f"; without the exchange {own['local_speedup']:.2f} times, the exchange adds "
            f"{own['added_share']:.0%} to the step"
        )
    low, high = row["speedup_low"], row["speedup_high"]
    hidden = "noise hides whether this is faster than one device" if low < 1 < high else ""
    rounds = f"{span(low, high)} over rounds"
    if pd.isna(row["noise"]):
        rounds, hidden = "a single round", "a single round does not tell it from noise"
    return Found(
        value=(
            f"{row['speedup']:.2f} times on {ranks} ranks, efficiency {row['speedup'] / ranks:.0%}"
        ),
        spread=f"{rounds}{lost}",
        kind=MEASURED,
        runs=(Run(strategies.folder, folder),),
        hidden=hidden,
    )


QUESTIONS = (
    Question(
        title="Speedup of DDP",
        meaning=(
            "As many times as there are ranks would be ideal; ranks that share a machine compute "
            "more slowly, and the exchange is what the next findings are about."
        ),
        anchor="assignment1_ddp-time-per-step",
        find=speedup_of_ddp,
    ),
)
"""Questions of the first page to assignment 1."""
