"""The figures of training runs: loss curves, learning, and what a step's time went to."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from common.analysis.assignment1 import Training, caption_of
from common.analysis.loss_curves import loss_differences, smoothed_loss
from common.analysis.plots import BLACK, BLUE, GREEN, GREY, ORANGE, PURPLE, RED, SKY, figure
from common.analysis.training_memory import PARTS

COLOURS = {
    **{"single": BLACK, "local": GREY, "DDP": BLUE},
    **{"FULL_SHARD": RED, "SHARD_GRAD_OP": ORANGE, "HYBRID_SHARD": PURPLE},
}
"""One colour per strategy, in every figure."""
DASHES = ("-", (0, (6, 2)), (0, (2, 2)), (0, (6, 2, 1, 2)), (0, (1, 3)))
"""Curves that lie on top of each other show through each other's gaps."""
PART_COLOURS = dict(zip(PARTS, (BLUE, SKY, GREEN, ORANGE, "#d0d0d0"), strict=True))
OVERLAP_PARTS = {
    "computation alone": ("computation_alone_ms", SKY),
    "computation and communication at once": ("overlap_ms", GREEN),
    "exposed communication": ("exposed_communication_ms", ORANGE),
    "neither": ("idle_ms", "#d0d0d0"),
}
LEAST_NATS = 1e-8
"""Differences below this are drawn at it: a logarithmic axis has no zero."""


def loss_curves(training: Training) -> Figure:
    """Loss over steps of all strategies, and below how far each is from the first."""
    with figure(
        training.caption,
        figsize=(7.2, 4.6),
        nrows=2,
        sharex=True,
        height_ratios=(2, 1),
    ) as (fig, (above, below)):
        names = training.names()
        differences = loss_differences(training)
        for place, (name, run) in enumerate(zip(names, training.compared, strict=True)):
            look = {"color": COLOURS[run.strategy], "linestyle": DASHES[place % len(DASHES)]}
            width = 3.6 if place == 0 else 1.8
            above.plot(run.loss.index, run.loss, label=name, linewidth=width, **look)
            if place:
                away = differences[name].clip(lower=LEAST_NATS)
                marks = {"marker": "o", "markersize": 3, "linewidth": 1}
                below.plot(away.index, away, **marks, **look)
        above.set_ylabel("loss (nats per token)")
        above.legend()
        below.set_yscale("log")
        below.set_ylim(bottom=LEAST_NATS / 2)
        below.text(0.01, 0.04, "lowest: equal", transform=below.transAxes, fontsize=8, color=GREY)
        below.set_ylabel(f"|difference to\n{names[0]}| (nats)")
        below.set_xlabel("step")
        below.xaxis.set_major_locator(MaxNLocator(integer=True))
    return fig


def learning_curve(training: Training) -> Figure:
    """The loss of the long run, raw and smoothed, and what a model can and cannot get below."""
    run = training.learning
    with figure(caption_of(run.environment, training.folder)) as (fig, axes):
        smooth = smoothed_loss(run)
        axes.plot(run.loss.index, run.loss, color=SKY, linewidth=0.7, label="loss of each step")
        window = smooth.attrs["window"]
        axes.plot(smooth.index, smooth, color=BLUE, label=f"mean of {window} steps")
        lines = (
            ("unigram_entropy_nats", GREY, "knowing only how often each token comes"),
            ("entropy_nats", RED, "entropy of the text: no model stays below"),
        )
        for key, colour, text in lines:
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
        axes.set_xlabel("step")
        axes.set_ylabel("loss (nats per token)")
        floor = run.settings.get("entropy_nats") or run.loss.min()
        axes.set_ylim(floor - 0.12 * (run.loss.max() - floor), None)
        axes.legend()
    return fig


def overlap_bars(table: pd.DataFrame, caption: str) -> Figure:
    """Each strategy's step, as shares of its length: computation, communication, both, neither."""
    with figure(caption, figsize=(7.2, 1.7 + 0.45 * len(table))) as (fig, axes):
        places = np.arange(len(table))[::-1]
        alone = (table["computation_ms"] - table["overlap_ms"]).rename("computation_alone_ms")
        parts = table.assign(computation_alone_ms=alone)
        left = np.zeros(len(table))
        for label, (column, colour) in OVERLAP_PARTS.items():
            share = (parts[column] / parts["step_ms"] * 100).to_numpy()
            axes.barh(places, share, left=left, height=0.6, color=colour, label=label)
            for place, start, width in zip(places, left, share, strict=True):
                if width > 6:
                    middle = start + width / 2
                    axes.text(middle, place, f"{width:.0f}%", ha="center", va="center", fontsize=8)
            left = left + share
        for place, end, step_ms in zip(places, left, table["step_ms"], strict=True):
            axes.text(end + 1, place, f"{step_ms:,.0f} ms", va="center", fontsize=8.5)
        axes.set_yticks(places, table["name"])
        axes.set_xlim(0, 115)
        axes.set_xticks(range(0, 101, 20))
        axes.grid(axis="y", visible=False)
        axes.set_xlabel("share of a traced step (%), and its length (ms)")
        fig.legend(loc="outside upper center", ncols=2, fontsize=8)
    return fig


def memory_bars(table: pd.DataFrame, caption: str) -> Figure:
    """The predicted peak of a rank by what it is for, and the measured one."""
    table = table.dropna(subset="predicted_bytes")
    unit, name = (2**30, "GiB") if table["predicted_bytes"].max() > 2**31 else (2**20, "MiB")
    with figure(caption, figsize=(7.2, 1.9 + 0.45 * len(table))) as (fig, axes):
        places = np.arange(len(table))[::-1]
        left = np.zeros(len(table))
        for part, colour in PART_COLOURS.items():
            size = table[part].to_numpy() / unit
            axes.barh(places, size, left=left, height=0.6, color=colour, label=part)
            left = left + size
        if table["measured_bytes"].notna().any():
            ends = table[["least_bytes", "measured_bytes"]].to_numpy() / unit
            axes.hlines(places, ends[:, 0], ends[:, 1], color=BLACK, linewidth=1.2)
            marks = {"color": BLACK, "marker": "D", "markersize": 5.5, "linestyle": "none"}
            axes.plot(ends[:, 1], places, label="measured: the ranks with most and least", **marks)
            axes.plot(ends[:, 0], places, **marks)
        axes.set_yticks(places, table["name"])
        axes.grid(axis="y", visible=False)
        axes.set_xlabel(f"memory of a rank at its predicted peak ({name})")
        fig.legend(loc="outside upper center", ncols=3, fontsize=8)
    return fig
