"""The figure of a recommendation: step times by cap, as predicted and as real steps took."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from common.analysis.style import BLACK, BLUE, GREY, ORANGE, SMALLEST_CAP_MIB, cap_axis, figure
from common.runtime.records.run_directory import read_environment
from common.tuning.results.recommendation import Recommendation, Verified


def plot_recommendation(advice: Recommendation) -> Figure:
    """Draws step time by bucket cap: predicted as a line, measured as points with intervals."""
    run = [
        candidate for candidate in advice.candidates if candidate.gain and candidate.setting.cap_mib
    ]
    smallest = min([SMALLEST_CAP_MIB, *(candidate.setting.cap_mib / 2 for candidate in run)])
    predicted = pd.read_csv(Path(advice.run_dir) / "predictions.csv")
    predicted = predicted[predicted["high_mib"] > smallest]
    with figure(caption(advice), figsize=(7.2, 3.9)) as (fig, axes):
        lows = predicted["low_mib"].clip(lower=smallest)
        axes.stairs(
            values=predicted["step_time_ms"],
            edges=[*lows, predicted["high_mib"].iloc[-1]],
            baseline=None,
            color=BLUE,
            linewidth=1.8,
            label="predicted",
        )
        default_ms = advice.default.measured_step_s * 1e3
        axes.axhline(default_ms, color=GREY, linestyle="--", label="DDP's default, measured")
        plain = [candidate for candidate in run if not _has_option(candidate)]
        _points(axes, plain, default_ms, "measured", "o", BLACK)
        optional = [candidate for candidate in run if _has_option(candidate)]
        _points(axes, optional, default_ms, "measured, with an option", "s", ORANGE)
        cap_axis(axes, "bucket cap (MiB)")
        axes.set_ylim(bottom=0)
        axes.set_ylabel("step: forward and backward pass (ms)")
        fig.legend(loc="outside upper center", ncols=4, fontsize=8)
    return fig


def caption(advice: Recommendation) -> str:
    """Returns the caption: model, hardware and date, and how to read the figure."""
    date = str(read_environment(Path(advice.run_dir)).get("start_time", ""))[:10]
    return (
        f"{advice.model} on {advice.hardware}, {date}; dashed: median over DDP instances; points: "
        "that, less what each setting saved in the same rounds, with its interval (of 95 % from "
        "six rounds on). Source: ddplab tune"
    )


def _has_option(candidate: Verified) -> bool:
    return candidate.setting.bucket_view or candidate.setting.first_mib is not None


def _points(
    axes: Axes, run: Sequence[Verified], default_ms: float, label: str, marker: str, colour: str
) -> None:
    """Draws the default's time less the share that each candidate saved, with its interval."""
    if not run:
        return
    saved = np.array(
        [(candidate.gain.estimate, candidate.gain.low, candidate.gain.high) for candidate in run]
    )
    middle, slowest, fastest = default_ms * (1 - saved.T)
    axes.errorbar(
        x=[candidate.setting.cap_mib for candidate in run],
        y=middle,
        yerr=[middle - fastest, slowest - middle],
        fmt=marker,
        color=colour,
        label=label,
        markersize=5,
        capsize=2,
        linewidth=1,
        zorder=4,
    )
