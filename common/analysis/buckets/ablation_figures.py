"""The figures of the ablation: what each term adds, and the band that samples leave."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from common.analysis.buckets.ablation import ADDED, LEFT_OUT
from common.analysis.buckets.sweep import BucketSweep
from common.analysis.style import BLUE, CYCLE, GREY, MEASURED, band, cap_axis, figure, log_axis

MARKERS = "os^Dv"
BESIDE = 0.16
"""Distance between networks within a row of the figure."""


def plot_terms(table: pd.DataFrame, caption: str) -> Figure:
    """Draws median error by term, a colour per network: terms added, and left out, one by one.

    Solid lines on the right are the full model, dotted ones the noise floor of a network's sweep.

    Args:
        table: Result of ``ablation.term_errors``.
        caption: Hardware, date and source.
    """
    networks = list(dict.fromkeys(table["network"]))
    terms = {group: [*dict.fromkeys(rows["term"])] for group, rows in table.groupby("group")}
    with figure(caption, figsize=(7.2, 4.6), ncols=2, sharex=True) as (fig, (left, right)):
        for index, network in enumerate(networks):
            rows = table[table["network"] == network]
            look = {"color": CYCLE[index % len(CYCLE)], "marker": MARKERS[index % len(MARKERS)]}
            look |= {"markersize": 5.5}
            offset = BESIDE * (index - (len(networks) - 1) / 2)
            added, without = (rows[rows["group"] == group] for group in (ADDED, LEFT_OUT))
            y = [terms[ADDED].index(term) + offset for term in added["term"]]
            left.plot(added["median_error"] * 100, y, **look, linewidth=1, label=network)
            y = [terms[LEFT_OUT].index(term) + offset for term in without["term"]]
            right.plot(without["median_error"] * 100, y, **look, linestyle="none")
            full = float(added["median_error"].iloc[-1]) * 100
            right.axvline(full, color=look["color"], linewidth=1)
            for axes in (left, right):
                floor = rows["noise_floor"].iloc[0] * 100
                axes.axvline(floor, color=look["color"], linestyle=":", linewidth=1.2)
        _name_terms(left, terms[ADDED])
        _name_terms(right, [f"− {term}" for term in terms[LEFT_OUT]])
        left.set_title("adding term by term", loc="left", fontsize=9.5)
        right.set_title("leaving one term out", loc="left", fontsize=9.5)
        left.plot([], [], ":", color=GREY, linewidth=1.2, label="noise floor")
        left.plot([], [], color=GREY, linewidth=1, label="full model")
        for axes in (left, right):
            log_axis(axes, "x", (1, 2, 5))
            axes.set_xlabel("median error (%)")
        fig.legend(loc="outside upper center", ncols=len(networks) + 2, fontsize=8)
    return fig


def _name_terms(axes: Axes, names: Sequence[str]) -> None:
    axes.set_yticks(range(len(names)), names, fontsize=8.5)
    axes.invert_yaxis()


def plot_bands(table: pd.DataFrame, caption: str, sweep: BucketSweep) -> Figure:
    """Draws T(b) with the band that the samples leave, and the measured medians with quartiles.

    Args:
        table: Table of ``PredictionBands``.
        caption: Hardware, date and source.
        sweep: Measured steps.
    """
    bands = table.dropna(subset="bucket_cap_mib").sort_values("bucket_cap_mib")
    with figure(caption) as (fig, axes):
        caps = bands["bucket_cap_mib"]
        label = "predicted, 90 % of the draws"
        band(axes, caps, bands["low_ms"], bands["high_ms"], BLUE, label=label)
        axes.plot(caps, bands["predicted_ms"], color=BLUE, label="predicted")
        measured = sweep.summary().dropna(subset="bucket_cap_mib")
        middle = measured["median_ms"]
        bars = [middle - measured["q25_ms"], measured["q75_ms"] - middle]
        caps, label = measured["bucket_cap_mib"], "measured (median, quartiles)"
        axes.errorbar(caps, middle, yerr=bars, label=label, **MEASURED)
        cap_axis(axes, "bucket cap b (MiB)")
        axes.set_ylabel("backward pass T(b) (ms)")
        axes.legend(fontsize=8)
    return fig
