"""The figures of thousands of GPUs: b*, efficiency, a step's parts, the published flat sweep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator

from common.analysis.style import (
    BLACK,
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
    RED,
    SKY,
    band,
    cap_axis,
    doubling_axis,
    figure,
    legend_above,
    log_axis,
)
from common.perfmodel.cluster.published_sweep import SweepExplained
from common.perfmodel.cluster.scale_out import SCALINGS, STRATEGIES, ScaleOut

DEFAULT_CAP_MIB = 25
BEST = {"fmt": "o-", "markersize": 3.5, "lw": 1.2, "capsize": 2, "color": BLUE, "elinewidth": 0.8}
COLOURS = dict(zip(STRATEGIES, (BLUE, ORANGE, RED), strict=True))
DASHES = dict(zip(STRATEGIES, ("-", "--", "-."), strict=True))
PARTS = {
    "computation_s": ("computation", SKY),
    "straggler_s": ("waiting for the slowest GPU", PURPLE),
    "copies_s": ("copies", GREEN),
    "slowed_s": ("computation slowed", ORANGE),
    "exposed_s": ("exposed communication", RED),
}


def predicted_caption(predicted: ScaleOut) -> str:
    """Makes the caption that says what a figure of a prediction is made of."""
    job, cluster = predicted.job, predicted.cluster
    return (
        f"Predicted, not measured: {job.architecture.name}, {job.batch_size} sequences of "
        f"{job.tokens_per_sample} tokens per GPU, {job.precision}, on {cluster.name} "
        f"({cluster.source}). Bands: 5 % to 95 % of {predicted.assumptions.draws} draws of the "
        "assumptions."
    )


def best_caps(predictions: Mapping[str, ScaleOut], scaling: str = "weak") -> Figure:
    """Draws b* over the number of GPUs, a panel per cluster."""
    first = next(iter(predictions.values()))
    tokens = f"sequences of {first.job.tokens_per_sample} tokens"
    batch = {
        "weak": f"{first.job.batch_size} {tokens} per GPU",
        "strong": f"{first.global_batch_size:,} {tokens} on all GPUs",
    }
    caption = (
        f"Predicted, not measured: {first.job.architecture.name}, DDP, {scaling} scaling, "
        f"{batch[scaling]}, {first.job.precision}. "
        "Clusters: data/clusters."
    )
    columns = min(3, len(predictions) + 1)
    shape = {"ncols": columns, "nrows": -(-(len(predictions) + 1) // columns), "sharey": True}
    with figure(caption, figsize=(7.2, 2.4 * shape["nrows"]), squeeze=False, **shape) as (fig, g):
        for axes, (name, predicted) in zip(g.flat, predictions.items(), strict=False):
            rows = predicted.rows(scaling, "DDP").dropna(subset="bucket_cap_mib")
            label = "step within 1 % of it,\nwithout a gap"
            low, high = rows["near_low_mib"], rows["near_high_mib"]
            band(axes, rows["gpus"], low, high, SKY, alpha=0.4, label=label)
            low, high = rows["bucket_cap_low_mib"], rows["bucket_cap_high_mib"]
            middle = rows["bucket_cap_mib"]
            bars = [np.maximum(0, middle - low), np.maximum(0, high - middle)]
            label = "b*, 5 % to 95 % of draws"
            axes.errorbar(rows["gpus"], middle, yerr=bars, label=label, **BEST)
            look = {"color": GREY, "linestyle": "--", "lw": 1, "zorder": 0}
            axes.axhline(DEFAULT_CAP_MIB, label="25 MiB, DDP's cap", **look)
            log_axis(axes)
            _gpu_axis(axes, rows["gpus"].tolist())
            axes.set_title(name, loc="left", fontsize=9)
        for axes in g[:, 0]:
            axes.set_ylabel("bucket cap (MiB)")
        handles, labels = g.flat[0].get_legend_handles_labels()
        for axes in g.flat[len(predictions) :]:
            axes.set_axis_off()
        g.flat[-1].legend(handles, labels, loc="center", fontsize=8)
    return fig


def efficiency(predicted: ScaleOut) -> Figure:
    """Draws efficiency over the number of GPUs: weak and strong, DDP and FSDP."""
    caption = f"{predicted_caption(predicted)} Strong: {predicted.global_batch_size:,} sequences."
    with figure(caption, figsize=(7.2, 3.7), ncols=2, sharey=True) as (fig, panels):
        for axes, scaling in zip(panels, SCALINGS, strict=True):
            for strategy in STRATEGIES:
                rows = predicted.rows(scaling, strategy)
                style = {"color": COLOURS[strategy], "linestyle": DASHES[strategy]}
                low, high = 100 * rows["efficiency_low"], 100 * rows["efficiency_high"]
                band(axes, rows["gpus"], low, high, COLOURS[strategy], alpha=0.15)
                axes.plot(rows["gpus"], 100 * rows["efficiency"], label=strategy, **style)
            _gpu_axis(axes, predicted.rows(scaling, STRATEGIES[0])["gpus"].tolist())
            axes.set_title(f"{scaling} scaling", loc="left", fontsize=9.5)
        panels[0].set(ylim=(0, 102), ylabel="efficiency (% of one GPU)")
        panels[0].legend(fontsize=8, loc="lower left")
    return fig


def step_parts(predicted: ScaleOut, scaling: str = "weak") -> Figure:
    """Draws the parts of each strategy's step, as shares of the step."""
    shape = {"figsize": (7.2, 3.6), "ncols": len(STRATEGIES), "sharey": True}
    with figure(predicted_caption(predicted), **shape) as (fig, panels):
        for axes, strategy in zip(panels, STRATEGIES, strict=True):
            rows = predicted.rows(scaling, strategy)
            places = np.arange(len(rows))
            below = np.zeros(len(rows))
            for column, (label, colour) in PARTS.items():
                share = (100 * rows[column] / rows["step_s"]).to_numpy()
                axes.bar(places, share, bottom=below, color=colour, width=0.85, label=label)
                below += share
            every = max(1, -(-len(rows) // 4))
            axes.set_xticks(places[::every], [_short(n) for n in rows["gpus"][::every]])
            axes.grid(axis="x", visible=False)
            axes.set_xlabel("GPUs")
            axes.set_title(strategy, loc="left", fontsize=9.5)
        panels[0].set(ylim=(0, 100), ylabel="share of the step (%)")
        legend_above(fig, 3)
    return fig


def published_sweeps(sweeps: Sequence[SweepExplained], caption: str) -> Figure:
    """Draws published steps by bucket cap and the prediction, as deviations from the mean step."""
    with figure(caption, figsize=(7.2, 3.3), ncols=len(sweeps), sharey=True, squeeze=False) as (
        fig,
        grid,
    ):
        for axes, sweep in zip(grid[0], sweeps, strict=True):
            table = sweep.table
            mean = table["measured_ms"].mean()
            axes.axhspan(-1, 1, color=GREY, alpha=0.15, linewidth=0, label="±1 %")
            predicted = 100 * (table["predicted_ms"] / mean - 1)
            axes.plot(table["bucket_cap_mib"], predicted, "-", color=BLUE, label="predicted")
            measured = 100 * (table["measured_ms"] / mean - 1)
            axes.plot(table["bucket_cap_mib"], measured, "o", color=BLACK, label="published")
            cap_axis(axes, "bucket cap (MiB)")
            axes.set_ylim(-2.5, 2.5)
            axes.set_title(f"{sweep.model}, mean {mean:,.0f} ms", loc="left", fontsize=9.5)
        grid[0, 0].set_ylabel("step against its mean (%)")
        grid[0, 0].legend(fontsize=8, loc="upper left")
    return fig


def _gpu_axis(axes: Axes, gpus: list[int]) -> None:
    few = len(gpus) <= 5
    ticks = FixedLocator(gpus) if few else LogLocator(base=8 if len(gpus) > 8 else 4)
    doubling_axis(axes, "GPUs", ticks, FuncFormatter(lambda value, _: _short(value)))


def _short(count: float) -> str:
    """Formats a count in short: ``512``, ``4k``."""
    return f"{count / 1024:g}k" if count >= 1024 and count % 1024 == 0 else f"{count:g}"
