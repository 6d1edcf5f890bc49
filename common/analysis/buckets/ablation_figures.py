"""The figures of the ablation: what each term adds, and the band that samples leave."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter
from numpy.typing import NDArray

from common.analysis.buckets.ablation import ADDED, LEFT_OUT
from common.analysis.buckets.sweep import BucketSweep
from common.analysis.style import BLACK, BLUE, CYCLE, GREY, PLAIN, cap_axis, figure

MARKERS = "os^Dv"
BESIDE = 0.16
"""Distance between networks within a row of the figure."""


def plot_terms(table: pd.DataFrame, caption: str) -> Figure:
    """Draws median error by term, a colour per network: terms added, and left out, one by one.

    Solid lines on the right are the full model, dotted ones the noise floor of a network's sweep.

    Args:
        table: of ``ablation.term_errors``.
        caption: where the data come from.
    """
    networks = list(dict.fromkeys(table["network"]))
    with figure(caption, figsize=(7.2, 4.6), ncols=2, sharex=True) as (fig, (left, right)):
        for place, network in enumerate(networks):
            own = table[table["network"] == network]
            look = {
                "color": CYCLE[place % len(CYCLE)],
                "marker": MARKERS[place % len(MARKERS)],
                "markersize": 5.5,
            }
            offset = BESIDE * (place - (len(networks) - 1) / 2)
            added, others = (own[(own["group"] == ADDED) == kind] for kind in (True, False))
            y = _places(table, [ADDED], added) + offset
            left.plot(added["median_error"] * 100, y, **look, linewidth=1, label=network)
            y = _places(table, [LEFT_OUT], others) + offset
            right.plot(others["median_error"] * 100, y, **look, linestyle="none")
            full = float(added["median_error"].iloc[-1]) * 100
            right.axvline(full, color=look["color"], linewidth=1)
            for axes in (left, right):
                floor = own["noise_floor"].iloc[0] * 100
                axes.axvline(floor, color=look["color"], linestyle=":", linewidth=1.2)
        _name_terms(left, table, [ADDED])
        _name_terms(right, table, [LEFT_OUT])
        left.set_title("adding term by term", loc="left", fontsize=9.5)
        right.set_title("leaving one term out", loc="left", fontsize=9.5)
        left.plot([], [], ":", color=GREY, linewidth=1.2, label="noise floor")
        left.plot([], [], color=GREY, linewidth=1, label="full model")
        for axes in (left, right):
            axes.set_xscale("log")
            axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axes.xaxis.set_major_formatter(PLAIN)
            axes.xaxis.set_minor_formatter(NullFormatter())
            axes.set_xlabel("median error (%)")
        fig.legend(loc="outside upper center", ncols=len(networks) + 2, fontsize=8)
    return fig


def _labels(table: pd.DataFrame, groups: list[str]) -> list[tuple[str, str]]:
    chosen = table[table["group"].isin(groups)]
    return list(dict.fromkeys(zip(chosen["group"], chosen["term"], strict=True)))


def _places(table: pd.DataFrame, groups: list[str], rows: pd.DataFrame) -> NDArray:
    labels = _labels(table, groups)
    return np.array([labels.index(key) for key in zip(rows["group"], rows["term"], strict=True)])


def _name_terms(axes: Axes, table: pd.DataFrame, groups: list[str]) -> None:
    signs = {ADDED: "", LEFT_OUT: "− "}
    labels = [signs[group] + term for group, term in _labels(table, groups)]
    axes.set_yticks(range(len(labels)), labels, fontsize=8.5)
    axes.invert_yaxis()


def plot_bands(table: pd.DataFrame, caption: str, sweep: BucketSweep | None = None) -> Figure:
    """Draws T(b) with the band that the samples leave, and the measured medians with quartiles.

    Args:
        table: of ``PredictionBands``.
        caption: where the data come from.
        sweep: what was measured.
    """
    shown = table.dropna(subset="bucket_cap_mib").sort_values("bucket_cap_mib")
    with figure(caption) as (fig, axes):
        caps = shown["bucket_cap_mib"]
        axes.fill_between(
            caps,
            shown["low_ms"],
            shown["high_ms"],
            color=BLUE,
            alpha=0.2,
            linewidth=0,
            label="predicted, 90 % of the draws",
        )
        axes.plot(caps, shown["predicted_ms"], color=BLUE, label="predicted")
        if sweep is not None:
            measured = sweep.summary().dropna(subset="bucket_cap_mib")
            middle = measured["median_ms"]
            bars = np.array([middle - measured["q25_ms"], measured["q75_ms"] - middle])
            axes.errorbar(
                measured["bucket_cap_mib"],
                middle,
                yerr=bars,
                fmt="o",
                color=BLACK,
                markersize=5,
                capsize=3,
                lw=1,
                label="measured (median, quartiles)",
            )
        cap_axis(axes, "bucket cap b (MiB)")
        axes.set_ylabel("backward pass T(b) (ms)")
        axes.legend(fontsize=8)
    return fig
