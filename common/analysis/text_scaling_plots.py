"""The figures of the published text scaling study: its epochs, its losses, its mixed file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

from common.analysis.comprehensive import Compared
from common.analysis.mode_plots import PLAIN
from common.analysis.plots import BLUE, CYCLE, GREY, RED, figure
from common.analysis.text_study import passes, updates_per_epoch


def epoch_times(studies: Mapping[str, Sequence[Compared]], caption: str) -> Figure:
    """Mean training time of an epoch by the number of ranks, a group per data set and model."""
    groups: dict[str, list[Compared]] = {}
    for dataset, compared in studies.items():
        for one in compared:
            model = one.configuration.identity.model
            several = len({other.configuration.identity.model for other in compared}) > 1
            groups.setdefault(f"{dataset}\n{model}" if several else dataset, []).append(one)
    sizes = sorted({one.configuration.ranks for members in groups.values() for one in members})
    shades = {ranks: CYCLE[place % len(CYCLE)] for place, ranks in enumerate(sizes)}
    with figure(caption) as (fig, axes):
        for place, members in enumerate(groups.values()):
            for number, one in enumerate(members):
                x = place + (number - (len(members) - 1) / 2) * 0.36
                times, ranks = one.configuration.epoch_times_s, one.configuration.ranks
                low, high = np.quantile(times, [0.05, 0.95])
                mean = float(times.mean())
                label = f"{ranks} GPU{'s' * (ranks > 1)}"
                axes.bar(
                    *(x, mean, 0.33),
                    color=shades[ranks],
                    alpha=0.85,
                    yerr=[[max(0, mean - low)], [max(0, high - mean)]],
                    error_kw={"elinewidth": 1.1, "capsize": 2.5},
                    label=label if place == 0 else None,
                )
                axes.annotate(
                    f"{mean:.1f} s",
                    (x, high),
                    (0, 2),
                    textcoords="offset points",
                    ha="center",
                    fontsize=8.5,
                )
        axes.set_xticks(range(len(groups)), list(groups))
        axes.grid(axis="x", visible=False)
        axes.set_ylabel("training time of an epoch (s)")
        fig.legend(loc="outside upper center", ncols=2, fontsize=8)
    return fig


def losses(one: Compared, several: Compared, caption: str, by: str = "passes") -> Figure:
    """Training loss on one and on several GPUs: by epoch as printed, and by what was done.

    Args:
        by: ``passes`` over the data, or ``updates`` of the weights.
    """
    per_epoch, name = {
        "passes": (passes, "passes over the data"),
        "updates": (updates_per_epoch, "updates of the weights"),
    }[by]
    with figure(caption, ncols=2, sharey=True) as (fig, (left, right)):
        for compared, colour in ((one, BLUE), (several, RED)):
            each = per_epoch(compared.configuration)
            for repeat, run in enumerate(compared.configuration.runs):
                label = compared.configuration.name if repeat == 0 else None
                style = {"color": colour, "marker": "os^"[repeat % 3], "markersize": 4, "lw": 1.2}
                epochs, loss = run.epochs["epoch"], run.epochs["train_loss"]
                left.plot(epochs, loss, label=label, **style)
                right.plot(epochs * each, loss, **style)
        for axes, label in ((left, "epoch as printed"), (right, name)):
            axes.set_yscale("log")
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axes.yaxis.set_major_formatter(PLAIN)
            axes.yaxis.set_minor_locator(NullLocator())
            axes.set_xlabel(label)
            axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        left.set_ylabel("training loss (nats)")
        fig.legend(loc="outside upper center", ncols=2, fontsize=8)
    return fig


def mixed_rows(rows: pd.DataFrame, caption: str) -> Figure:
    """The epochs of a file in the order they were written: a line per job, the file in grey."""
    with figure(caption, figsize=(7.2, 3.3)) as (fig, axes):
        axes.plot(rows["row"], rows["epoch"], color=GREY, linewidth=0.7, label="the file")
        for (job, own), colour in zip(rows.groupby("job"), CYCLE, strict=False):
            label = f"job {job}: epochs {own['epoch'].min()} to {own['epoch'].max()}"
            axes.plot(own["row"], own["epoch"], "o-", color=colour, markersize=4, label=label)
        axes.set_xlabel("row of metrics.csv")
        axes.set_ylabel("epoch")
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
        axes.legend(fontsize=8)
    return fig
