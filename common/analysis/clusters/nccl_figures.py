"""The figure of ``nccl_accuracy``: three published tables, predicted, and the held-out errors."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from common.analysis.clusters.nccl_accuracy import (
    ALPHA_BETA,
    ANALYTIC,
    FITTED,
    INTERPOLATED,
    MIB,
    PublishedAllReduce,
    curves,
    predictions,
    published_all_reduces,
)
from common.analysis.style import (
    BLACK,
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    SKY,
    band,
    byte_axis,
    figure,
    legend_above,
    log_axis,
)
from common.perfmodel.collectives import algorithm_bandwidth

STYLES = {
    FITTED: {"color": BLUE, "marker": "o", "markersize": 5, "zorder": 4},
    INTERPOLATED: {"color": GREY, "marker": "s", "markersize": 4, "zorder": 3},
    ALPHA_BETA: {"color": ORANGE, "marker": "^", "markersize": 4.5, "zorder": 2},
}
LINES = {
    FITTED: {"color": BLUE, "zorder": 4},
    ANALYTIC: {"color": GREEN, "linestyle": "--", "zorder": 3},
    ALPHA_BETA: {"color": ORANGE, "linewidth": 1.2},
}
SHOWN_ERROR = 30
"""Larger errors are drawn at the edge, in per cent."""
ROOM = 1.1


def plot_nccl_accuracy() -> Figure:
    """Draws bandwidth by size, measured and by each model; below, errors at held-out sizes."""
    tables = published_all_reduces()
    held_out = predictions()
    captions = dict.fromkeys(table.caption for table in tables)
    caption = " | ".join(captions) + ". Lines above are fitted to all points; below, each size is "
    caption += f"predicted by fits that have not seen it (beyond ±{SHOWN_ERROR} %: at the edge)."
    with figure(caption, figsize=(10.4, 6.0), nrows=2, ncols=len(tables)) as (fig, grid):
        for (above, below), table in zip(grid.T, tables, strict=True):
            _bandwidths(above, table)
            _errors(below, table, held_out[held_out["table"] == table.name])
        grid[0, 0].set_ylabel("algorithm bandwidth (GB/s)")
        grid[1, 0].set_ylabel("predicted against measured (%)")
        legend_above(fig, 6, 8.5)
    return fig


def _bandwidths(axes: Axes, table: PublishedAllReduce) -> None:
    sizes, times = table.curve.sizes_bytes, table.curve.times_s
    measured = algorithm_bandwidth(sizes, times) / 1e9
    bars = {}
    if table.std_s is not None:
        low = measured - algorithm_bandwidth(sizes, times + table.std_s) / 1e9
        high = algorithm_bandwidth(sizes, np.maximum(times - table.std_s, times / 9)) / 1e9
        bars = {"yerr": [low, high - measured], "capsize": 2, "lw": 1}
    marks = {"fmt": "o", "markersize": 3.5, "color": BLACK, "zorder": 5, "label": "measured"}
    axes.errorbar(sizes, measured, **marks, **bars)
    fitted = curves()
    for model, style in LINES.items():
        line = fitted[(fitted["table"] == table.name) & (fitted["model"] == model)]
        bandwidth = algorithm_bandwidth(line["size_bytes"], line["time_s"]) / 1e9
        axes.plot(line["size_bytes"], bandwidth, label=model, **style)
    log_axis(axes)
    axes.set_xlim(left=max(sizes[0], 2**14))
    visible = measured[sizes >= 2**14]
    axes.set_ylim(visible.min() / 2, visible.max() * 2)
    axes.set_title(table.title, loc="left", fontsize=9.5)
    byte_axis(axes)


def _errors(axes: Axes, table: PublishedAllReduce, held_out: pd.DataFrame) -> None:
    large = held_out[held_out["size_bytes"] > MIB]
    if table.std_s is not None:
        fitted = large[large["model"] == FITTED]
        std = (fitted["std_s"] / fitted["measured_s"] * 100).clip(upper=SHOWN_ERROR * ROOM)
        look = {"alpha": 0.3, "label": "one standard deviation"}
        band(axes, fitted["size_bytes"], -std, std, SKY, **look)
    for model, style in STYLES.items():
        rows = large[large["model"] == model].sort_values("size_bytes")
        error = (rows["predicted_s"] / rows["measured_s"] - 1) * 100
        drawn = error.clip(-SHOWN_ERROR, SHOWN_ERROR)
        axes.plot(rows["size_bytes"], drawn, linestyle="none", label=f"{model}, held out", **style)
    axes.axhline(0, color=BLACK, linewidth=0.8)
    axes.set_ylim(-SHOWN_ERROR * ROOM, SHOWN_ERROR * ROOM)
    axes.set_xlim(MIB, table.curve.sizes_bytes[-1] * 1.5)
    byte_axis(axes)
