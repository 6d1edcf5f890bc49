"""The figures of modes compared: ratios, waiting, calibrated costs, a slow rank, many ranks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.container import BarContainer
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, MaxNLocator, NullLocator

from common.analysis.micro_batches.calibration import NOT_TOLD, TOLD, relative_factors, slow_steps
from common.analysis.micro_batches.mode_comparison import CONTROL, STATIC, ModeComparison
from common.analysis.micro_batches.simulation import Simulation
from common.analysis.micro_batches.training_figures import COLOURS
from common.analysis.micro_batches.training_runs import mode_name
from common.analysis.style import (
    BLACK,
    BLUE,
    GREY,
    PLAIN,
    PLATE,
    RED,
    THOUSANDS,
    band,
    bar_rows,
    doubling_axis,
    figure,
    legend_above,
    log_axis,
    rank_look,
)
from common.analysis.sweep_speedups import error_bars


def mode_ratios(comparison: ModeComparison) -> Figure:
    """Draws each mode's step over static's on the same global batches, and the plan's promise."""
    table = comparison.summary.drop(STATIC)
    with figure(comparison.caption, figsize=(7.2, 1.9 + 0.55 * len(table))) as (fig, axes):
        places = bar_rows(axes, [mode_name(mode) for mode in table.index])
        _ratio_bars(axes, table, places)
        for column, marker, label in (
            ("padded_ratio", "D", "promised: padded tokens of the fullest rank"),
            ("compute_ratio", "o", "measured: computation of the slowest rank"),
            ("p95_ratio", "^", "measured: P95 of steps"),
        ):
            look = {"marker": marker, "markersize": 6, "color": BLACK, "mfc": "white", "zorder": 4}
            axes.plot(table[column], places, label=label, linestyle="none", **look)
        widest = table[["padded_ratio", "compute_ratio", "p95_ratio"]].max(axis=1)
        widest = np.fmax(widest, _drawn_ends(table))
        for y, ratio, end in zip(places, table["ratio"], widest, strict=True):
            axes.text(end + 0.03, y, f"{ratio:.2f}", va="center", fontsize=9, bbox=PLATE)
        axes.axvline(1, color=GREY, linestyle="--", linewidth=1)
        axes.set_xlim(0, max(1.05, 1.12 * widest.max()))
        axes.set_xlabel(
            "over static on the same global batches (bars: mean step of the slowest rank)"
        )
        fig.legend(loc="outside upper center", ncols=2, fontsize=8)
    return fig


def paired_ratios(comparison: ModeComparison) -> Figure:
    """Draws the distribution of each mode's ratio to static, step by step."""
    ratios = comparison.ratios().drop(columns=STATIC)
    with figure(comparison.caption) as (fig, axes):
        for mode in ratios:
            values = np.sort(ratios[mode])
            share = np.arange(1, len(values) + 1) / len(values) * 100
            axes.step(values, share, where="post", color=COLOURS[mode], label=mode_name(mode))
        axes.axvline(1, color=GREY, linestyle="--", linewidth=1)
        low, high = np.nanpercentile(ratios.to_numpy(), [0.5, 99.5])
        axes.set_xlim(min(0.95 * low, 0.95), max(1.05 * high, 1.05))
        axes.set_xlabel("step of the slowest rank, over static's on the same global batch")
        axes.set_ylabel("steps at most as long (%)")
        fig.legend(loc="outside upper center", ncols=3, fontsize=8)
    return fig


def per_sample(comparison: ModeComparison) -> Figure:
    """Draws the time per text of all modes over static's; hatched: batches of their own."""
    table = comparison.per_sample.drop(STATIC)
    with figure(comparison.caption, figsize=(7.2, 1.7 + 0.42 * len(table))) as (fig, axes):
        names = [
            mode_name(mode) + ("" if same else "\n(other batches)")
            for mode, same in table["same_batch"].items()
        ]
        places = bar_rows(axes, names)
        bars = _ratio_bars(axes, table, places)
        for bar, same in zip(bars, table["same_batch"], strict=True):
            bar.set_hatch("" if same else "////")
            bar.set_edgecolor("white")
        ends = _drawn_ends(table)
        for y, ratio, end in zip(places, table["ratio"], ends, strict=True):
            axes.text(end + 0.02, y, f"{ratio:.2f}", va="center", fontsize=9, bbox=PLATE)
        axes.axvline(1, color=GREY, linestyle="--", linewidth=1)
        axes.set_xlim(0, max(1.05, 1.1 * ends.max()))
        axes.set_xlabel("time per text, over static's (hatched: global batches of other texts)")
    return fig


def waiting(comparison: ModeComparison) -> Figure:
    """Draws the share of step time that ranks wait, by mode, and the control's as a line."""
    shares = comparison.waiting * 100
    modes = [*comparison.modes, *comparison.own_batch_modes]
    with figure(comparison.caption, figsize=(7.2, 1.5 + 0.38 * len(modes))) as (fig, axes):
        places = bar_rows(axes, [mode_name(mode) for mode in modes])
        colours = [COLOURS[mode] for mode in modes]
        axes.barh(places, shares[modes], height=0.6, color=colours, alpha=0.8)
        for y, mode in zip(places, modes, strict=True):
            end = shares[mode] + 0.012 * shares.max()
            axes.text(end, y, f"{shares[mode]:.1f} %", va="center", fontsize=8.5, bbox=PLATE)
        if CONTROL in shares:
            label = f"{mode_name(CONTROL)}: {shares[CONTROL]:.1f} %"
            axes.axvline(shares[CONTROL], color=RED, linestyle="--", linewidth=1.3, label=label)
            fig.legend(loc="outside upper center", fontsize=8)
        axes.set_xlim(0, 1.15 * shares.max())
        axes.set_xlabel("waiting for slower ranks (% of all ranks' step time)")
    return fig


def calibration(predicted: pd.DataFrame, caption: str) -> Figure:
    """Draws predicted against measured time of a pass, by rank."""
    with figure(caption, figsize=(7.2, 3.8)) as (fig, axes):
        times = predicted[["time_ms", "predicted_ms"]].clip(lower=1e-3)
        ends = np.array([times.min().min() / 1.2, times.max().max() * 1.2])
        band(axes, ends, ends * 0.9, ends * 1.1, GREY)
        axes.plot(ends, ends, color=GREY, linewidth=1, label="equal, and 10 % either way")
        for index, (rank, rows) in enumerate(predicted.groupby("rank")):
            look = rank_look(index) | {"alpha": 0.7, "linestyle": "none", "markersize": 5}
            axes.plot(rows["time_ms"], rows["predicted_ms"], label=f"rank {rank:.0f}", **look)
        for which in "xy":
            log_axis(axes, which, (1, 2, 5))
        axes.set_xlabel("measured time of a forward and backward pass (ms)")
        axes.set_ylabel("predicted (ms)")
        axes.legend(fontsize=8, loc="upper left")
    return fig


def slow_rank(table: pd.DataFrame, caption: str) -> Figure:
    """Draws each rank's estimated factor, and steps over those of a plan that was told."""
    with figure(caption, figsize=(7.2, 4.4), nrows=2, sharex=True) as (fig, (above, below)):
        estimates = relative_factors(table)
        for rank, factor in table.groupby("rank")["slow_factor"].max().items():
            colour = RED if factor > 1 else BLUE
            above.plot(
                estimates.index,
                estimates[rank],
                linewidth=1.2,
                label=f"rank {rank:.0f}" + (", slowed" if factor > 1 else ""),
                color=colour,
                marker="o",
                markersize=2.5,
            )
            above.axhline(factor, color=colour, linestyle="--", linewidth=1)
        above.set_ylabel("estimated time over the\nother ranks' (dashed: true)")
        above.set_ylim(0, 1.35 * max(table["slow_factor"].max(), estimates.max().max()))
        above.legend(fontsize=8, ncols=4, loc="upper right")
        for mode in (mode for mode in dict.fromkeys(table["mode"]) if mode != TOLD):
            ratio = slow_steps(table, mode)
            colour = COLOURS["dynamic" if mode == NOT_TOLD else mode]
            below.plot(ratio.index, ratio, color=colour, linewidth=1.3, label=mode_name(mode))
        below.axhline(1, color=GREY, linestyle="--", linewidth=1)
        below.set_ylabel("step over one whose\nplan was told")
        below.set(ylim=(0, 1.35 * max(below.get_ylim()[1], 1)), xlabel="step")
        below.xaxis.set_major_locator(MaxNLocator(integer=True))
        below.legend(fontsize=8, ncols=2, loc="upper right")
    return fig


def simulated(simulation: Simulation) -> Figure:
    """Draws bottleneck over lower bound up to many ranks: a panel per data set, a line per mode."""
    table, datasets = simulation.summary(), simulation.datasets
    with figure(
        simulation.caption, figsize=(7.2, 4.2), ncols=len(datasets), sharey=True, squeeze=False
    ) as (fig, grid):
        for axes, dataset in zip(grid[0], datasets, strict=True):
            for mode, rows in table[table["dataset"] == dataset].groupby("mode", sort=False):
                ranks, colour = rows["world_size"], COLOURS.get(mode, GREY)
                band(axes, ranks, rows["q25"], rows["q75"], colour)
                look = {"color": colour, "marker": "o", "markersize": 3.5, "linewidth": 1.4}
                look |= _simulated_look(mode, rows["same_batch"].all())
                other = "" if rows["same_batch"].all() else " (other batches)"
                axes.plot(ranks, rows["ratio"], label=mode_name(mode) + other, **look)
            _ranks_axis(axes, sorted(set(table["world_size"])))
            axes.axhline(1, color=GREY, linestyle="--", linewidth=1)
            axes.set_title(dataset, loc="left", fontsize=9.5)
        axes = grid[0, 0]
        axes.set_yscale("log")
        _plain_log_ticks(axes, table["q75"].max())
        axes.set_ylabel("bottleneck over its lower bound\n(median and quartiles of draws)")
        legend_above(fig, 3)
    return fig


def _ratio_bars(axes: Axes, table: pd.DataFrame, places: np.ndarray) -> BarContainer:
    """Draws a bar for each mode's ratio to static, with its interval where that may be told."""
    return axes.barh(
        places,
        table["ratio"],
        height=0.6,
        color=[COLOURS[mode] for mode in table.index],
        alpha=0.8,
        xerr=error_bars(table, "ratio"),
        error_kw={"elinewidth": 1.2, "capsize": 3},
    )


def _drawn_ends(table: pd.DataFrame) -> pd.Series:
    """Returns how far each mode's ratio is drawn, with its interval."""
    return table["ratio"] + error_bars(table, "ratio")[1]


def _simulated_look(mode: str, same_batch: bool) -> dict:
    """Returns dashes, markers and widths that tell apart curves on top of each other."""
    if mode.startswith("packed"):
        marker = "x" if mode.endswith("first") else "+"
        return {"linestyle": ":", "marker": marker, "markersize": 5}
    if mode == STATIC:
        return {"linewidth": 3.4, "markersize": 6}
    return {} if same_batch else {"linestyle": (0, (4, 2)), "marker": "s"}


def _plain_log_ticks(axes: Axes, highest: float) -> None:
    ticks = [
        tick for tick in (1, 1.2, 1.5, 2, 3, 5, 7, 10, 15, 20, 30, 50) if tick <= 1.3 * highest
    ]
    axes.set_yticks(ticks)
    axes.yaxis.set_major_formatter(PLAIN)
    axes.yaxis.set_minor_locator(NullLocator())


def _ranks_axis(axes: Axes, sizes: Sequence[float]) -> None:
    named = [sizes[-1]]
    for size in reversed(sizes):
        if size <= named[-1] / 4:  # closer together, the numbers would touch
            named.append(size)
    doubling_axis(axes, "ranks", FixedLocator(named), THOUSANDS)
