"""The figures of the ablation: what each term adds, and the band that samples leave."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from common.analysis.buckets.ablation import ADDED, LEFT_OUT
from common.analysis.buckets.sweep import BucketSweep
from common.analysis.style import BLUE, CYCLE, GREY, MEASURED, cap_axis, figure, log_axis

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
    with figure(caption, figsize=(7.2, 4.6), ncols=2, sharex=True) as (fig, (left, right)):
        for index, network in enumerate(networks):
            rows = table[table["network"] == network]
            look = {
                "color": CYCLE[index % len(CYCLE)],
                "marker": MARKERS[index % len(MARKERS)],
                "markersize": 5.5,
            }
            offset = BESIDE * (index - (len(networks) - 1) / 2)
            added, without = (rows[rows["group"] == group] for group in (ADDED, LEFT_OUT))
            y = _heights(table, ADDED, added) + offset
            left.plot(added["median_error"] * 100, y, **look, linewidth=1, label=network)
            y = _heights(table, LEFT_OUT, without) + offset
            right.plot(without["median_error"] * 100, y, **look, linestyle="none")
            full = float(added["median_error"].iloc[-1]) * 100
            right.axvline(full, color=look["color"], linewidth=1)
            for axes in (left, right):
                floor = rows["noise_floor"].iloc[0] * 100
                axes.axvline(floor, color=look["color"], linestyle=":", linewidth=1.2)
        _name_terms(left, table, ADDED)
        _name_terms(right, table, LEFT_OUT)
        left.set_title("adding term by term", loc="left", fontsize=9.5)
        right.set_title("leaving one term out", loc="left", fontsize=9.5)
        left.plot([], [], ":", color=GREY, linewidth=1.2, label="noise floor")
        left.plot([], [], color=GREY, linewidth=1, label="full model")
        for axes in (left, right):
            log_axis(axes, "x", (1, 2, 5))
            axes.set_xlabel("median error (%)")
        fig.legend(loc="outside upper center", ncols=len(networks) + 2, fontsize=8)
    return fig


def _heights(table: pd.DataFrame, group: str, rows: pd.DataFrame) -> NDArray:
    """Returns the height of each row's term, in the order of the terms of a group."""
    terms = list(dict.fromkeys(table.loc[table["group"] == group, "term"]))
    return np.array([terms.index(term) for term in rows["term"]])


def _name_terms(axes: Axes, table: pd.DataFrame, group: str) -> None:
    terms = dict.fromkeys(table.loc[table["group"] == group, "term"])
    sign = {ADDED: "", LEFT_OUT: "− "}[group]
    axes.set_yticks(range(len(terms)), [sign + term for term in terms], fontsize=8.5)
    axes.invert_yaxis()


def plot_bands(table: pd.DataFrame, caption: str, sweep: BucketSweep | None = None) -> Figure:
    """Draws T(b) with the band that the samples leave, and the measured medians with quartiles.

    Args:
        table: Table of ``PredictionBands``.
        caption: Hardware, date and source.
        sweep: Measured steps.
    """
    bands = table.dropna(subset="bucket_cap_mib").sort_values("bucket_cap_mib")
    with figure(caption) as (fig, axes):
        caps = bands["bucket_cap_mib"]
        axes.fill_between(
            caps,
            bands["low_ms"],
            bands["high_ms"],
            color=BLUE,
            alpha=0.2,
            linewidth=0,
            label="predicted, 90 % of the draws",
        )
        axes.plot(caps, bands["predicted_ms"], color=BLUE, label="predicted")
        if sweep is not None:
            measured = sweep.summary().dropna(subset="bucket_cap_mib")
            middle = measured["median_ms"]
            bars = np.array([middle - measured["q25_ms"], measured["q75_ms"] - middle])
            caps, label = measured["bucket_cap_mib"], "measured (median, quartiles)"
            axes.errorbar(caps, middle, yerr=bars, label=label, **MEASURED)
        cap_axis(axes, "bucket cap b (MiB)")
        axes.set_ylabel("backward pass T(b) (ms)")
        axes.legend(fontsize=8)
    return fig
