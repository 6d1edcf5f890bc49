"""T(b) over the bucket cap, predicted as a line and measured as points."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from common.analysis.buckets.networks import NetworkRun
from common.analysis.buckets.sweep import DEFAULT_NAME, BucketSweep, predicted_fastest_cap
from common.analysis.style import (
    BLACK,
    BLUE,
    GREEN,
    GREY,
    MEASURED,
    ORANGE,
    RED,
    SMALLEST_CAP_MIB,
    cap_axis,
    figure,
    legend_above,
    level,
)
from common.perfmodel.ddp.best_cap import BestCap


def bucket_times(
    best: BestCap,
    caption: str,
    *,
    compared: Mapping[str, BestCap] | None = None,
    sweep: BucketSweep | None = None,
    measured_best_mib: float | None = None,
    floor_ms: float | None = None,
) -> Figure:
    """Draws T(b): predicted as a line, measured as points with quartiles, predicted b* marked.

    Caps that gave the same buckets are one point, at the smallest, with a line to the largest.
    DDP's default is a line across, where it was measured.
    """
    with figure(caption) as (fig, axes):
        step_line(axes, best, "predicted", BLUE, 2.2)
        for (name, other), colour in zip((compared or {}).items(), (GREY, ORANGE), strict=False):
            step_line(axes, other, name, colour, 1.2)
        if sweep is None:
            star(axes, best, best.cap_mib, f"predicted b* = {best.cap_mib:.3g} MiB")
        else:
            table = measured_points(axes, sweep, "measured (median, quartiles)")
            default_line(axes, sweep)
            chosen = predicted_stars(axes, best, sweep)
            axes.set_xlim(*cap_limits(sweep, chosen, 1.3))
            if measured_best_mib is not None:
                row = table[table["bucket_cap_mib"] == measured_best_mib].iloc[0]
                ring(axes, row, f"measured best, {measured_best_mib:g} MiB")
        if floor_ms is not None:
            level(axes, floor_ms, "computation alone")
        cap_axis(axes, "bucket cap b (MiB)")
        axes.set_ylabel("backward pass T(b) (ms)")
        fig.legend(loc="outside upper center", ncols=2, fontsize=8)
    return fig


def bucket_times_by_network(runs: Sequence[NetworkRun]) -> Figure:
    """Draws T(b) on each network: predicted as a line, measured as points with quartiles."""
    captions = dict.fromkeys(run.caption for run in runs)
    shape = {"ncols": len(runs), "sharey": True, "squeeze": False}
    size = (7.2, 3.6 + 0.12 * len(captions))
    with figure("\n".join(captions), figsize=size, **shape) as (fig, grid):
        for axes, run in zip(grid[0], runs, strict=True):
            best = run.model.best_cap()
            step_line(axes, best, "predicted", BLUE, 2.0)
            measured_points(axes, run.sweep, "measured (median, quartiles)")
            default_line(axes, run.sweep)
            chosen = predicted_stars(axes, best, run.sweep, caps_named=False)
            axes.set_xlim(*cap_limits(run.sweep, chosen, 1.5))
            cap_axis(axes, "bucket cap b (MiB)")
            axes.set_title(run.name, fontsize=9)
        grid[0, 0].set_ylim(bottom=0)
        grid[0, 0].set_ylabel("backward pass T(b) (ms)")
        legend_above(fig, 2)
    return fig


def measured_points(
    axes: Axes, sweep: BucketSweep, label: str, *, colour: str = BLACK
) -> pd.DataFrame:
    """Draws medians with quartiles of the distinct bucketings of a sweep; returns their summary.

    A line leads from the smallest cap, where the point is, to the largest with the same buckets.
    """
    table = sweep.distinct().summary()
    bars = [table["median_ms"] - table["q25_ms"], table["q75_ms"] - table["median_ms"]]
    caps, look = table["bucket_cap_mib"], MEASURED | {"color": colour}
    axes.errorbar(caps, table["median_ms"], yerr=bars, label=label, **look)
    widths = sweep.widths()
    ends = [widths[cap] for cap in caps]
    axes.hlines(table["median_ms"], caps, ends, color=colour, lw=1, zorder=4)
    return table


def default_line(axes: Axes, sweep: BucketSweep) -> None:
    """Draws the measured median of DDP's default as a line across, where there is one.

    The default is no cap: its first bucket has 1 MiB, and others have 25.
    """
    measured = sweep.default()
    if measured is not None:
        time_ms = measured["median_ms"]
        axes.axhline(
            time_ms, color=GREEN, linestyle="-.", linewidth=1.4, label=f"measured, {DEFAULT_NAME}"
        )


def predicted_stars(
    axes: Axes, best: BestCap, sweep: BucketSweep, *, caps_named: bool = True
) -> tuple[float, ...]:
    """Draws a star at the measured cap that is predicted to be fastest, whose regret is known.

    Where b* is predicted to be faster than all that were measured, an open star there. Returns the
    starred caps; ``caps_named`` puts them into the legend.
    """
    caps = sweep.distinct().measured_s()
    chosen = predicted_fastest_cap({cap: best.predicted_s(cap) for cap in caps}, caps)
    name = f", {chosen:g} MiB" if caps_named else ""
    star(axes, best, chosen, f"predicted best of the measured caps{name}")
    if best.matched_by(caps):
        return (chosen,)
    name = f", {best.cap_mib:.3g} MiB" if caps_named else ""
    star(axes, best, best.cap_mib, f"predicted best of all caps, not measured{name}", face="none")
    return chosen, best.cap_mib


def star(
    axes: Axes, best: BestCap, cap_mib: float, label: str, *, face: str = BLUE, size: float = 14
) -> None:
    """Draws a star at a cap, on the predicted line."""
    axes.plot(
        cap_mib,
        best.predicted_s(cap_mib) * 1e3,
        marker="*",
        markersize=size,
        color=BLUE,
        markerfacecolor=face,
        linestyle="none",
        label=label,
        zorder=5,
    )


def ring(axes: Axes, row: pd.Series, label: str, *, size: float = 13) -> None:
    """Draws a ring around a point of ``measured_points``, a row of what that returned."""
    axes.plot(
        row["bucket_cap_mib"],
        row["median_ms"],
        "o",
        markersize=size,
        mew=1.8,
        mfc="none",
        mec=RED,
        zorder=6,
        label=label,
    )


def cap_limits(sweep: BucketSweep, marked: Sequence[float], margin: float) -> tuple[float, float]:
    """Computes the limits of an axis that shows every measured and every marked cap, in MiB."""
    caps = [*sweep.measured_s(), *(max(cap, SMALLEST_CAP_MIB) for cap in marked)]
    return min(caps) / margin, max(caps) * margin


def step_line(axes: Axes, best: BestCap, label: str, colour: str, width: float) -> None:
    """Draws T in steps: it is constant between two caps that give the same buckets."""
    drawn = [candidate for candidate in best.candidates if candidate.high_mib > SMALLEST_CAP_MIB]
    lows = [max(candidate.low_mib, SMALLEST_CAP_MIB) for candidate in drawn]
    highs = [candidate.high_mib for candidate in drawn]
    highs[-1] *= 4  # any larger cap puts everything in one bucket, too
    x = np.column_stack([lows, highs]).ravel()
    y = np.repeat([candidate.total_s * 1e3 for candidate in drawn], 2)
    axes.plot(x, y, label=label, color=colour, linewidth=width)
