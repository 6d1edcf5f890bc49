"""The two figures of a profile: where a step goes, and its operators below the roofline."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from common.analysis.assignment0_profile import ProfileRun
from common.analysis.operator_categories import (
    ATTENTION,
    BOOKKEEPING,
    COPIES,
    DATA,
    ELEMENTWISE,
    EMBEDDING,
    FUSED,
    IDLE,
    LOSS,
    MATRIX,
    NORMALISATION,
    OPTIMIZER,
    OTHER,
)
from common.analysis.plots import BLACK, BLUE, GREEN, GREY, ORANGE, PURPLE, RED, SKY, figure
from common.analysis.point_labels import label_points
from common.analysis.profile_text import short_name
from common.perfmodel.roofline import Roof

YELLOW = "#F0E442"  # Okabe and Ito's eighth
COLOURS = {
    **{MATRIX: BLUE, ATTENTION: SKY, NORMALISATION: GREEN, ELEMENTWISE: ORANGE, FUSED: YELLOW},
    **{LOSS: PURPLE, EMBEDDING: "#8C6D9E", OPTIMIZER: RED, DATA: BLACK, COPIES: GREY},
    **{BOOKKEEPING: "#bdbdbd", OTHER: "#5c4a1f", IDLE: "#ffffff"},
}
PHASE_COLOURS = {"forward": BLUE, "backward": ORANGE, "optimizer": GREEN, "data": BLACK}
LABELLED = 0.06  # of the longest bar: narrower parts carry no number
MOST_LABELS = 8


def step_parts(run: ProfileRun) -> Figure:
    """Where one step goes: a bar per phase, cut into kinds of work, in milliseconds."""
    table = run.by_phase()
    table = table[table.sum(axis=1) > 0.002 * run.step_ms]
    table = table.loc[:, table.sum() > 0]
    with figure(run.caption, figsize=(7.2, 1.9 + 0.5 * len(table))) as (fig, axes):
        longest = table.sum(axis=1).max()
        left = np.zeros(len(table))
        for category in table.columns:
            widths = table[category].to_numpy()
            bars = axes.barh(
                table.index,
                widths,
                left=left,
                height=0.62,
                color=COLOURS[category],
                edgecolor=GREY if category == IDLE else "white",
                linewidth=0.5,
                hatch="////" if category == IDLE else None,
                label=run.category_name(category),
            )
            dark = category in (MATRIX, NORMALISATION, OPTIMIZER, DATA, OTHER, EMBEDDING)
            texts = [_ms(w) if w > LABELLED * longest else "" for w in widths]
            colour = "white" if dark else "black"
            axes.bar_label(bars, texts, label_type="center", fontsize=8, color=colour)
            left += widths
        for row, total in enumerate(table.sum(axis=1)):
            text = f"{_ms(total)} ms, {total / run.step_ms:.0%}"
            axes.text(total + 0.012 * longest, row, text, va="center", fontsize=8.5)
        axes.invert_yaxis()
        axes.set_xlim(0, longest * 1.2)
        axes.grid(axis="y", visible=False)
        axes.set_xlabel("time in the step (ms)")
        fig.legend(loc="outside upper center", ncols=3, fontsize=8)
    return fig


def _ms(value: float) -> str:
    """Three digits, and never a power of ten."""
    return f"{value:.3g}" if value < 999.5 else f"{value:,.0f}"


def roofline(run: ProfileRun) -> Figure:
    """Achieved operations per second over intensity, below the device's roof, log-log.

    A point per operator and phase, as large as its share of the step; those without arithmetic
    have no place here. The ones with the largest shares are named.
    """
    table = run.main_operators()
    table = table[table["flops"] > 0].nlargest(len(table), "share", keep="all")
    x, y = table["intensity"].to_numpy(), table["achieved_flops_per_s"].to_numpy() / 1e9
    area = 14 + 900 * table["share"].to_numpy()
    with figure(run.caption, figsize=(7.2, 4.6)) as (fig, axes):
        colours = [PHASE_COLOURS.get(phase, GREY) for phase in table["phase"]]
        axes.scatter(x, y, s=area, c=colours, edgecolor="white", linewidth=0.7, zorder=3)
        for phase in (name for name in PHASE_COLOURS if name in set(table["phase"])):
            axes.scatter([], [], s=40, color=PHASE_COLOURS[phase], label=phase)
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlim(x.min() / 3, x.max() * 6)
        axes.set_ylim(y.min() / 4, y.max() * 6)
        if run.roof is not None:
            _draw_roof(axes, run.roof)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.set_xlabel("intensity (FLOP per byte moved)")
        axes.set_ylabel("achieved (GFLOP/s)")
        title = "area: share of the step"
        axes.legend(loc="lower right", fontsize=8, title=title, title_fontsize=8)
    rows = list(table.itertuples())[:MOST_LABELS]
    operators = [short_name(row.operator) for row in rows]
    names = [
        f"{name}{', ' + row.phase if operators.count(name) > 1 else ''} {row.share:.0%}"
        for name, row in zip(operators, rows, strict=True)
    ]
    label_points(fig, axes, np.column_stack([x, y]), np.sqrt(area) / 2, names)
    return fig


def _draw_roof(axes: Axes, roof: Roof) -> None:
    """The line, its two figures and the ridge, within the limits of the axes' x."""
    low, high = axes.get_xlim()
    peak, bandwidth = roof.flops_per_s / 1e9, roof.memory_bytes_per_s / 1e9
    x = [low, np.clip(roof.ridge, low, high), high]
    axes.plot(x, [roof.attainable_flops_per_s(value) / 1e9 for value in x], color=BLACK, zorder=2)
    bottom, top = axes.get_ylim()
    axes.set_ylim(bottom, max(top, peak * 3))
    axes.axvline(roof.ridge, color=GREY, linewidth=0.8, linestyle=":", zorder=1)
    small = {"fontsize": 8, "va": "bottom"}
    axes.text(high / 1.1, peak * 1.15, f"peak {peak:,.0f} GFLOP/s", ha="right", **small)
    axes.text(
        *(roof.ridge * 1.06, bottom * 1.2, f"ridge {roof.ridge:.3g} FLOP/B"),
        color="#666666",
        **small,
    )
    at = max(low * 1.3, bottom / bandwidth * 1.5)
    axes.text(
        *(at, at * bandwidth * 1.15, f"memory {bandwidth:,.0f} GB/s"),
        **small,
        rotation=np.rad2deg(np.arctan(1.15 * bandwidth)),  # along the line in log-log
        rotation_mode="anchor",
        transform_rotates_text=True,
    )
