"""Draws training runs: loss curves, learning, memory, and where a step's time went."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from common.analysis.data_parallel.loss_curves import loss_differences, smoothed_loss
from common.analysis.data_parallel.training_parts import PARTS
from common.analysis.data_parallel.training_runs import Training
from common.analysis.style import (
    BLACK,
    BLUE,
    BROWN,
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
    RED,
    SKY,
    YELLOW,
    bar_rows,
    figure,
)

PALE = "#d0d0d0"
"""The colour of the rest, whatever it is."""
COLOURS = {
    "single": BLACK,
    "local": GREY,
    "DDP": BLUE,
    "FULL_SHARD": RED,
    "SHARD_GRAD_OP": ORANGE,
    "HYBRID_SHARD": PURPLE,
    "MY_DDP": SKY,
    "MY_BUCKETS": GREEN,
    "MY_ZERO1": YELLOW,
    "MY_FSDP": BROWN,
}
"""One colour per strategy, in every figure."""
DIAMONDS = {"color": BLACK, "marker": "D", "markersize": 5.5, "linestyle": "none"}
"""The look of what was measured beside bars of what was predicted."""
DASHES = ("-", (0, (6, 2)), (0, (2, 2)), (0, (6, 2, 1, 2)), (0, (1, 3)))
"""Curves that lie on top of each other show through each other's gaps."""
PART_COLOURS = dict(zip(PARTS, (BLUE, SKY, GREEN, ORANGE, PALE), strict=True))
OVERLAP_PARTS = {
    "computation alone": ("computation_alone_ms", SKY),
    "computation and communication at once": ("overlap_ms", GREEN),
    "exposed communication": ("exposed_communication_ms", ORANGE),
    "neither": ("idle_ms", PALE),
}
"""The column and the colour of each part of a traced step."""
ENTROPIES = (
    ("unigram_entropy_nats", GREY, "knowing only how often each token comes"),
    ("entropy_nats", RED, "entropy of the text: no model stays below"),
)
"""The setting, the colour and the label of each horizontal line of a learning curve."""
LEAST_NATS = 1e-8
"""Differences below this are drawn at it: a logarithmic axis has no zero."""


def loss_curves(training: Training) -> Figure:
    """Draws loss over steps of all strategies, and below the distance of each from the first."""
    with figure(
        training.caption, figsize=(7.2, 4.6), nrows=2, sharex=True, height_ratios=(2, 1)
    ) as (fig, (above, below)):
        differences = loss_differences(training)
        for index, (name, run) in enumerate(training.named()):
            colour, dashes = COLOURS[run.strategy], DASHES[index % len(DASHES)]
            above.plot(
                run.loss.index,
                run.loss,
                label=name,
                color=colour,
                linestyle=dashes,
                linewidth=3.6 if index == 0 else 1.8,
            )
            if index:
                away = differences[name].clip(lower=LEAST_NATS)
                below.plot(
                    away.index,
                    away,
                    color=colour,
                    linestyle=dashes,
                    linewidth=1,
                    marker="o",
                    markersize=3,
                )
        above.set_ylabel("loss (nats per token)")
        above.legend()
        below.set_yscale("log")
        below.set_ylim(bottom=LEAST_NATS / 2)
        below.text(0.01, 0.04, "lowest: equal", transform=below.transAxes, fontsize=8, color=GREY)
        below.set(ylabel=f"|difference to\n{differences.columns[0]}| (nats)", xlabel="step")
        below.xaxis.set_major_locator(MaxNLocator(integer=True))
    return fig


def learning_curve(training: Training) -> Figure:
    """Draws the loss of the long run, raw and smoothed, and the entropies of its text."""
    run = training.learning
    with figure(run.opened.caption) as (fig, axes):
        smooth = smoothed_loss(run)
        axes.plot(run.loss.index, run.loss, color=SKY, linewidth=0.7, label="loss of each step")
        window = smooth.attrs["window"]
        axes.plot(smooth.index, smooth, color=BLUE, label=f"mean of {window} steps")
        for key, colour, text in ENTROPIES:
            if run.settings.get(key) is None:
                continue
            value = run.settings[key]
            axes.axhline(value, color=colour, linestyle="--", linewidth=1.3)
            axes.annotate(
                f"{text} ({value:.2f} nats)",
                (0.99, value),
                xycoords=("axes fraction", "data"),
                xytext=(0, -4),  # below: the curve comes down to the line
                textcoords="offset points",
                color=colour,
                ha="right",
                va="top",
                fontsize=8,
            )
        axes.set(xlabel="step", ylabel="loss (nats per token)")
        floor = run.settings.get("entropy_nats") or run.loss.min()
        axes.set_ylim(floor - 0.12 * (run.loss.max() - floor), None)
        axes.legend()
    return fig


def overlap_bars(table: pd.DataFrame, caption: str) -> Figure:
    """Draws each strategy's step as shares of its length: computation, communication, neither."""
    with figure(caption, figsize=(7.2, 1.7 + 0.45 * len(table))) as (fig, axes):
        places = bar_rows(axes, table["name"])
        alone_ms = table["computation_ms"] - table["overlap_ms"]
        parts = table.assign(computation_alone_ms=alone_ms)
        ends = np.zeros(len(table))
        for label, (column, colour) in OVERLAP_PARTS.items():
            share = (parts[column] / parts["step_ms"] * 100).to_numpy()
            axes.barh(places, share, left=ends, height=0.6, color=colour, label=label)
            for y, start, width in zip(places, ends, share, strict=True):
                if width > 6:
                    middle = start + width / 2
                    axes.text(middle, y, f"{width:.0f}%", ha="center", va="center", fontsize=8)
            ends = ends + share
        for y, end, step_ms in zip(places, ends, table["step_ms"], strict=True):
            axes.text(end + 1, y, f"{step_ms:,.0f} ms", va="center", fontsize=8.5)
        axes.set_xlim(0, 115)
        axes.set_xticks(range(0, 101, 20))
        axes.set_xlabel("share of a traced step (%), and its length (ms)")
        fig.legend(loc="outside upper center", ncols=2, fontsize=8)
    return fig


def predicted_memory_bars(table: pd.DataFrame, caption: str) -> Figure:
    """Draws the predicted peak of a rank by its parts, and the measured one."""
    table = table.dropna(subset="predicted_bytes")
    unit, name = (2**30, "GiB") if table["predicted_bytes"].max() > 2**31 else (2**20, "MiB")
    with figure(caption, figsize=(7.2, 1.9 + 0.45 * len(table))) as (fig, axes):
        places = bar_rows(axes, table["name"])
        ends = np.zeros(len(table))
        for part, colour in PART_COLOURS.items():
            size = table[part].to_numpy() / unit
            axes.barh(places, size, left=ends, height=0.6, color=colour, label=part)
            ends = ends + size
        if table["measured_bytes"].notna().any():
            least = table["least_bytes"].to_numpy() / unit
            most = table["measured_bytes"].to_numpy() / unit
            axes.hlines(places, least, most, color=BLACK, linewidth=1.2)
            axes.plot(most, places, label="measured: the ranks with most and least", **DIAMONDS)
            axes.plot(least, places, **DIAMONDS)
        axes.set_xlabel(f"memory of a rank at its predicted peak ({name})")
        fig.legend(loc="outside upper center", ncols=3, fontsize=8)
    return fig
