"""The four figures per data set of a scaling study: epoch times, speedup, throughput, accuracy."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter, StrMethodFormatter

from common.analysis.comprehensive import Compared
from common.analysis.mode_plots import PLATE
from common.analysis.plots import BLACK, BLUE, CYCLE, GREEN, GREY, SKY, figure
from common.analysis.scaling import Speedup

ONE_RANK, COUNTED, PRINTED, PER_SAMPLE = "one rank", "counted", "printed", "per sample"
LABELS = {
    ONE_RANK: "one rank",
    COUNTED: "speedup (samples counted)",
    PRINTED: "as printed: epoch times, samples not counted",
    PER_SAMPLE: "per sample",
}
COLOURS = {ONE_RANK: SKY, COUNTED: BLUE, PRINTED: GREY, PER_SAMPLE: GREEN}
GOOD_SHARE = 0.8
HIGHEST = 1.2
"""Wide intervals are cut off at so many times the ideal."""
NAME_LETTERS = 18
PERCENT = PercentFormatter(1, symbol=" %")
THOUSANDS = StrMethodFormatter("{x:,.0f}")
MARKERS = "osD^vP*X"


def epoch_time_detailed(compared: Sequence[Compared], caption: str) -> Figure:
    """Seconds of each epoch's training, and their spread; warm-up epochs are hollow."""
    with figure(caption, figsize=(7.2, 4.2), ncols=2, width_ratios=(2, 1.3), sharey=True) as (
        fig,
        (left, right),
    ):
        for place, (one, colour) in enumerate(zip(compared, _colours(compared), strict=True)):
            configuration = one.configuration
            for repeat, run in enumerate(configuration.runs):
                epochs, times = run.epochs["epoch"], run.epochs["train_time_s"]
                warm = epochs <= configuration.warmup
                style = {"color": colour, "marker": MARKERS[repeat % len(MARKERS)], "markersize": 4}
                label = configuration.name if repeat == 0 else None
                left.plot(epochs[~warm], times[~warm], linewidth=1, label=label, **style)
                left.plot(epochs[warm], times[warm], linestyle="none", mfc="white", **style)
            times = configuration.epoch_times_s
            right.boxplot(
                times,
                positions=[place],
                widths=0.6,
                patch_artist=True,
                boxprops={"facecolor": colour, "alpha": 0.6},
                medianprops={"color": BLACK},
                flierprops={"markersize": 3},
            )
            mean = f"{np.mean(times):.3g}"
            right.annotate(
                mean, (place, times.max()), (0, 3), textcoords="offset points", ha="center"
            )
        left.set_ylim(0, 1.1 * max(run.epochs["train_time_s"].max() for run in _runs(compared)))
        left.set_xlabel("epoch (hollow: warm-up)")
        left.set_ylabel("training time of an epoch (s)")
        left.xaxis.set_major_locator(MaxNLocator(integer=True))
        _names(right, compared)
        right.set_title("spread and mean", loc="left", fontsize=9.5)
        fig.legend(loc="outside upper center", ncols=min(4, len(compared)), fontsize=8)
    return fig


def speedup_efficiency(compared: Sequence[Compared], caption: str) -> Figure:
    """Speedup over one rank and its share of the ideal, with the ideal and the 80 % lines."""
    with figure(caption, figsize=(7.2, 4.4), ncols=2) as (fig, (left, right)):
        for place, one in enumerate(compared):
            bars = _bars(one)
            for number, (kind, found) in enumerate(bars):
                width = 0.8 / len(bars)
                x = place - 0.4 + width * (number + 0.5)
                _bar(left, x, width, kind, found, 1.0, "{:.2f}x")
                _bar(right, x, width, kind, found, 1 / found.ranks, "{:.1%}")
            if not bars:
                for axes in (left, right):
                    axes.text(place, 0, "n/a", ha="center", va="bottom", color=GREY)
            _reference(left, (place - 0.45, place + 0.45), one.configuration.ranks)
        _reference(right, (-0.5, len(compared) - 0.5), 1.0)
        left.set_ylabel("speedup over one rank")
        right.set_ylabel("efficiency: speedup / ranks")
        right.yaxis.set_major_formatter(PERCENT)
        highest = max([one.shown.value for one in compared if one.shown] or [1.0])
        for axes, ideal in ((left, max(one.configuration.ranks for one in compared)), (right, 1)):
            axes.set_ylim(0, min(1.12 * axes.get_ylim()[1], 1.2 * max(highest, HIGHEST * ideal)))
            _names(axes, compared)
        _legend(fig, left, ncols=3)
    return fig


def _bar(
    axes: Axes, x: float, width: float, kind: str, found: Speedup, scale: float, form: str
) -> None:
    """One bar with its interval and its number."""
    value = found.value * scale
    axes.bar(
        x,
        value,
        width * 0.92,
        yerr=_error(found, scale),
        error_kw={"elinewidth": 1.1, "capsize": 2.5},
        color=COLOURS[kind],
        alpha=0.85,
        hatch="////" if kind == PRINTED else "",
        edgecolor="white",
        label=LABELS[kind],
    )
    ideal = found.ranks * scale
    top = value if np.isnan(found.high) else min(found.high * scale, max(value, HIGHEST * ideal))
    text = form.format(value).replace("%", " %")
    axes.annotate(
        text,
        (x, top),
        (0, 2),
        textcoords="offset points",
        ha="center",
        va="bottom",
        fontsize=7.5,
        bbox=PLATE,
    )


def _legend(fig: Figure, axes: Axes, ncols: int) -> None:
    """Each label once, above the axes."""
    handles, labels = axes.get_legend_handles_labels()
    once = dict(zip(labels, handles, strict=True))
    if once:
        fig.legend(once.values(), once.keys(), loc="outside upper center", ncols=ncols, fontsize=8)


def throughput(compared: Sequence[Compared], caption: str) -> Figure:
    """Samples that all ranks compute in a second, with what N times one rank would be."""
    with figure(caption, figsize=(7.2, 3.9)) as (fig, axes):
        for place, (one, colour) in enumerate(zip(compared, _colours(compared), strict=True)):
            rate = one.configuration.throughput_samples_per_s
            if rate is None:
                axes.text(place, 0, "n/a", ha="center", va="bottom", color=GREY)
                continue
            axes.bar(place, rate, 0.7, color=colour, alpha=0.8)
            number = f"{rate:,.0f}"
            axes.text(place, 0.5 * rate, number, ha="center", va="center", fontsize=9, bbox=PLATE)
            base = one.base.throughput_samples_per_s if one.base else None
            if base is not None and not one.is_base:
                ends = place - 0.45, place + 0.45
                _reference(axes, ends, base * one.configuration.ranks)
        axes.set_ylabel("samples computed per second, all ranks")
        axes.set_ylim(0, 1.05 * max(axes.get_ylim()[1], 1))
        axes.yaxis.set_major_formatter(THOUSANDS)
        _names(axes, compared)
        _legend(fig, axes, ncols=2)
    return fig


def accuracy(compared: Sequence[Compared], caption: str) -> Figure:
    """Validation accuracy by epoch, and by time spent training."""
    with figure(caption, figsize=(7.2, 3.9), ncols=2, sharey=True) as (fig, (left, right)):
        for one, colour in zip(compared, _colours(compared), strict=True):
            for repeat, run in enumerate(one.configuration.runs):
                table = run.epochs.dropna(subset="val_accuracy")
                style = {"color": colour, "marker": MARKERS[repeat % len(MARKERS)], "markersize": 4}
                label = one.configuration.name if repeat == 0 else None
                left.plot(table["epoch"], table["val_accuracy"], label=label, lw=1.2, **style)
                if run.epochs["epoch"].iloc[0] == 1:  # else the time before is not known
                    spent = run.epochs["train_time_s"].cumsum()[table.index]
                    right.plot(spent, table["val_accuracy"], lw=1.2, **style)
        left.set_xlabel("epoch, as the run counts them")
        left.xaxis.set_major_locator(MaxNLocator(integer=True))
        left.yaxis.set_major_formatter(PERCENT)
        left.set_ylabel("validation accuracy")
        right.set_xlabel("training time so far (s)")
        fig.legend(loc="outside upper center", ncols=min(4, len(compared)), fontsize=8)
    return fig


FIGURES = {
    "epoch_time_detailed": epoch_time_detailed,
    "speedup_efficiency": speedup_efficiency,
    "throughput": throughput,
    "accuracy": accuracy,
}
"""The figures by the end of their names; each takes what is compared, and a caption."""


def _runs(compared: Sequence[Compared]) -> list:
    return [run for one in compared for run in one.configuration.runs]


def _colours(compared: Sequence[Compared]) -> list[str]:
    return [CYCLE[place % len(CYCLE)] for place in range(len(compared))]


def _bars(one: Compared) -> list[tuple[str, Speedup]]:
    if one.is_base:
        found = [(ONE_RANK, one.speedup)]
    else:
        found = [(COUNTED, one.speedup), (PRINTED, one.printed)]
        found += [(PER_SAMPLE, one.per_sample)] if one.speedup is None else []
    return [(kind, speedup) for kind, speedup in found if speedup is not None]


def _error(found: Speedup, scale: float) -> list[list[float]] | None:
    if np.isnan(found.low) or found.low == found.high:
        return None
    below, above = found.value - found.low, found.high - found.value
    return [[max(0, below) * scale], [max(0, above) * scale]]


def _reference(axes: Axes, ends: tuple[float, float], ideal: float) -> None:
    """The ideal and 80 % of it."""
    for share, style, name in ((1.0, "--", "ideal"), (GOOD_SHARE, ":", "80 % of the ideal")):
        axes.hlines(ideal * share, *ends, color=BLACK, linestyle=style, linewidth=1.2, label=name)


def _names(axes: Axes, compared: Sequence[Compared]) -> None:
    parts = [one.configuration.name.split(", ") for one in compared]
    names = ["\n".join(textwrap.fill(part, NAME_LETTERS) for part in each) for each in parts]
    axes.set_xticks(range(len(compared)), names, fontsize=8.5 if len(names) < 4 else 7.5)
    axes.set_xlim(-0.6, len(compared) - 0.4)
    axes.grid(axis="x", visible=False)
