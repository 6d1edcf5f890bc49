"""Figures of a text scaling study: the report's four, and those of the published runs.

The report has four per data set: epoch times, speedup, throughput, accuracy. Of the published runs
the notebook shows the epochs, the losses and the file that two jobs wrote into.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from common.analysis.scaling.speedups import OVER_RUNS, Speedup
from common.analysis.scaling.study import Compared, Configuration
from common.analysis.scaling.text_study import passes, updates_per_epoch
from common.analysis.scaling.training_run import ScalingRun
from common.analysis.style import (
    BLACK,
    BLUE,
    CYCLE,
    GOOD_EFFICIENCY,
    GREEN,
    GREY,
    PLATE,
    RED,
    SKY,
    THOUSANDS,
    figure,
    legend_above,
    log_axis,
)
from common.runtime.wording import counted
from common.samples import LEAST_ROUNDS

ONE_RANK, COUNTED, PRINTED, PER_SAMPLE = "one rank", "counted", "printed", "per sample"
LABELS = {
    ONE_RANK: "one rank",
    COUNTED: "speedup (samples counted)",
    PRINTED: "as printed: epoch times, samples not counted",
    PER_SAMPLE: "per sample",
}
COLOURS = {ONE_RANK: SKY, COUNTED: BLUE, PRINTED: GREY, PER_SAMPLE: GREEN}
HIGHEST = 1.2
"""Wide intervals are cut off at so many times the ideal."""
NAME_LETTERS = 18
PERCENT = PercentFormatter(1, symbol=" %")
MARKERS = "osD^vP*X"


def epoch_time_detailed(compared: Sequence[Compared], caption: str) -> Figure:
    """Draws the seconds of each epoch's training, and their spread; warm-up epochs are hollow."""
    with figure(caption, figsize=(7.2, 4.2), ncols=2, width_ratios=(2, 1.3), sharey=True) as (
        fig,
        (left, right),
    ):
        for index, case in enumerate(compared):
            configuration, colour = case.configuration, _colour(index)
            for run, label, look in _repeats(configuration, colour):
                epochs, times = run.epochs["epoch"], run.epochs["train_time_s"]
                warm = epochs <= configuration.warmup
                left.plot(epochs[~warm], times[~warm], linewidth=1, label=label, **look)
                left.plot(epochs[warm], times[warm], linestyle="none", mfc="white", **look)
            times = configuration.epoch_times_s
            right.boxplot(
                times,
                positions=[index],
                widths=0.6,
                patch_artist=True,
                boxprops={"facecolor": colour, "alpha": 0.6},
                medianprops={"color": BLACK},
                flierprops={"markersize": 3},
            )
            _number(right, f"{np.mean(times):.3g}", index, times.max())
        runs = [run for case in compared for run in case.configuration.runs]
        left.set_ylim(0, 1.1 * max(run.epochs["train_time_s"].max() for run in runs))
        left.set(xlabel="epoch (hollow: warm-up)", ylabel="training time of an epoch (s)")
        left.xaxis.set_major_locator(MaxNLocator(integer=True))
        _names(right, compared)
        right.set_title("spread and mean", loc="left", fontsize=9.5)
        fig.legend(loc="outside upper center", ncols=min(4, len(compared)), fontsize=8)
    return fig


def speedup_efficiency(compared: Sequence[Compared], caption: str) -> Figure:
    """Draws speedup over one rank and efficiency, with the ideal and the 80 % lines."""
    with figure(caption, figsize=(7.2, 4.4), ncols=2) as (fig, (left, right)):
        for index, case in enumerate(compared):
            bars = _bars(case)
            for number, (kind, speedup) in enumerate(bars):
                width = 0.8 / len(bars)
                x = index - 0.4 + width * (number + 0.5)
                _bar(left, x, width, kind, speedup, 1.0, "{:.2f}x")
                _bar(right, x, width, kind, speedup, 1 / speedup.ranks, "{:.1%}")
            if not bars:
                for axes in (left, right):
                    axes.text(index, 0, "n/a", ha="center", va="bottom", color=GREY)
            _reference(left, (index - 0.45, index + 0.45), case.configuration.ranks)
        _reference(right, (-0.5, len(compared) - 0.5), 1.0)
        left.set_ylabel("speedup over one rank")
        right.set_ylabel("efficiency: speedup / ranks")
        right.yaxis.set_major_formatter(PERCENT)
        highest = max([case.shown.value for case in compared if case.shown] or [1.0])
        most = max(case.configuration.ranks for case in compared)
        for axes, ideal in ((left, most), (right, 1)):
            axes.set_ylim(0, min(1.12 * axes.get_ylim()[1], 1.2 * max(highest, HIGHEST * ideal)))
            _names(axes, compared)
        legend_above(fig, 3)
    return fig


def _bar(
    axes: Axes, x: float, width: float, kind: str, speedup: Speedup, scale: float, form: str
) -> None:
    """Draws one bar with its interval and its number."""
    value, error = speedup.value * scale, _error(speedup, scale)
    axes.bar(
        x,
        value,
        width * 0.92,
        yerr=error,
        error_kw={"elinewidth": 1.1, "capsize": 2.5},
        color=COLOURS[kind],
        alpha=0.85,
        hatch="////" if kind == PRINTED else "",
        edgecolor="white",
        label=LABELS[kind],
    )
    highest = max(value, HIGHEST * speedup.ranks * scale)
    top = value if error is None else min(speedup.high * scale, highest)
    _number(axes, form.format(value).replace("%", " %"), x, top, fontsize=7.5, bbox=PLATE)


def throughput(compared: Sequence[Compared], caption: str) -> Figure:
    """Draws the samples that all ranks compute in a second, and N times one rank's."""
    with figure(caption, figsize=(7.2, 3.9)) as (fig, axes):
        for index, case in enumerate(compared):
            rate = case.configuration.throughput_samples_per_s
            if rate is None:
                axes.text(index, 0, "n/a", ha="center", va="bottom", color=GREY)
                continue
            axes.bar(index, rate, 0.7, color=_colour(index), alpha=0.8)
            number = f"{rate:,.0f}"
            axes.text(index, 0.5 * rate, number, ha="center", va="center", fontsize=9, bbox=PLATE)
            base = case.base.throughput_samples_per_s if case.base else None
            if base is not None and not case.is_base:
                ends = index - 0.45, index + 0.45
                _reference(axes, ends, base * case.configuration.ranks)
        axes.set_ylabel("samples computed per second, all ranks")
        axes.set_ylim(0, 1.05 * max(axes.get_ylim()[1], 1))
        axes.yaxis.set_major_formatter(THOUSANDS)
        _names(axes, compared)
        legend_above(fig, 2)
    return fig


def accuracy(compared: Sequence[Compared], caption: str) -> Figure:
    """Draws validation accuracy by epoch, and by time spent training."""
    with figure(caption, figsize=(7.2, 3.9), ncols=2, sharey=True) as (fig, (left, right)):
        for index, case in enumerate(compared):
            for run, label, look in _repeats(case.configuration, _colour(index)):
                table = run.epochs.dropna(subset="val_accuracy")
                left.plot(table["epoch"], table["val_accuracy"], label=label, lw=1.2, **look)
                if run.epochs["epoch"].iloc[0] == 1:  # else the time before is not known
                    spent = run.epochs["train_time_s"].cumsum()[table.index]
                    right.plot(spent, table["val_accuracy"], lw=1.2, **look)
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
"""Figures by the end of their names; each takes the cases of a data set, and a caption."""


def _colour(index: int) -> str:
    return CYCLE[index % len(CYCLE)]


def _repeats(
    configuration: Configuration, colour: str
) -> Iterator[tuple[ScalingRun, str | None, dict[str, object]]]:
    """Yields a configuration's runs, each with the look of its line; the first has the label."""
    for repeat, run in enumerate(configuration.runs):
        look = {"color": colour, "marker": MARKERS[repeat % len(MARKERS)], "markersize": 4}
        yield run, configuration.name if repeat == 0 else None, look


def _number(axes: Axes, text: str, x: float, top: float, **look: object) -> None:
    """Writes a number above a bar or a box."""
    offset = {"textcoords": "offset points", "ha": "center", "va": "bottom"}
    axes.annotate(text, (x, top), (0, 2), **offset, **look)


def _bars(case: Compared) -> list[tuple[str, Speedup]]:
    if case.is_base:
        bars = [(ONE_RANK, case.speedup)]
    else:
        bars = [(COUNTED, case.speedup), (PRINTED, case.printed)]
        bars += [(PER_SAMPLE, case.per_sample)] if case.speedup is None else []
    return [(kind, speedup) for kind, speedup in bars if speedup is not None]


def _error(speedup: Speedup, scale: float) -> list[list[float]] | None:
    has_few_runs = speedup.over == OVER_RUNS and speedup.repeats < LEAST_ROUNDS
    if np.isnan(speedup.low) or speedup.low == speedup.high or has_few_runs:
        return None
    below, above = speedup.value - speedup.low, speedup.high - speedup.value
    return [[max(0, below) * scale], [max(0, above) * scale]]


def _reference(axes: Axes, ends: tuple[float, float], ideal: float) -> None:
    """Draws the ideal and 80 % of it."""
    for share, style, name in ((1.0, "--", "ideal"), (GOOD_EFFICIENCY, ":", "80 % of the ideal")):
        axes.hlines(ideal * share, *ends, color=BLACK, linestyle=style, linewidth=1.2, label=name)


def _names(axes: Axes, compared: Sequence[Compared]) -> None:
    names = [
        "\n".join(textwrap.fill(part, NAME_LETTERS) for part in case.configuration.name.split(", "))
        for case in compared
    ]
    axes.set_xticks(range(len(compared)), names, fontsize=8.5 if len(names) < 4 else 7.5)
    axes.set_xlim(-0.6, len(compared) - 0.4)
    axes.grid(axis="x", visible=False)


def epoch_times(studies: Mapping[str, Sequence[Compared]], caption: str) -> Figure:
    """Draws the mean training time of an epoch by ranks, a group per data set and model."""
    groups: dict[str, list[Compared]] = {}
    for dataset, compared in studies.items():
        for case in compared:
            model = case.configuration.identity.model
            several = len({other.configuration.identity.model for other in compared}) > 1
            groups.setdefault(f"{dataset}\n{model}" if several else dataset, []).append(case)
    sizes = sorted({case.configuration.ranks for cases in groups.values() for case in cases})
    shades = {ranks: _colour(index) for index, ranks in enumerate(sizes)}
    with figure(caption) as (fig, axes):
        for index, cases in enumerate(groups.values()):
            for number, case in enumerate(cases):
                x = index + (number - (len(cases) - 1) / 2) * 0.36
                times, ranks = case.configuration.epoch_times_s, case.configuration.ranks
                low, high = np.quantile(times, [0.05, 0.95])
                mean = float(times.mean())
                axes.bar(
                    x,
                    mean,
                    width=0.33,
                    color=shades[ranks],
                    alpha=0.85,
                    yerr=[[max(0, mean - low)], [max(0, high - mean)]],
                    error_kw={"elinewidth": 1.1, "capsize": 2.5},
                    label=counted(ranks, "GPU") if index == 0 else None,
                )
                _number(axes, f"{mean:.1f} s", x, high, fontsize=8.5)
        axes.set_xticks(range(len(groups)), list(groups))
        axes.grid(axis="x", visible=False)
        axes.set_ylabel("training time of an epoch (s)")
        fig.legend(loc="outside upper center", ncols=2, fontsize=8)
    return fig


def losses(alone: Compared, several: Compared, caption: str, by: str = "passes") -> Figure:
    """Draws training loss on one and on several GPUs: by epoch as printed, and by work done.

    Work is measured ``by`` passes over the data, or by updates of the weights.
    """
    per_epoch, name = {
        "passes": (passes, "passes over the data"),
        "updates": (updates_per_epoch, "updates of the weights"),
    }[by]
    with figure(caption, ncols=2, sharey=True) as (fig, (left, right)):
        for configuration, colour in ((alone.configuration, BLUE), (several.configuration, RED)):
            work = per_epoch(configuration)
            for run, label, look in _repeats(configuration, colour):
                epochs, loss = run.epochs["epoch"], run.epochs["train_loss"]
                left.plot(epochs, loss, label=label, lw=1.2, **look)
                right.plot(epochs * work, loss, lw=1.2, **look)
        for axes, label in ((left, "epoch as printed"), (right, name)):
            log_axis(axes, subs=(1, 2, 5))
            axes.set_xlabel(label)
            axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        left.set_ylabel("training loss (nats)")
        fig.legend(loc="outside upper center", ncols=2, fontsize=8)
    return fig


def mixed_rows(rows: pd.DataFrame, caption: str) -> Figure:
    """Draws the epochs of a file in the order they were written: a line per job."""
    with figure(caption, figsize=(7.2, 3.3)) as (fig, axes):
        axes.plot(rows["row"], rows["epoch"], color=GREY, linewidth=0.7, label="the file")
        for (job, written), colour in zip(rows.groupby("job"), CYCLE, strict=False):
            label = f"job {job}: epochs {written['epoch'].min()} to {written['epoch'].max()}"
            axes.plot(
                written["row"], written["epoch"], "o-", color=colour, markersize=4, label=label
            )
        axes.set(xlabel="row of metrics.csv", ylabel="epoch")
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
        axes.legend(fontsize=8)
    return fig
