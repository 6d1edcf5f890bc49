"""Figures that set one network beside another."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.figure import Figure

from common.analysis.buckets.figures import (
    cap_limits,
    default_line,
    measured_points,
    predicted_stars,
    step_line,
)
from common.analysis.buckets.networks import NetworkRun
from common.analysis.style import BLUE, cap_axis, figure


def bucket_times_by_network(runs: Sequence[NetworkRun]) -> Figure:
    """Draws T(b) on each network: predicted as a line, measured as points with quartiles."""
    captions = dict.fromkeys(run.caption for run in runs)
    shape = {"ncols": len(runs), "sharey": True, "squeeze": False}
    size = (7.2, 3.6 + 0.12 * len(captions))
    with figure("\n".join(captions), figsize=size, **shape) as (fig, grid):
        named: dict = {}
        for axes, run in zip(grid[0], runs, strict=True):
            best = run.model.best_cap()
            step_line(axes, best, "predicted", BLUE, 2.0)
            measured_points(axes, run.sweep, "backward_time_ms", "measured (median, quartiles)")
            default_line(axes, run.sweep)
            chosen = predicted_stars(axes, best, run.sweep, caps_named=False)
            axes.set_xlim(*cap_limits(run.sweep, chosen, 1.5))
            cap_axis(axes, "bucket cap b (MiB)")
            axes.set_title(run.name, fontsize=9)
            handles, labels = axes.get_legend_handles_labels()
            named |= dict(zip(labels, handles, strict=True))
        grid[0, 0].set_ylim(bottom=0)
        grid[0, 0].set_ylabel("backward pass T(b) (ms)")
        fig.legend(named.values(), named.keys(), loc="outside upper center", ncols=2, fontsize=8)
    return fig
