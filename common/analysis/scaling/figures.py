"""Figures of a sweep: throughput over ranks, parts of the step, laws, the published V100s."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator

from common.analysis.scaling.sweep_run import ARM, Series, SweepRun, arm_name
from common.analysis.scaling.training_run import WEAK
from common.analysis.step_parts import PARTS
from common.analysis.style import (
    BLACK,
    BLUE,
    CYCLE,
    GOOD_EFFICIENCY,
    GREEN,
    GREY,
    MEASURED,
    ORANGE,
    PLAIN,
    PURPLE,
    RED,
    SKY,
    bar_rows,
    doubling_axis,
    figure,
    log_axis,
)
from common.analysis.sweep_speedups import error_bars
from common.exercises.scaling_fit import USL
from common.perfmodel.scaling.published_mlp import LARGEST_SLOWDOWN, MEAN_SLOWDOWN, Explanation

PART_COLOURS = dict(zip(PARTS, (GREY, SKY, BLUE, PURPLE, ORANGE, GREEN), strict=True))
MARKERS = "os^DvP"
BAR_HEIGHT = 0.34
"""Inches of a figure per bar."""


def throughput(run: SweepRun) -> Figure:
    """Draws samples per second over ranks, by batch; a panel per regime, ideal and 80 % lines."""
    regimes = list(dict.fromkeys(series.regime for series in run.series))
    with figure(
        run.caption, figsize=(7.2, 3.9), ncols=max(1, len(regimes)), sharey=True, squeeze=False
    ) as (fig, grid):
        for axes, regime in zip(grid[0], regimes, strict=False):
            drawn = [series for series in run.series if series.regime == regime]
            for index, series in enumerate(drawn):
                _throughput_line(axes, series, index)
            ranks = sorted(set(drawn[0].table["world_size"]))
            doubling_axis(axes, "ranks", FixedLocator(ranks))
            log_axis(axes, subs=(1, 2, 5))
            axes.set_title(f"{regime} scaling", loc="left", fontsize=9.5)
            axes.legend(fontsize=8)
        grid[0][0].set_ylabel("throughput (samples/s)")
    return fig


def _throughput_line(axes: Axes, series: Series, index: int) -> None:
    table = series.table
    ranks, rate = table["world_size"], table["throughput_samples_per_s"]
    alone, good = rate.iloc[0], f"{GOOD_EFFICIENCY:.0%} of it"
    for share, dashes, name in ((1.0, "--", "ideal"), (GOOD_EFFICIENCY, ":", good)):
        label = name if index == 0 else None
        axes.plot(ranks, share * alone * ranks, dashes, color=GREY, linewidth=1, label=label)
    axes.errorbar(
        ranks,
        rate,
        yerr=error_bars(table) * alone,
        marker=MARKERS[index % len(MARKERS)],
        markersize=5,
        capsize=3,
        color=CYCLE[index % len(CYCLE)],
        label=series.label,
    )


def step_parts(
    parts: pd.DataFrame, caption: str, predictions: pd.DataFrame | None = None
) -> Figure:
    """Draws a bar of parts per arm, with the step nobody watched and the predicted one.

    ``parts`` are those of ``decompose_all``, ``predictions`` those of ``predicted_steps``.
    """
    parts = parts.sort_values(["regime", "global_batch", "world_size"], kind="stable")
    with figure(caption, figsize=(7.2, 1.6 + BAR_HEIGHT * len(parts))) as (fig, axes):
        places = bar_rows(axes, [arm_name(*row) for row in parts[ARM].values], fontsize=8.5)
        starts = np.zeros(len(parts))
        for name, colour in PART_COLOURS.items():
            widths = parts[f"{name}_ms"].to_numpy()
            look = {"color": colour, "edgecolor": "white", "linewidth": 0.4}
            axes.barh(places, widths, left=starts, height=0.66, label=name, **look)
            starts += widths
        ends = [starts.max()]
        plain = parts["plain_step_ms"].astype(float)
        if plain.notna().any():
            label = "step with nothing watched"
            axes.plot(plain, places, "|", ms=15, mew=2, color=BLACK, zorder=4, label=label)
            ends.append(plain.max())
        if predictions is not None:
            predicted = parts["arm"].map(predictions.set_index("arm")["predicted_step_ms"])
            look = {"color": RED, "ms": 5.5, "mec": "white", "mew": 0.6, "zorder": 4}
            axes.plot(predicted, places, "D", label="predicted", **look)
            ends.append(predicted.max())
        axes.set_xlim(0, 1.05 * np.nanmax(ends))
        axes.set_xlabel("time of a step (ms)")
        fig.legend(loc="outside upper center", ncols=4, fontsize=8)
    return fig


def communication_ratios(parts: pd.DataFrame, caption: str) -> Figure:
    """Draws communication over computation, all of it and the exposed, a pair of bars per arm."""
    several = parts[parts["world_size"] > 1]
    with figure(caption, figsize=(7.2, 1.6 + BAR_HEIGHT * 1.3 * len(several))) as (fig, axes):
        places = bar_rows(axes, [arm_name(*row) for row in several[ARM].values], fontsize=8.5)
        total = several["total_ratio"].astype(float)
        axes.barh(places + 0.19, total, height=0.36, color=SKY, label="all of it")
        exposed = several["exposed_ratio"]
        axes.barh(places - 0.19, exposed, height=0.36, color=ORANGE, label="exposed")
        axes.axvline(1, color=GREY, linestyle="--", linewidth=1)
        axes.set_xlabel("communication over computation (dashed: as long as it)")
        fig.legend(loc="outside upper center", ncols=2, fontsize=8)
    return fig


def laws(series: Series, caption: str) -> Figure:
    """Draws measured speedups and the fitted laws with 95 % bands, beyond what was measured."""
    table, (fitted, _) = series.table, series.laws
    most = int(table["world_size"].max())
    reach = 2.0 * most
    for law in fitted:
        if law.peak_ranks is not None and np.isfinite(law.peak_ranks):
            reach = max(reach, min(1.15 * law.peak_ranks, 4.0 * most))
    ranks = np.linspace(1, reach, 200)
    with figure(caption) as (fig, axes):
        axes.plot(ranks, ranks, "--", color=GREY, linewidth=1, label="ideal")
        axes.plot(ranks, GOOD_EFFICIENCY * ranks, ":", color=GREY, linewidth=1, label="80 % of it")
        for law, colour, dashes in zip(fitted, (RED, BLUE), ("-.", "-"), strict=False):
            low, high = law.band(ranks)
            axes.fill_between(ranks, low, high, color=colour, alpha=0.18, linewidth=0)
            values = ", ".join(f"{name} = {e.estimate:.3g}" for name, e in law.parameters.items())
            label = f"{law.law.name}: {values}"
            axes.plot(ranks, law.predict(ranks), dashes, color=colour, label=label)
            peak = law.peak_ranks
            if law.law is USL and peak is not None and 1 < peak < reach:
                height = float(law.predict(peak))
                axes.plot(peak, height, "*", markersize=14, color=colour, zorder=5)
                axes.text(peak, height, f"  peak: {peak:.0f} ranks\n", fontsize=8.5, color=colour)
        measured, look = (table["world_size"], table["speedup"]), MEASURED | {"zorder": 6}
        axes.errorbar(*measured, yerr=error_bars(table), label="measured, 95 %", **look)
        axes.axvspan(most, reach, color=GREY, alpha=0.07, linewidth=0)
        top = max(table["speedup"].max(), *(float(law.predict(ranks).max()) for law in fitted), 1)
        axes.set(ylim=(0, 1.35 * top), xlim=(1, reach))
        axes.text(
            (most + reach) / 2, 0.03 * top, "not measured", ha="center", fontsize=8, color=GREY
        )
        axes.set(xlabel="ranks N", ylabel="speedup S(N)")
        kind = "weak" if series.regime == WEAK else "strong"
        axes.set_title(f"{kind} scaling, {series.label}", loc="left", fontsize=9.5)
        axes.legend(fontsize=8, loc="upper left")
    return fig


def published_steps(explanation: Explanation, caption: str) -> Figure:
    """Draws published steps on one and two V100s and the model's, over the batch."""
    batches = np.unique(np.geomspace(64, 8192, 57).round()).astype(int)
    model = explanation.model
    with figure(caption) as (fig, axes):
        alone_ms = [model.device.step_s(batch) * 1e3 for batch in batches]
        axes.plot(batches, alone_ms, color=SKY, label="1 GPU: line through both points")
        alone = explanation.one_gpu_ms
        axes.plot(alone.keys(), alone.values(), "s", color=BLUE, label="1 GPU, published", zorder=4)
        bounds = [
            [model.step_s(batch, beta, explanation.slowdown) * 1e3 for batch in batches]
            for beta in (explanation.high, explanation.low)
        ]
        axes.fill_between(batches, *bounds, color=RED, alpha=0.2, linewidth=0)
        two = [
            model.step_s(batch, explanation.bandwidth_bytes_per_s, explanation.slowdown) * 1e3
            for batch in batches
        ]
        label = f"2 GPUs, predicted at {explanation.bandwidth_bytes_per_s / 1e9:.1f} GB/s"
        axes.plot(batches, two, color=RED, label=label)
        several = explanation.published_ms
        axes.plot(
            several.keys(), several.values(), "o", color=BLACK, label="2 GPUs, published", zorder=4
        )
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(PLAIN)
        log_axis(axes, subs=(1, 2, 5))
        axes.set(xlabel="batch per GPU (samples)", ylabel="time of a step (ms)")
        axes.legend(fontsize=8, loc="upper left")
    return fig


def published_bandwidths(explanation: Explanation, caption: str) -> Figure:
    """Draws the bandwidth that each step needs, over what all-reduces take from computation."""
    slowdowns = np.linspace(1, LARGEST_SLOWDOWN, 17)
    with figure(caption) as (fig, axes):
        low, high = explanation.low / 1e9, explanation.high / 1e9
        band = f"both within 3 %: {low:.1f} to {high:.1f} GB/s"
        axes.axhspan(low, high, color=GREY, alpha=0.2, linewidth=0, label=band)
        for (batch, time_ms), colour, dashes in zip(
            explanation.published_ms.items(), (BLUE, RED), ("-", "-."), strict=False
        ):
            needed = [explanation.model.bandwidth_for(batch, time_ms / 1e3, c) for c in slowdowns]
            needed = [np.nan if beta is None else beta / 1e9 for beta in needed]
            label = f"batch {batch:,}: exactly {time_ms:g} ms"
            axes.plot((slowdowns - 1) * 100, needed, dashes, color=colour, label=label)
        x, y = (explanation.slowdown - 1) * 100, explanation.bandwidth_bytes_per_s / 1e9
        axes.plot(x, y, "*", markersize=15, color=BLACK, zorder=5)
        axes.text(x - 0.8, y * 1.02, f"{y:.1f} GB/s", ha="right", va="bottom", fontsize=9)
        mean = (MEAN_SLOWDOWN - 1) * 100
        label = f"mean of others' measurements, {mean:.1f} %"
        axes.axvline(mean, color=GREEN, linestyle="--", linewidth=1.2, label=label)
        axes.set_xlim(0, (LARGEST_SLOWDOWN - 1) * 100)
        axes.set_xlabel("computation beside an all-reduce takes longer by (%)")
        axes.set_ylabel("bandwidth of an all-reduce (GB/s)")
        axes.legend(fontsize=8, loc="upper left")
    return fig
