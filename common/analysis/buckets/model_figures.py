"""The figures of the model and its inputs: passes, a(x), gradients, errors by term, what-ifs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from common.analysis.style import (
    BLACK,
    BLUE,
    CYCLE,
    GREEN,
    GREY,
    MEASURED,
    ORANGE,
    RED,
    SKY,
    SMALLEST_CAP_MIB,
    band,
    byte_axis,
    cap_axis,
    figure,
    log_axis,
    ms_axis,
)
from common.perfmodel.collectives import AlphaBeta, MeasuredAllReduce
from common.perfmodel.ddp.timeline import BackwardTimeline
from common.perfmodel.perfetto_trace import ALL_REDUCE, COMPUTATION, COPIES, slices
from common.samples import slowest_rank

ROWS = {COMPUTATION: 2, ALL_REDUCE: 1, COPIES: 0}
COLOURS = {COMPUTATION: SKY, ALL_REDUCE: ORANGE, COPIES: GREEN}
HEIGHT = 0.62
SMALLEST_LABELLED = 0.022
"""Share of the width that a box needs for its bucket's number."""
SMALLEST_EDGED = 0.004
"""Share of the width below which a white edge would hide a box."""


def timeline(timeline_: BackwardTimeline, caption: str, title: str = "") -> Figure:
    """Draws one backward pass of DDP: computation above, each bucket's all-reduce below."""
    with figure(caption, figsize=(7.2, 2.6)) as (fig, axes):
        end = timeline_.compute_end_s * 1e3
        axes.barh(1, end, color=SKY, height=0.55, edgecolor="white")
        axes.text(end / 2, 1, "gradients", ha="center", va="center")
        for event in timeline_.events:
            start, stop = event.start_s * 1e3, event.end_s * 1e3
            axes.barh(0, stop - start, left=start, color=ORANGE, height=0.55, edgecolor="white")
            axes.plot([event.ready_s * 1e3] * 2, [0.72, 0.32], color=BLACK, linewidth=0.8)
            if stop - start > 0.035 * timeline_.total_s * 1e3:
                axes.text((start + stop) / 2, 0, f"{event.index + 1}", ha="center", va="center")
        total = timeline_.total_s * 1e3
        axes.axvspan(end, total, color=RED, alpha=0.15, linewidth=0)
        axes.text(total, 1.42, f"exposed {total - end:.1f} ms", color=RED, ha="right", va="bottom")
        axes.set_yticks([0, 1], ["all-reduce\nof bucket", "backward\npass"])
        axes.set(ylim=(-0.5, 1.75), xlim=(0, total * 1.01))
        axes.grid(axis="y", visible=False)
        axes.set_xlabel("time since the backward pass began (ms)")
        axes.set_title(title, loc="left", fontsize=9.5)
    return fig


def predicted_and_measured(
    predicted: BackwardTimeline, measured: BackwardTimeline | None, caption: str, title: str = ""
) -> Figure:
    """Draws computation, all-reduces and copies of each pass; where only one is known, that one.

    Boxes carry the number of their bucket; all-reduces that are in flight together share a row.
    The dashed line is the end of the other pass.
    """
    passes = {"predicted": predicted} | ({"measured": measured} if measured else {})
    longest_ms = max(timeline_.total_s for timeline_ in passes.values()) * 1e3
    size = (7.2, 1.1 + 1.55 * len(passes))
    with figure(caption, size, nrows=len(passes), sharex=True, squeeze=False) as (fig, grid):
        for axes, (name, timeline_) in zip(grid[:, 0], passes.items(), strict=True):
            _draw_pass(axes, timeline_, longest_ms)
            axes.set_title(f"{name}: {timeline_.total_s * 1e3:.1f} ms", loc="left", fontsize=9)
            for other in passes.values():
                if other is not timeline_:
                    axes.axvline(other.total_s * 1e3, color=BLACK, linestyle="--", linewidth=0.8)
        grid[-1, 0].set_xlabel("time since the backward pass began (ms)")
        fig.suptitle(title, x=0.01, ha="left", fontsize=9.5)
    return fig


def _draw_pass(axes: Axes, timeline_: BackwardTimeline, longest_ms: float) -> None:
    boxes = slices(timeline_)
    lanes = 1 + max((box.lane for box in boxes), default=0)
    for box in boxes:
        start_ms, length_ms = box.start_s * 1e3, (box.end_s - box.start_s) * 1e3
        height = HEIGHT / lanes if box.kind == ALL_REDUCE else HEIGHT
        middle = ROWS[box.kind]
        if box.kind == ALL_REDUCE:
            middle += HEIGHT / 2 - (box.lane + 0.5) * height
        axes.barh(
            middle,
            length_ms,
            left=start_ms,
            height=height,
            color=COLOURS[box.kind],
            edgecolor="white",
            linewidth=0.4 if length_ms > SMALLEST_EDGED * longest_ms else 0,
        )
        if box.event and length_ms > SMALLEST_LABELLED * longest_ms:
            number, center_ms = f"{box.event.index + 1}", start_ms + length_ms / 2
            axes.text(center_ms, middle, number, ha="center", va="center", fontsize=6.5)
    ready_ms = [event.ready_s * 1e3 for event in timeline_.events]
    axes.vlines(ready_ms, 1.31, 1.69, color=BLACK, linewidth=0.6)
    total_ms, end_ms = timeline_.total_s * 1e3, timeline_.compute_end_s * 1e3
    axes.axvspan(end_ms, total_ms, color=RED, alpha=0.12, linewidth=0)
    axes.set_yticks(list(ROWS.values()), list(ROWS))
    axes.set(ylim=(-0.45, 2.45), xlim=(0, longest_ms * 1.01))
    axes.grid(axis="y", visible=False)


def all_reduce_curve(
    curve: MeasuredAllReduce,
    models: Mapping[str, AlphaBeta],
    caption: str,
    samples: pd.DataFrame | None = None,
    spread_s: Sequence[float] | None = None,
) -> Figure:
    """Draws a(x): measured points with spread, the lines of α–β models, log-log."""
    with figure(caption) as (fig, axes):
        x, y = curve.sizes_bytes, curve.times_s * 1e3
        bars = None
        if samples is not None:
            calls = samples[samples["mode"] == "sequential"]
            slowest = slowest_rank(calls, "time_ms", by=["total_bytes", "round", "iteration"])
            low, high = (
                slowest.groupby("total_bytes").quantile(q).to_numpy() for q in (0.25, 0.75)
            )
            bars = np.maximum(0, [y - low, high - y])
        elif spread_s is not None:
            bars = np.minimum(np.asarray(spread_s) * 1e3, y * 0.95)
        axes.errorbar(x, y, yerr=bars, label="measured", **MEASURED)
        sizes = np.geomspace(x[0], x[-1], 200)
        for name, model in models.items():
            axes.plot(sizes, model.time_s(sizes) * 1e3, label=name)
        byte_axis(axes)
        ms_axis(axes, "time of an all-reduce (ms)")
        axes.legend()
    return fig


def chunks(samples: pd.DataFrame, caption: str) -> Figure:
    """Draws figures 2a and 2b of Li et al.: the same bytes in ever larger chunks."""
    call = ["mode", "chunk_bytes", "round", "iteration"]
    slowest = slowest_rank(samples, "time_ms", by=call)
    with figure(caption) as (fig, axes):
        for mode, label in (("sequential", "one after another"), ("in_flight", "all in flight")):
            quantiles = slowest[mode].groupby("chunk_bytes").quantile([0.25, 0.5, 0.75]).unstack()
            middle = quantiles[0.5]
            bars = [middle - quantiles[0.25], quantiles[0.75] - middle]
            axes.errorbar(
                middle.index, middle, yerr=bars, marker="o", markersize=4.5, capsize=2, label=label
            )
        byte_axis(axes)
        axes.set_xlabel("chunk size")
        total = samples["total_bytes"].iloc[0] / 2**20
        ms_axis(axes, f"time to all-reduce {total:.1f} MiB (ms)")
        axes.legend()
    return fig


def sensitivity(table: pd.DataFrame, caption: str) -> Figure:
    """Draws how the good caps move when one quantity is scaled: by simulation, and by hand."""
    quantities = list(dict.fromkeys(table["quantity"]))
    with figure(caption, figsize=(7.2, 4.4), ncols=3, nrows=2, sharey=True) as (fig, grid):
        for axes, quantity in zip(grid.flat, quantities, strict=False):
            rows = table[table["quantity"] == quantity].sort_values("factor")
            low = rows["low_mib"].clip(lower=SMALLEST_CAP_MIB)
            factors, label = rows["factor"], "simulated: around b*, within 1 %"
            band(axes, factors, low, rows["high_mib"], SKY, alpha=0.35, label=label)
            look = {"color": BLUE, "markersize": 3.5, "label": "simulated: b*"}
            axes.plot(factors, rows["best_mib"], "o", **look)
            label = "by hand: b*, without the\nlimit of the tensors' sizes"
            axes.plot(factors, rows["closed_form_mib"], "--", color=RED, label=label)
            log_axis(axes)
            cap_axis(axes, f"{quantity}, factor")
        for axes in grid.flat[len(quantities) :]:
            axes.set_axis_off()
        for axes in grid[:, 0]:
            axes.set_ylabel("bucket cap (MiB)")
        grid[0, 0].set_ylim(
            SMALLEST_CAP_MIB, 1.5 * table[["high_mib", "closed_form_mib"]].max().max()
        )
        handles, labels = grid.flat[0].get_legend_handles_labels()
        grid.flat[-1].legend(handles, labels, loc="center", fontsize=8.5)
    return fig


def ready_times(names: Sequence[str], ready_s, sizes_bytes, caption: str) -> Figure:
    """Draws the gradient bytes ready so far, over the backward pass."""
    with figure(caption) as (fig, axes):
        ready_mib = np.cumsum(sizes_bytes) / 2**20
        axes.step(np.asarray(ready_s) * 1e3, ready_mib, where="post", color=BLUE)
        share = sizes_bytes[-1] / sum(sizes_bytes)
        axes.annotate(
            f"{names[-1]}, {share:.0%} of all bytes,\nis ready last",
            xy=(ready_s[-1] * 1e3, ready_mib[-1] - sizes_bytes[-1] / 2**21),
            xytext=(0.42, 0.86),
            textcoords="axes fraction",
            fontsize=8.5,
            arrowprops={"arrowstyle": "->", "color": GREY},
        )
        axes.set(xlabel="time since the backward pass began (ms)", ylabel="gradients ready (MiB)")
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
    return fig


def accuracy_by_term(table: pd.DataFrame, noise_floor: float, caption: str) -> Figure:
    """Draws the error of each model over the caps.

    Columns are models, the index is the cap in MiB. Models beyond the colours have dashed lines.
    """
    with figure(caption) as (fig, axes):
        look = {"color": GREY, "alpha": 0.2, "linewidth": 0, "label": "noise floor"}
        axes.axhspan(-noise_floor * 100, noise_floor * 100, **look)
        for index, column in enumerate(table.columns):
            dashes = "-" if index < len(CYCLE) else "--"
            errors = table[column] * 100
            axes.plot(table.index, errors, dashes, marker="o", markersize=4, label=column)
        axes.axhline(0, color=BLACK, linewidth=0.8)
        cap_axis(axes, "bucket cap b (MiB)")
        axes.set_ylabel("predicted against measured (%)")
        fig.legend(loc="outside upper center", ncols=3, fontsize=8)
    return fig
