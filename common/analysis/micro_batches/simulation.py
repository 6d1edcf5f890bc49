"""Bottlenecks simulated for many ranks, and the time that plans take."""

from __future__ import annotations

from dataclasses import dataclass

import pandas as pd

from common.analysis.micro_batches.mode_comparison import STATIC
from common.analysis.micro_batches.training_runs import in_order, mode_name
from common.analysis.runs import OfRun, Run
from common.analysis.step_parts import flags
from common.csv_tables import numbers, read_table
from common.errors import UserError
from common.runtime.paths import relative_to_project

SIMULATED, PLANNING = "simulated-bottlenecks.csv", "planning-times.csv"
COLUMNS = (
    "dataset",
    "world_size",
    "draw",
    "mode",
    "same_batch",
    "bottleneck_ms",
    "lower_bound_ms",
    "samples",
)
PLANNING_COLUMNS = ("world_size", "global_batch", "cost", "time_ms")
PLANS = {
    "world_size": ("ranks", "{:,.0f}"),
    "global_batch": ("texts", "{:,.0f}"),
    "time_ms": ("plan (ms)", "{:.2f}"),
}
"""Titles of ``Simulation.plan_times``."""


@dataclass(frozen=True, eq=False)
class Simulation(OfRun):
    """Bottlenecks by data set, world size, mode and draw.

    Attributes:
        table: Rows with ``COLUMNS``; a text's bottleneck is ``bottleneck_ms / samples``.
        planning: Time of each plan, with ``PLANNING_COLUMNS``; or None.
    """

    table: pd.DataFrame
    planning: pd.DataFrame | None

    @property
    def datasets(self) -> list[str]:
        """Returns the data sets whose lengths were drawn."""
        return list(dict.fromkeys(self.table["dataset"]))

    def ratios(self) -> pd.Series:
        """Returns the bottleneck over the lower bound of static's batch, both per text, by row.

        For modes that share static's batches this is the bottleneck over their bound. Those that
        form their own are compared with the same bound, since their own would differ by mode.
        """
        keys = ["dataset", "world_size", "draw"]
        static = self.table[self.table["mode"] == STATIC].set_index(keys)
        bound = (static["lower_bound_ms"] / static["samples"]).rename("bound")
        joined = self.table.join(bound, on=keys)
        return joined["bottleneck_ms"] / joined["samples"] / joined["bound"]

    def summary(self) -> pd.DataFrame:
        """Returns median and quartiles of ``ratios`` over draws.

        Columns: dataset, mode, same_batch, world_size, ratio, q25, q75.
        """
        keys = [self.table[key] for key in ("dataset", "mode", "same_batch", "world_size")]
        quartiles = self.ratios().groupby(keys, sort=False).quantile([0.25, 0.5, 0.75]).unstack()
        table = quartiles.set_axis(["q25", "ratio", "q75"], axis=1).reset_index()
        order = {mode: index for index, mode in enumerate(in_order(table["mode"]))}
        return table.sort_values("mode", key=lambda modes: modes.map(order), kind="stable")

    def extremes(self) -> pd.DataFrame:
        """Returns static and the best mode that pads, on the fewest and on the most ranks.

        Columns: data set, mode, and a column for each of the two numbers of ranks: the median
        bottleneck over its lower bound. The best mode is that on most ranks.
        """
        table = self.summary()
        few, most = table["world_size"].min(), table["world_size"].max()
        padded = table[table["same_batch"] & ~table["mode"].str.startswith("packed")]
        rows = []
        for dataset in self.datasets:
            ratios = padded[padded["dataset"] == dataset].pivot(
                index="mode", columns="world_size", values="ratio"
            )
            rows += [
                {"data set": dataset, "mode": mode_name(mode)}
                | {f"{ranks:,.0f} ranks": ratios.loc[mode, ranks] for ranks in (few, most)}
                for mode in dict.fromkeys([STATIC, ratios[most].idxmin()])
            ]
        return pd.DataFrame(rows)

    def plan_times(self) -> pd.DataFrame:
        """Returns the median time of a plan with the cost that takes longest, by size.

        Columns as in ``PLANS``; no rows where planning was not timed.
        """
        if self.planning is None:
            return pd.DataFrame(columns=[*PLANS])
        keys = ["world_size", "global_batch"]
        medians = self.planning.groupby([*keys, "cost"])["time_ms"].median()
        return medians.groupby(keys).max().reset_index()


def read_simulation(run: Run) -> Simulation:
    """Reads the table of simulated bottlenecks of a run, and the times of plans beside it.

    Raises UserError for a table that lacks a column, or has no rows of static.
    """
    path = run.folder / SIMULATED
    table = read_table(path, COLUMNS)
    name = relative_to_project(path)
    for column in ("world_size", "bottleneck_ms", "lower_bound_ms", "samples"):
        table[column] = numbers(table, column, name, above=0)
    table["same_batch"] = flags(table["same_batch"])
    if STATIC not in set(table["mode"]):
        raise UserError(f"{name}: no bottlenecks of mode static")
    planning = read_table(run.folder / PLANNING, PLANNING_COLUMNS) if run.has(PLANNING) else None
    return Simulation(opened=run, table=table, planning=planning)
