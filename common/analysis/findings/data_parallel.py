"""Finds the speedup of DDP (assignment 1), and its losses."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from common.analysis.data_parallel.strategy_times import exchange_cost, open_strategies
from common.analysis.findings.finding import MEASURED, Found, Question, hidden_text, span
from common.analysis.runs import Run
from common.errors import UserError


def speedup_of_ddp(folder: Path) -> Found:
    """Finds DDP's speedup over one device at the fewest micro-batches, and where the rest went.

    With ``local``, the same computation without an exchange, the loss is split: what slower
    computation costs, and what the exchange adds, where that can be told from noise.
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
        lost = f"; {hidden_text('what the exchange adds')}"
        if own["above_noise"] == "yes":
            lost = (
                f"; without the exchange {own['local_speedup']:.2f} times, the exchange adds "
                f"{own['added_share']:.0%} to the step"
            )
    low, high, single = row["speedup_low"], row["speedup_high"], pd.isna(row["noise"])
    is_hidden = single or low < 1 < high
    rounds = "a single round" if single else f"{span(low, high)} times over rounds"
    return Found(
        value=(
            f"{row['speedup']:.2f} times on {ranks} ranks, efficiency {row['speedup'] / ranks:.0%}"
        ),
        spread=f"{rounds}{lost}",
        kind=MEASURED,
        runs=(Run(strategies.folder, folder),),
        hidden=f"whether {ranks} ranks are faster than one device" if is_hidden else "",
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
