"""Figures that set one network beside another."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.figure import Figure

from common.analysis.emulated import NetworkRun
from common.analysis.plots import BLACK, BLUE, cap_axis, figure, step_line


def bucket_times_by_network(runs: Sequence[NetworkRun]) -> Figure:
    """T(b) on each network: predicted as a line, measured as points with quartiles."""
    captions = dict.fromkeys(run.caption for run in runs)
    caption = "\n".join(captions)
    shape = {"ncols": len(runs), "sharey": True, "squeeze": False}
    with figure(caption, figsize=(7.2, 3.4 + 0.12 * len(captions)), **shape) as (fig, grid):
        for axes, run in zip(grid[0], runs, strict=True):
            best = run.best()
            step_line(axes, best, "predicted", BLUE, 2.0)
            axes.plot(
                *(best.cap_mib, best.total_s * 1e3, "*"),
                **{"markersize": 13, "color": BLUE, "label": "predicted b*", "zorder": 5},
            )
            table = run.sweep.summary().dropna(subset="bucket_cap_mib")
            bars = [table["median_ms"] - table["q25_ms"], table["q75_ms"] - table["median_ms"]]
            axes.errorbar(
                *(table["bucket_cap_mib"], table["median_ms"]),
                **{"yerr": bars, "fmt": "o", "color": BLACK, "markersize": 4, "capsize": 2},
                **{"lw": 1, "zorder": 4, "label": "measured"},
            )
            low, high = table["bucket_cap_mib"].min(), table["bucket_cap_mib"].max()
            axes.set_xlim(low / 1.5, high * 1.5)
            cap_axis(axes, "bucket cap b (MiB)")
            axes.set_title(run.name, fontsize=9)
        grid[0, 0].set_ylim(bottom=0)
        grid[0, 0].set_ylabel("backward pass T(b) (ms)")
        handles, labels = grid[0, 0].get_legend_handles_labels()
        fig.legend(handles, labels, loc="outside upper center", ncols=3, fontsize=8)
    return fig
