"""One rank slowed on purpose, and bottlenecks simulated for many ranks: read and summarised."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from common.analysis.micro_batches import caption, in_order
from common.analysis.mode_comparison import STATIC
from common.errors import UserError
from common.perfmodel.tables import numbers, read_table
from common.runtime.paths import relative_to_project
from common.runtime.run_directory import read_environment

SIMULATED, PLANNING = "simulated-bottlenecks.csv", "planning-times.csv"
COLUMNS = (
    *("dataset", "world_size", "draw", "mode", "same_batch", "bottleneck_ms", "lower_bound_ms"),
    "samples",
)
CALIBRATED, TOLD, NOT_TOLD = "dynamic_calibrated", "told", "not_told"
CLOSE = 0.25
"""A rank's factor is found when it is estimated to a quarter: a shared machine varies by less."""


@dataclass(frozen=True, eq=False)
class Simulation:
    """Bottlenecks by data set, world size, mode and draw.

    Attributes:
        table: with ``COLUMNS``; a text's bottleneck is ``bottleneck_ms / samples``.
        planning: the time of each plan: world_size, global_batch, cost, time_ms; or None.
    """

    folder: Path
    caption: str
    table: pd.DataFrame
    planning: pd.DataFrame | None

    @property
    def datasets(self) -> list[str]:
        return list(dict.fromkeys(self.table["dataset"]))

    def ratios(self) -> pd.Series:
        """Bottleneck over the lower bound of static's batch, both by the text, for each row.

        For modes that share static's batches this is the bottleneck over their bound. Those that
        form their own are measured by the same bound, since theirs would be another for each.
        """
        keys = ["dataset", "world_size", "draw"]
        static = self.table[self.table["mode"] == STATIC].set_index(keys)
        bound = (static["lower_bound_ms"] / static["samples"]).rename("bound")
        joined = self.table.join(bound, on=keys)
        return joined["bottleneck_ms"] / joined["samples"] / joined["bound"]

    def summary(self) -> pd.DataFrame:
        """Median and quartiles of ``ratios`` over draws.

        Columns: dataset, mode, same_batch, world_size, ratio, q25, q75.
        """
        keys = [self.table[key] for key in ("dataset", "mode", "same_batch", "world_size")]
        quartiles = self.ratios().groupby(keys, sort=False).quantile([0.25, 0.5, 0.75]).unstack()
        table = quartiles.set_axis(["q25", "ratio", "q75"], axis=1).reset_index()
        place = {mode: at for at, mode in enumerate(in_order(table["mode"]))}
        return table.sort_values("mode", key=lambda modes: modes.map(place), kind="stable")


def read_simulation(path: Path) -> Simulation:
    """A table of simulated bottlenecks. Raises UserError for one that lacks a column."""
    table = read_table(path, COLUMNS)
    shown = relative_to_project(path)
    for column in ("world_size", "bottleneck_ms", "lower_bound_ms", "samples"):
        table[column] = numbers(table, column, shown, above=0)
    table["same_batch"] = table["same_batch"].astype(str).str.lower().isin(["true", "1"])
    if STATIC not in set(table["mode"]):
        raise UserError(f"{shown}: no bottlenecks of mode static")
    planning = path.parent / PLANNING
    columns = ("world_size", "global_batch", "cost", "time_ms")
    return Simulation(
        folder=path.parent,
        caption=caption(read_environment(path.parent), path.parent),
        table=table,
        planning=read_table(planning, columns) if planning.is_file() else None,
    )


@dataclass(frozen=True)
class SlowRank:
    """How a mode dealt with one slowed rank.

    Attributes:
        rank: the one that was slowed.
        factor: by how much.
        estimate: what the last step's plan took it to be.
        found_at: the first step from which on the estimate, relative to the other ranks', stays
            close to the factor; None where that never happened.
        before, after: the slowest rank's step over the best one could do with such ranks: median
            of the steps up to that one, and of those from there on (all, where it was not found).
    """

    mode: str
    rank: int
    factor: float
    estimate: float
    found_at: int | None
    before: float
    after: float


def slow_steps(table: pd.DataFrame, mode: str) -> pd.Series:
    """The slowest rank's step over that of a plan that was told of the slow rank, by step.

    Both are measured on the same global batches.
    """
    slowest = table.groupby(["mode", "step"])["step_time_ms"].max()
    return slowest[mode] / slowest[TOLD]


def relative_factors(table: pd.DataFrame, mode: str = CALIBRATED) -> pd.DataFrame:
    """Each rank's estimated factor over those of the ranks that were not slowed, by step.

    Shape [steps, ranks]. A machine that is slower for all ranks alike is no matter for a plan; so
    the mean (geometric) of the others is what a rank is compared with.
    """
    rows = table[table["mode"] == mode]
    estimates = rows.pivot(index="step", columns="rank", values="estimated_factor")
    factors = rows.groupby("rank")["slow_factor"].max()
    others = np.log(estimates[factors.index[factors == 1]]).mean(axis=1)
    return estimates.div(np.exp(others), axis=0)


def slow_summary(table: pd.DataFrame, mode: str = CALIBRATED) -> SlowRank:
    """Which rank was slowed, when it was found, and how steps compare to what is possible."""
    rows = table[table["mode"] == mode]
    factors = rows.groupby("rank")["slow_factor"].max()
    estimates = relative_factors(table, mode)
    slowed, factor = int(factors.idxmax()), float(factors.max())
    away = ~((estimates[slowed] / factor - 1).abs() <= CLOSE)
    last_away = np.flatnonzero(away)
    place = int(last_away[-1]) + 1 if len(last_away) else 0
    found = int(away.index[place]) if place < len(away) else None
    ratio = slow_steps(table, mode)
    early = ratio[ratio.index < found] if found is not None else ratio
    late = ratio[ratio.index >= found] if found is not None else ratio
    return SlowRank(
        *(mode, slowed, factor, float(estimates[slowed].iloc[-1]), found),
        *(float(early.median()), float(late.median())),
    )
