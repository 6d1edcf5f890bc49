"""The figures of throughput and of what each option buys."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from common.analysis.one_device.options import ALL, OptionsRun
from common.analysis.one_device.throughput import ThroughputRun
from common.analysis.style import (
    BLACK,
    BLUE,
    GREY,
    MEASURED,
    ORANGE,
    RED,
    THOUSANDS,
    doubling_axis,
    figure,
    level,
)
from common.analysis.sweep_speedups import DRAWN, error_bars

WIDE_TICKS = (0.125, 0.25, 0.5, 1, 2, 4, 8, 16)
NARROW_TICKS = (0.5, 0.6, 0.7, 0.8, 0.9, 1, 1.1, 1.25, 1.5, 1.75, 2, 2.5, 3, 4)


def batch_sweep(run: ThroughputRun) -> Figure:
    """Draws tokens per second by batch size: measured points, and the fitted line."""
    with figure(run.opened.caption) as (fig, axes):
        table = run.measured
        low, middle, high = (table[f"tokens_per_s{q}"] for q in ("_q25", "", "_q75"))
        # The mean over visits may lie outside of the quartiles of all their steps.
        bars = np.maximum(0, [middle - low, high - middle])
        label = "measured (mean over visits; quartiles of steps)"
        axes.errorbar(table["batch_size"], middle, yerr=bars, label=label, **MEASURED)
        _saturation_line(axes, run)
        _points_that_ended(axes, run)
        sizes = run.batches["batch_size"]
        doubling_axis(axes, "batch size (sequences per step)", FixedLocator(sizes))
        axes.set_xlim(sizes.min() / 1.3, sizes.max() * 1.3)
        axes.set(ylabel="throughput (tokens/s)", ylim=(0, 1.25 * np.fmax(middle, high).max()))
        axes.yaxis.set_major_formatter(THOUSANDS)
        axes.legend(loc="lower right", fontsize=8)
    return fig


def option_bars(run: OptionsRun) -> Figure:
    """Draws what each option buys: alone against the baseline, and on top of all the others."""
    measured, company = run.measured, run.company
    singles = list(run.alone.index)
    only_there = [name for name in company.index if name not in singles]
    rows = [*singles, *only_there, *([ALL] if ALL in measured.index else [])]
    control = run.control
    with figure(run.opened.caption, figsize=(7.2, 1.3 + 0.36 * len(rows))) as (fig, axes):
        if control.verdict in DRAWN:
            ends, twice = control.interval, "the baseline measured twice"
            axes.axvspan(ends.low, ends.high, color=GREY, alpha=0.3, linewidth=0, label=twice)
        axes.axvline(1, color=BLACK, linewidth=0.8)
        places = pd.Series(range(len(rows), 0, -1), index=rows)
        alone = measured.loc[[name for name in rows if name in measured.index]]
        paired = set(company.index)
        _bars(axes, alone, places, BLUE, 0.18, paired, "alone, over the baseline")
        if paired:
            _bars(axes, company, places, ORANGE, -0.18, paired, "last, on top of all others")
        axes.set_yticks(places, rows)
        axes.set_ylim(0.4, len(rows) + 0.6)
        axes.grid(axis="y", visible=False)
        _ratio_axis(axes)
        axes.set_xlabel("tokens/s, as a ratio (mean of the rounds, 95 % interval where it is told)")
        fig.legend(fontsize=8, loc="outside upper center", ncols=3)
    return fig


def _bars(
    axes: Axes,
    table: pd.DataFrame,
    places: pd.Series,
    colour: str,
    shift: float,
    shifted: set[str],
    label: str,
) -> None:
    """Draws bars that start at 1: to the right what is faster, to the left what is slower.

    Those of the rows ``shifted`` are moved by ``shift``, to leave room for another.
    """
    at = places[table.index] + shift * table.index.isin(shifted)
    ratio, errors = table["ratio"], error_bars(table, "ratio")
    axes.barh(
        at,
        ratio - 1,
        left=1,
        height=0.34,
        color=colour,
        xerr=np.where(errors > 0, errors, np.nan),  # or caps look like a small interval
        error_kw={"elinewidth": 1, "capsize": 2, "ecolor": BLACK},
        label=label,
    )
    for name, end in (ratio + errors[1]).items():
        axes.text(np.fmax(end, 1), at[name], f"  {ratio[name]:.2f}", va="center", fontsize=7.5)


def _ratio_axis(axes: Axes) -> None:
    """Makes the axis logarithmic, as gains multiply: 2 is as far from 1 as one half."""
    axes.set_xscale("log")
    low, high = axes.get_xlim()
    axes.set_xlim(low / 1.03, high * 1.12)  # room for the numbers
    ticks = WIDE_TICKS if high / low > 4 else NARROW_TICKS
    axes.set_xticks([tick for tick in ticks if low <= tick <= high * 1.1])
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}×"))
    axes.xaxis.set_minor_locator(NullLocator())


def _saturation_line(axes: Axes, run: ThroughputRun) -> None:
    line = run.saturation
    if line is None:
        return
    fixed_ms, sequence_ms = line.fixed_s * 1e3, line.per_sequence_s * 1e3
    ceiling = run.ceiling_tokens_per_s
    batch = np.geomspace(run.batches["batch_size"].min(), run.batches["batch_size"].max(), 200)
    label = f"a step takes {fixed_ms:.3g} ms and {sequence_ms:.3g} ms per sequence"
    rates = run.tokens_per_sequence * batch / line.step_s(batch)
    axes.plot(batch, rates, color=BLUE, label=label)
    text = f"ceiling, without the fixed part: {ceiling:,.0f} tokens/s"
    level(axes, ceiling, text, is_left=True)


def _points_that_ended(axes: Axes, run: ThroughputRun) -> None:
    """Marks the batch sizes without a result, at the bottom."""
    if run.ended.empty:
        return
    look = {"color": RED, "markersize": 9, "mew": 2, "clip_on": False, "zorder": 5}
    label = " or ".join(sorted(set(run.ended["status"])))
    axes.plot(run.ended["batch_size"], np.zeros(len(run.ended)), "x", label=label, **look)
