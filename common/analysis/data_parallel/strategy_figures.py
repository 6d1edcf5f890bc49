"""Draws strategies: time per step, bytes sent, and steps on emulated hosts."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from common.analysis.data_parallel.emulated_strategies import EmulatedStrategies
from common.analysis.data_parallel.strategies import StrategyTimes
from common.analysis.data_parallel.training_figures import COLOURS, DIAMONDS
from common.analysis.data_parallel.training_runs import strategy_name
from common.analysis.style import BLUE, GREY, MEASURED, ORANGE, SKY, THOUSANDS, bar_rows, figure
from common.runtime.wording import counted


def step_times(strategies: StrategyTimes, only: tuple[str, ...] = ()) -> Figure:
    """Draws time per step by strategy, a panel per accumulation: median, quartiles, speedup.

    ``only`` has the strategies to show; by default all.
    """
    table = strategies.summary(only)
    panels = list(table.groupby("accumulation"))
    height = 1.5 + 0.4 * table["strategy"].nunique()
    with figure(
        strategies.caption, figsize=(7.2, height), ncols=len(panels), sharey=True, squeeze=False
    ) as (fig, grid):
        for axes, (accumulation, rows) in zip(grid[0], panels, strict=True):
            places = bar_rows(axes, rows["strategy"].map(strategy_name))
            bars = [rows["step_ms"] - rows["q25_ms"], rows["q75_ms"] - rows["step_ms"]]
            axes.barh(
                places,
                rows["step_ms"],
                height=0.62,
                xerr=bars,
                error_kw={"elinewidth": 1, "capsize": 2.5},
                color=[COLOURS[name] for name in rows["strategy"]],
                alpha=0.85,
            )
            widest = rows["q75_ms"].max()
            for y, row in zip(places, rows.itertuples(), strict=True):
                if row.strategy != "single" and pd.notna(row.speedup):
                    where = max(row.step_ms, row.q75_ms) + 0.02 * widest
                    axes.text(where, y, f"{row.speedup:.2f}×", va="center", fontsize=8.5)
            axes.set_xlim(0, 1.2 * widest)
            axes.xaxis.set_major_formatter(THOUSANDS)
            axes.set_xlabel("time per step (ms);\nbeside it: speed over one device's")
            axes.set_title(
                f"{counted(accumulation, 'micro-batch')} per rank", loc="left", fontsize=9
            )
    return fig


def bytes_sent(strategies: StrategyTimes) -> Figure:
    """Draws the bytes that a rank sends in a step: predicted as bars, measured as points."""
    table = strategies.sent()
    unit, name = (1e9, "GB") if table["predicted_bytes"].max() > 2e9 else (1e6, "MB")
    longest = table["predicted_bytes"].max() / unit
    panels = list(table.groupby("accumulation"))
    height = 1.7 + 0.42 * table["strategy"].nunique()
    with figure(
        strategies.caption,
        figsize=(7.2, height),
        ncols=len(panels),
        sharey=True,
        sharex=True,
        squeeze=False,
    ) as (fig, grid):
        for axes, (accumulation, rows) in zip(grid[0], panels, strict=True):
            places = bar_rows(axes, rows["strategy"].map(strategy_name))
            predicted = rows["predicted_bytes"] / unit
            axes.barh(places, predicted, height=0.6, color=SKY, label="predicted")
            axes.plot(rows["measured_bytes"] / unit, places, label="measured", **DIAMONDS)
            for y, row in zip(places, rows.itertuples(), strict=True):
                if pd.notna(row.ratio_to_ddp):
                    end = row.predicted_bytes / unit + 0.035 * longest
                    axes.text(end, y, f"{row.ratio_to_ddp:.2f}×", va="center", fontsize=8.5)
            axes.set_xlim(0, 1.22 * longest)
            axes.set_xlabel(f"sent per rank and step ({name});\nbeside it: over DDP's")
            axes.set_title(
                f"{counted(accumulation, 'micro-batch')} per rank", loc="left", fontsize=9
            )
        handles, labels = grid[0, 0].get_legend_handles_labels()
        fig.legend(handles, labels, loc="outside upper center", ncols=2, fontsize=8)
    return fig


def emulated_steps(run: EmulatedStrategies) -> Figure:
    """Draws steps on emulated hosts: predicted as bars in two parts, measured as points."""
    table = run.table()
    several = table["accumulation"].nunique() > 1
    labels = [
        strategy_name(row.strategy) + (f", {row.accumulation} micro-batches" if several else "")
        for row in table.itertuples()
    ]
    with figure(run.measured.caption, figsize=(7.2, 1.8 + 0.48 * len(table))) as (fig, axes):
        places = bar_rows(axes, labels)
        axes.barh(
            places, table["computation_ms"], height=0.6, color=SKY, label="predicted: computation"
        )
        axes.barh(
            places,
            table["exposed_ms"],
            left=table["computation_ms"],
            height=0.6,
            color=ORANGE,
            label="predicted: exposed communication",
        )
        middle = table["measured_ms"]
        bars = [middle - table["q25_ms"], table["q75_ms"] - middle]
        label = "measured (median, quartiles)"
        axes.errorbar(middle, places, xerr=bars, label=label, **MEASURED)
        for y, row in zip(places, table.itertuples(), strict=True):
            axes.text(
                max(row.predicted_ms, row.q75_ms) + 0.02 * table["predicted_ms"].max(),
                y,
                f"{row.error:+.0%}",
                va="center",
                fontsize=8.5,
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},
            )
        rows = run.measured.summary()
        for name, colour, dashes in (("single", BLUE, ":"), ("local", GREY, "--")):
            steps = rows[rows["strategy"] == name]
            if len(steps) == 1:
                axes.axvline(
                    steps["step_ms"].iloc[0],
                    label=f"measured: {strategy_name(name)}",
                    color=colour,
                    linestyle=dashes,
                    linewidth=1.3,
                )
        axes.set_xlim(0, 1.12 * max(axes.get_xlim()[1], table["q75_ms"].max()))
        axes.xaxis.set_major_formatter(THOUSANDS)
        axes.set_xlabel("time per step (ms); percentages: predicted against measured")
        fig.legend(loc="outside upper center", ncols=3, fontsize=8)
    return fig
