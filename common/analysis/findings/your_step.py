"""One step under every configuration that a run measured, taken apart on one scale."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from common.analysis.comparable import network_of, short_network
from common.analysis.data_parallel.strategies import read_strategies
from common.analysis.findings.finding import stage_of
from common.analysis.runs import DEPTHS, complete_runs
from common.analysis.step_parts import TIMED, decompose_all
from common.analysis.style import BLUE, GREY, ORANGE, SKY, figure
from common.judged import Verdict, compared
from common.runtime.wording import counted

PARTS = {
    "computation_ms": ("computation", BLUE),
    "exchange_ms": ("exposed exchange", ORANGE),
    "waiting_ms": ("waiting for slower ranks", SKY),
    "rest_ms": ("rest", GREY),
}
"""Columns of ``step_bars``, with their titles and colours."""
ALONE = {"single": "alone", "local": "without an exchange"}
"""Strategies that exchange nothing, with their names."""


def step_bars(run_dir: Path) -> pd.DataFrame:
    """Returns a row per configuration whose step was measured in parts or beside its computation.

    Columns: configuration (with the stage, where several have measured it), network, step_ms, those
    of ``PARTS``, and exchange (the verdict on the exposed exchange; empty where it was timed by
    itself). Where strategies took turns, computation is the step without an exchange of the same
    round, and waiting is in the exchange.
    """
    rows = [*_strategies(run_dir), *_arms(run_dir)]
    key = ["configuration", "network"]
    bars = pd.DataFrame(rows, columns=["stage", *key, "step_ms", *PARTS, "exchange"])
    # A sweep has the same step under the names of two regimes.
    bars = bars.drop_duplicates(["stage", *key], ignore_index=True)
    in_several = bars.duplicated(key, keep=False)
    bars.loc[in_several, "configuration"] += " (" + bars["stage"] + ")"
    return bars.drop(columns="stage")


def _strategies(run_dir: Path) -> Iterator[dict]:
    for run in complete_runs(run_dir, "strategy-times.csv", DEPTHS):
        strategies = read_strategies(run)
        fewest = min(strategies.rounds)
        rounds = strategies.rounds[fewest]
        if "local" not in rounds:
            continue
        exchanging = rounds.drop(columns="single", errors="ignore")
        against = compared(exchanging, "local", **strategies.conditions)
        against |= {"DDP": strategies.exchange[fewest]} if fewest in strategies.exchange else {}
        model = strategies.settings["model"]
        for name in rounds:
            step_ms = float(rounds[name].mean())
            share = 0.0 if name in ALONE else 1 - 1 / against[name].estimate
            exchange = step_ms * share
            ranks = 1 if name == "single" else strategies.ranks
            yield {
                "stage": stage_of(run),
                "configuration": f"{model}, {ALONE.get(name, name)}, {counted(ranks, 'rank')}",
                "network": short_network(network_of(run.environment)),
                "step_ms": step_ms,
                "computation_ms": step_ms - max(0.0, exchange),
                "exchange_ms": max(0.0, exchange),
                "waiting_ms": 0.0,
                "rest_ms": 0.0,
                "exchange": "" if name in ALONE else against[name].said,
            }


def _arms(run_dir: Path) -> Iterator[dict]:
    for run in complete_runs(run_dir, "arms.csv", DEPTHS):
        arms, steps = run.table("arms.csv"), run.table("steps.csv")
        if run.has("proposals.csv") or TIMED not in set(steps["kind"]):
            continue
        model = str(run.table("facts.csv")["model"].iloc[0]).partition(",")[0]
        for row in decompose_all(arms, steps).itertuples():
            computation_ms = row.forward_ms + row.backward_ms
            batches = f"{counted(row.world_size, 'rank')} × {row.batch_per_rank:g}"
            yield {
                "stage": stage_of(run),
                "configuration": f"{model}, {batches}",
                "network": short_network(network_of(run.environment)),
                "step_ms": row.step_ms,
                "computation_ms": computation_ms,
                "exchange_ms": row.communication_ms,
                "waiting_ms": row.waiting_ms,
                "rest_ms": row.step_ms - computation_ms - row.communication_ms - row.waiting_ms,
                "exchange": "",
            }


def step_bars_figure(bars: pd.DataFrame, caption: str) -> Figure:
    """Draws a bar per configuration, its parts from the left; an unsettled exchange is hatched."""
    with figure(caption, figsize=(7.2, 0.21 * len(bars) + 1.2)) as (fig, axes):
        start = pd.Series(0.0, index=bars.index)
        for column, (title, colour) in PARTS.items():
            drawn = axes.barh(bars.index, bars[column], left=start, color=colour, label=title)
            start = start + bars[column].clip(lower=0)
            if column == "exchange_ms":
                for bar, verdict in zip(drawn, bars["exchange"], strict=True):
                    if verdict not in ("", Verdict.SETTLED):
                        bar.set(hatch="////", fill=False, edgecolor=colour)
        labels = bars["configuration"] + " · " + bars["network"]
        axes.set_yticks(bars.index, labels, fontsize=9)
        axes.invert_yaxis()
        axes.grid(visible=False, axis="y")
        axes.set_xlabel("step (ms)")
        axes.legend(fontsize=7.5, ncols=4, loc="lower right", bbox_to_anchor=(1, 1))
    return fig
