"""The figures of training runs on micro-batches: losses, step times, imbalance, a timeline.

Each takes the runs by name, restricted to the steps that they are compared on, and a caption.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from common.analysis.data_parallel.training_figures import DASHES, LEAST_NATS
from common.analysis.micro_batches.training_runs import MicroBatchRun
from common.analysis.style import (
    BLACK,
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
    RED,
    SKY,
    figure,
    legend_above,
)

COLOURS = {
    "static": BLACK,
    "dynamic": BLUE,
    "dynamic_tokens_sq": SKY,
    "dynamic_calibrated": GREEN,
    "karmarkar_karp": ORANGE,
    "length_grouped": PURPLE,
    "token_budget": RED,
    "control": GREY,
    "packed_largest_first": GREY,
    "packed_karmarkar_karp": GREY,
}
"""One colour per mode, in every figure."""
PARTS = {
    "held up by planning": ("planning_time_ms", PURPLE),
    "computing": ("compute_time_ms", SKY),
    "waiting for a slower rank": ("waiting_time_ms", ORANGE),
    "communication left": ("communication_time_ms", GREEN),
    "the rest (optimizer, Python)": ("rest_ms", "#d0d0d0"),
}
"""The parts of a rank's step, in the order in which they are drawn."""
TIMELINE_STEPS, TIMELINE_RANKS = 10, 8
SMOOTH_FROM, WINDOWS = 60, 20
"""Number of steps from which a moving mean is drawn on top, and of its windows in all steps."""
Runs = Mapping[str, MicroBatchRun]


def loss_curves(runs: Runs, caption: str) -> Figure:
    """Draws the losses of static and dynamic on top of each other, and their difference."""
    (name, first), *later = runs.items()
    with figure(caption, figsize=(7.2, 4.4), nrows=2, sharex=True, height_ratios=(2, 1)) as (
        fig,
        (above, below),
    ):
        above.plot(
            first.loss.index, first.loss, label=name, color=COLOURS[first.mode], linewidth=3.2
        )
        for index, (other, run) in enumerate(later, 1):
            look = {"color": COLOURS[run.mode], "linestyle": DASHES[index % len(DASHES)]}
            above.plot(run.loss.index, run.loss, label=other, **look)
            away = (run.loss - first.loss).abs().dropna().clip(lower=LEAST_NATS)
            below.plot(away.index, away, marker="o", markersize=2, linewidth=0.9, **look)
        above.set_ylabel("loss (nats per text)")
        above.legend()
        below.set(yscale="log", ylim=(LEAST_NATS / 2, max(1e-6, 2 * below.get_ylim()[1])))
        below.text(0.01, 0.04, "lowest: equal", transform=below.transAxes, fontsize=8, color=GREY)
        below.set(ylabel=f"|difference to\n{name}| (nats)", xlabel="step")
        below.xaxis.set_major_locator(MaxNLocator(integer=True))
    return fig


def max_step_time(runs: Runs, caption: str) -> Figure:
    """Draws the slowest rank's time by step, and its mean."""
    with figure(caption) as (fig, axes):
        for name, run in runs.items():
            colour = colour_of(run, runs)
            _by_step(axes, run.slowest, name, colour)
            axes.axhline(run.slowest.mean(), color=colour, linestyle="--", linewidth=1)
        _step_axis(axes, "step of the slowest rank (ms)")
        axes.set_title("each step's slowest rank; dashed: mean", loc="left", fontsize=9)
        legend_above(fig, 3)
    return fig


def std_step_time(runs: Runs, caption: str) -> Figure:
    """Draws the standard deviation over ranks of whole steps, beside that of computation."""
    panels = {
        "step_time_ms": "whole step: under DDP ranks wait\nfor each other in it",
        "compute_time_ms": "computation alone: what each rank\nhad to do before it could wait",
    }
    with figure(caption, figsize=(7.2, 3.6), ncols=2, sharey=True) as (fig, grid):
        for axes, (column, title) in zip(grid, panels.items(), strict=True):
            for name, run in runs.items():
                _by_step(axes, run.over_ranks(column), name, colour_of(run, runs))
            axes.set_title(title, loc="left", fontsize=9)
            _step_axis(axes, "")
        grid[0].set_ylim(bottom=0)
        grid[0].set_ylabel("standard deviation over ranks (ms)")
        legend_above(fig, 3)
    return fig


def spread(runs: Runs, caption: str, *, column: str, label: str) -> Figure:
    """Draws the standard deviation over ranks of a column, by step."""
    with figure(caption) as (fig, axes):
        for name, run in runs.items():
            values = run.over_ranks(column).dropna()
            if not values.empty:
                _by_step(axes, values, name, colour_of(run, runs))
        _step_axis(axes, label)
        if axes.lines:
            legend_above(fig, 3)
        else:
            axes.text(
                0.5, 0.5, "not measured here", color=GREY, ha="center", transform=axes.transAxes
            )
    return fig


def step_time_distribution(runs: Runs, caption: str) -> Figure:
    """Draws the slowest rank's times as a histogram, and the share of steps below each time."""
    times = [run.slowest for run in runs.values()]
    low, high = min(map(min, times)), max(np.percentile(of_run, 99.5) for of_run in times)
    bins = int(np.clip(len(times[0]) / 3, 8, 32))
    edges = np.linspace(low, max(high, low * 1.01), bins + 1)
    with figure(caption, figsize=(7.2, 3.6), ncols=2) as (fig, (left, right)):
        for name, run in runs.items():
            colour, ordered = colour_of(run, runs), run.slowest.sort_values()
            left.hist(
                ordered.clip(upper=edges[-1]),
                bins=edges,
                label=name,
                color=colour,
                histtype="stepfilled",
                alpha=0.45,
            )
            share = np.arange(1, len(ordered) + 1) / len(ordered) * 100
            right.step(ordered, share, where="post", color=colour)
            p95 = ordered.quantile(0.95)
            right.plot([p95], [95], "o", color=colour, markersize=5)
        left.set_ylabel("steps")
        left.set_xlabel("step of the slowest rank (ms);\nthe last bin holds all above")
        right.axhline(95, color=GREY, linestyle=":", linewidth=1)
        right.set_yticks([0, 25, 50, 75, 95])
        right.set(ylabel="steps at most as long (%)", xlabel="step of the slowest rank (ms)")
        right.set_xlim(left.get_xlim())
        legend_above(fig, 3)
    return fig


def timeline(runs: Runs, caption: str) -> Figure:
    """Draws ranks working and waiting over some steps, the runs stacked on one time axis."""
    ranks = min(TIMELINE_RANKS, *(run.ranks for run in runs.values()))
    height = 1.5 + len(runs) * (0.55 + 0.3 * ranks)
    with figure(caption, figsize=(7.2, height), nrows=len(runs), sharex=True, squeeze=False) as (
        fig,
        grid,
    ):
        for axes, (name, run) in zip(grid[:, 0], runs.items(), strict=True):
            steps, end = _draw_steps(axes, run, ranks)
            only = "" if ranks == run.ranks else f", {ranks} of {run.ranks} ranks"
            title = f"{name}: steps {steps[0]} to {steps[-1]}{only}, {end:,.0f} ms"
            axes.set_yticks(range(ranks), [f"rank {rank}" for rank in range(ranks)][::-1])
            axes.set_ylim(-0.6, ranks - 0.4)
            axes.grid(axis="y", visible=False)
            axes.set_title(title, loc="left", fontsize=9)
        grid[-1, 0].set_xlabel("time (ms)")
        grid[-1, 0].set_xlim(left=0)
        legend_above(fig, 3)
    return fig


FIGURES = {
    "max_step_time": max_step_time,
    "std_step_time": std_step_time,
    "std_padded_tokens": partial(
        spread, column="padded_tokens", label="padded tokens: std over ranks (tokens)"
    ),
    "std_peak_mem_mb": partial(
        spread, column="peak_mem_mb", label="peak memory: std over ranks (MB)"
    ),
    "step_time_distribution": step_time_distribution,
    "timeline": timeline,
}
"""The figures that ``analyze_metrics.py`` writes, by file name."""


def colour_of(run: MicroBatchRun, runs: Runs) -> str:
    """Returns the colour of a run's mode; the second of two runs of one mode has another one."""
    first = next(other for other in runs.values() if other.mode == run.mode)
    return COLOURS.get(run.mode, BLUE) if run is first else RED


def _draw_steps(axes: Axes, run: MicroBatchRun, ranks: int) -> tuple[list[int], float]:
    """Draws the steps in the middle of a run; returns their numbers, and their total in ms."""
    first = max(0, (len(run.slowest) - TIMELINE_STEPS) // 2)
    times = run.slowest.iloc[first : first + TIMELINE_STEPS]
    starts = (times.cumsum() - times).rename("start_ms")
    rows = run.measured[run.measured["step"].isin(times.index) & (run.measured["rank"] < ranks)]
    rows = rows.join(starts, on="step")
    parts_ms = sum(rows[column] for column, _ in PARTS.values() if column in rows)
    rows = rows.assign(rest_ms=(rows["step_time_ms"] - parts_ms).clip(lower=0))
    starts_ms, places = rows["start_ms"].to_numpy(), ranks - 1 - rows["rank"].to_numpy()
    for label, (column, colour) in PARTS.items():
        width = rows[column].to_numpy()
        axes.barh(places, width, left=starts_ms, height=0.72, color=colour, label=label)
        starts_ms = starts_ms + width
    for start in [*starts, times.sum()]:
        axes.axvline(start, color=BLACK, linewidth=0.5, zorder=3)
    return times.index.tolist(), float(times.sum())


def _by_step(axes: Axes, values: pd.Series, name: str, colour: str) -> None:
    """Draws a line over steps; where there are many, thin and with its moving mean on top."""
    if len(values) < SMOOTH_FROM:
        axes.plot(values.index, values, color=colour, linewidth=1.3, label=name)
        return
    axes.plot(values.index, values, color=colour, linewidth=0.6, alpha=0.35)
    window = max(5, len(values) // WINDOWS) | 1
    smooth = values.rolling(window, center=True, min_periods=1).mean()
    axes.plot(smooth.index, smooth, color=colour, label=f"{name} (mean of {window} steps)")


def _step_axis(axes: Axes, label: str) -> None:
    axes.set_xlabel("step")
    if label:
        axes.set_ylabel(label)
        axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
