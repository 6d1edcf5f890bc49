"""Figures of a training step's memory: its moments, what fits, and predicted against seen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from common.analysis.style import BLACK, BLUE, GREEN, GREY, ORANGE, PURPLE, RED, SKY, YELLOW, figure

GIB = 2**30
GB = 10**9
GROUPS = {
    "parameters": (BLUE, ("parameters",)),
    "gradients": (SKY, ("gradients",)),
    "optimizer states": (GREEN, ("optimizer states",)),
    "residual stream, norms": (YELLOW, ("residual stream", "norm outputs")),
    "attention": (ORANGE, ("attention", "attention scores")),
    "feed-forward": (PURPLE, ("feed-forward",)),
    "logits and loss": (RED, ("logits and loss",)),
    "copies, temporaries": (
        GREY,
        ("autocast copies", "temporary buffers", "communication", "batch"),
    ),
}
"""Components that share a colour: name → (colour, components)."""


def moments(table: pd.DataFrame, tracked_bytes: int, caption: str) -> Figure:
    """Draws predicted memory at each moment of the step, stacked, and a line at the peak seen.

    ``table`` has the columns moment, component, predicted_bytes.
    """
    names = list(dict.fromkeys(table["moment"]))
    sizes = table.pivot_table("predicted_bytes", "moment", "component").reindex(names).fillna(0)
    with figure(caption, figsize=(7.2, 0.36 * len(names) + 1.5)) as (fig, axes):
        starts = np.zeros(len(names))
        for group, (colour, components) in GROUPS.items():
            present = [name for name in components if name in sizes]
            width = sizes[present].sum(axis=1).to_numpy() / GIB
            if width.any():
                axes.barh(names, width, left=starts, color=colour, label=group, height=0.72)
            starts += width
        axes.axvline(tracked_bytes / GIB, color=BLACK, linestyle="--", linewidth=1.2)
        axes.invert_yaxis()
        axes.set_xlim(0, 1.12 * max(starts.max(), tracked_bytes / GIB))
        axes.annotate(
            f"seen {tracked_bytes / GIB:.2f}",
            (tracked_bytes / GIB, len(names) - 0.4),
            textcoords="offset points",
            xytext=(3, 0),
            fontsize=8,
        )
        axes.grid(axis="y", visible=False)
        axes.set_xlabel("memory in use (GiB)")
        fig.legend(loc="outside upper center", ncols=4, fontsize=8)
    return fig


def peak_by_batch(
    peaks: Mapping[str, Sequence[int]],
    batches: Sequence[int],
    capacities_gb: Sequence[float],
    caption: str,
) -> Figure:
    """Draws the predicted peak against the batch size for several ways to run, with GPUs' sizes.

    ``peaks`` maps a way to run to its peaks in bytes, one per batch size.
    """
    with figure(caption) as (fig, axes):
        for (label, sizes), marker in zip(peaks.items(), "osv^D", strict=False):
            axes.plot(batches, np.asarray(sizes) / GB, marker=marker, markersize=4, label=label)
        for size in capacities_gb:
            axes.axhline(size, color=GREY, linestyle=":", linewidth=1.2)
            axes.annotate(
                f"{size:g} GB",
                (0.0, size),
                xycoords=("axes fraction", "data"),
                textcoords="offset points",
                xytext=(4, 2),
                fontsize=8,
                color="#555555",
            )
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(batches, [f"{batch:g}" for batch in batches])
        ticks = [2, 5, 10, 20, 50, 100, 200]
        axes.set_yticks(ticks, [str(tick) for tick in ticks])
        axes.minorticks_off()
        axes.set(xlabel="batch size (sequences)", ylabel="predicted peak (10⁹ bytes)")
        fig.legend(loc="outside upper center", ncols=3, fontsize=8)
    return fig


def accuracy(table: pd.DataFrame, caption: str) -> Figure:
    """Draws predicted against tracked peak of every case of the study, and the errors below.

    ``table`` has the columns model, predicted_bytes, measured_bytes.
    """
    error = 100 * (table["predicted_bytes"] / table["measured_bytes"] - 1)
    with figure(caption, figsize=(7.2, 4.4), nrows=2, height_ratios=(3, 1), sharex=True) as (
        fig,
        (above, below),
    ):
        span = [table["measured_bytes"].min() / GB, table["measured_bytes"].max() / GB]
        above.plot(span, span, color=GREY, linewidth=1, label="predicted = tracked")
        for (name, rows), colour in zip(
            table.groupby("model", sort=False), (BLUE, ORANGE, GREEN, RED, PURPLE), strict=False
        ):
            x = rows["measured_bytes"] / GB
            above.plot(x, rows["predicted_bytes"] / GB, "o", color=colour, markersize=4, label=name)
            below.plot(x, error[rows.index], "o", color=colour, markersize=4)
        above.set(xscale="log", yscale="log", ylabel="predicted peak (10⁹ bytes)")
        ticks = [size for size in (2, 5, 10, 20, 50, 100, 200) if span[0] / 2 < size < 2 * span[1]]
        above.set_yticks(ticks, [str(size) for size in ticks])
        below.set_xticks(ticks, [str(size) for size in ticks])
        for axes in (above, below):
            axes.minorticks_off()
        above.legend(fontsize=8)
        limit = max(1.0, 1.2 * error.abs().max())
        below.set_ylim(-limit, limit)
        below.axhline(0, color=GREY, linewidth=1)
        below.set(ylabel="error (%)", xlabel="tracked peak (10⁹ bytes)")
    return fig


def sharded_states(sizes: pd.DataFrame, caption: str) -> Figure:
    """Draws the peak of one rank against the number of ranks, by strategy.

    ``sizes`` has the columns strategy, ranks, peak_bytes, state_bytes.
    """
    with figure(caption) as (fig, axes):
        for (name, rows), colour in zip(
            sizes.groupby("strategy", sort=False), (BLUE, ORANGE, GREEN), strict=False
        ):
            axes.plot(rows["ranks"], rows["peak_bytes"] / GB, "o-", color=colour, label=name)
            axes.plot(rows["ranks"], rows["state_bytes"] / GB, "--", color=colour, linewidth=1)
        ranks = sorted(sizes["ranks"].unique())
        axes.set_xscale("log", base=2)
        axes.set_xticks(ranks, [str(rank) for rank in ranks])
        axes.minorticks_off()
        axes.set_ylim(bottom=0)
        axes.set(xlabel="ranks", ylabel="memory of one rank (10⁹ bytes)")
        axes.plot([], [], "--", color=GREY, linewidth=1, label="parameters, gradients, states only")
        axes.legend(fontsize=8)
    return fig
