"""The figure of a recommendation: what was predicted by cap, and what real steps took."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from common.analysis.plots import BLACK, BLUE, GREY, ORANGE, cap_axis, figure
from common.runtime.run_directory import read_environment
from common.tuning.recommendation import Recommendation, Verified
from common.tuning.step_times import all_instance_times

SMALLEST_MIB = 1 / 64


def plot_recommendation(found: Recommendation) -> Figure:
    """Step time over the bucket cap: predicted as a line, measured as points with quartiles."""
    folder = Path(found.run_dir)
    predicted = pd.read_csv(folder / "predictions.csv")
    times_ms = all_instance_times(pd.read_csv(folder / "visits.csv")) * 1e3
    with figure(caption(found), figsize=(7.2, 3.9)) as (fig, axes):
        edges = np.maximum([*predicted["low_mib"], predicted["high_mib"].iloc[-1]], SMALLEST_MIB)
        axes.stairs(
            *(predicted["step_time_ms"], edges),
            **{"baseline": None, "color": BLUE, "linewidth": 1.8, "label": "predicted"},
        )
        default = times_ms[found.default.setting.label].dropna()
        low, middle, high = default.quantile([0.25, 0.5, 0.75])
        axes.axhspan(low, high, color=GREY, alpha=0.2, linewidth=0)
        axes.axhline(middle, color=GREY, linestyle="--", label="DDP's default, measured")
        _points(axes, found, times_ms, options=False)
        _points(axes, found, times_ms, options=True)
        cap_axis(axes, "bucket cap (MiB)")
        axes.set_ylim(bottom=0)
        axes.set_ylabel("step: forward and backward pass (ms)")
        fig.legend(loc="outside upper center", ncols=4, fontsize=8)
    return fig


def caption(found: Recommendation) -> str:
    """What was measured where and when."""
    date = str(read_environment(Path(found.run_dir)).get("start_time", ""))[:10]
    return (
        f"{found.model} on {found.hardware}, {date}; points: median of DDP instances with "
        "quartiles; dashed: the default with its quartiles. Source: ddplab tune"
    )


def _points(axes, found: Recommendation, times_ms: pd.DataFrame, options: bool) -> None:
    """The candidates that were run: plain caps, or those with an option besides."""

    def has_option(each: Verified) -> bool:
        return each.setting.bucket_view or each.setting.first_mib is not None

    run = [c for c in found.candidates if c.setting.label in times_ms and has_option(c) == options]
    if not run:
        return
    quartiles = times_ms[[each.setting.label for each in run]].quantile([0.25, 0.5, 0.75])
    low, middle, high = quartiles.to_numpy()
    axes.errorbar(
        *([each.setting.cap_mib for each in run], middle),
        yerr=[middle - low, high - middle],
        fmt="s" if options else "o",
        color=ORANGE if options else BLACK,
        **{"markersize": 5, "capsize": 2, "linewidth": 1, "zorder": 4 + options},
        label="measured, with an option" if options else "measured",
    )
