"""The two figures of a profile: where a step goes, and its operators below the roofline."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backend_bases import RendererBase
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.path import Path
from matplotlib.text import Annotation, Text
from matplotlib.transforms import Bbox

from common.analysis.one_device.profile import ProfileRun
from common.analysis.one_device.profile_text import short_name
from common.analysis.style import BLACK, BLUE, GREEN, GREY, ORANGE, PURPLE, RED, SKY, YELLOW, figure
from common.perfmodel.one_device.roofline import Roof
from common.traces.operator_categories import (
    ATTENTION,
    BOOKKEEPING,
    CATEGORIES,
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
from common.traces.trace_work import BETWEEN, PHASES

COLOURS = {
    MATRIX: BLUE,
    ATTENTION: SKY,
    NORMALISATION: GREEN,
    ELEMENTWISE: ORANGE,
    FUSED: YELLOW,
    LOSS: PURPLE,
    EMBEDDING: "#8C6D9E",
    OPTIMIZER: RED,
    DATA: BLACK,
    COPIES: GREY,
    BOOKKEEPING: "#bdbdbd",
    OTHER: "#5c4a1f",
    IDLE: "#ffffff",
}
DARK = (MATRIX, NORMALISATION, OPTIMIZER, DATA, OTHER, EMBEDDING)
"""Kinds of work whose colour takes white numbers."""
PHASE_COLOURS = {"forward": BLUE, "backward": ORANGE, "optimizer": GREEN, "data": BLACK}
LABELLED = 0.06  # of the longest bar: narrower parts carry no number
MOST_LABELS = 8

ANGLES = np.deg2rad([30, -30, 150, -150, 0, 180, 90, -90, 60, -60, 120, -120])
DISTANCES = (4, 12, 24, 38, 54, 72, 92)  # points from the rim of a marker
LINE_FROM = 12


def step_parts(run: ProfileRun) -> Figure:
    """Draws where one step goes: a bar per phase, cut into kinds of work, in milliseconds."""
    table = run.step.groupby(["phase", "category"])["time_us"].sum().unstack(fill_value=0.0) / 1e3
    phases, kinds = [*PHASES, BETWEEN], [*CATEGORIES]
    table = table.reindex(index=phases, columns=kinds, fill_value=0.0)
    table = table[table.sum(axis=1) > 0.002 * run.step_ms]
    table = table.loc[:, table.sum() > 0]
    with figure(run.caption, figsize=(7.2, 1.9 + 0.5 * len(table))) as (fig, axes):
        longest = table.sum(axis=1).max()
        starts = np.zeros(len(table))
        for category in table.columns:
            widths = table[category].to_numpy()
            bars = axes.barh(
                table.index,
                widths,
                left=starts,
                height=0.62,
                color=COLOURS[category],
                edgecolor=GREY if category == IDLE else "white",
                linewidth=0.5,
                hatch="////" if category == IDLE else None,
                label=run.category_name(category),
            )
            axes.bar_label(
                bars,
                [_ms(width) if width > LABELLED * longest else "" for width in widths],
                label_type="center",
                fontsize=8,
                color="white" if category in DARK else "black",
            )
            starts += widths
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
    """Returns three digits, and never a power of ten."""
    return f"{value:.3g}" if value < 999.5 else f"{value:,.0f}"


def roofline(run: ProfileRun) -> Figure:
    """Draws achieved operations per second over intensity, below the device's roof, log-log.

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
        axes.set(xscale="log", yscale="log", xlim=(x.min() / 3, x.max() * 6))
        axes.set_ylim(y.min() / 4, y.max() * 6)
        if run.roof is not None:
            _draw_roof(axes, run.roof)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.set(xlabel="intensity (FLOP per byte moved)", ylabel="achieved (GFLOP/s)")
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
    """Draws the line, its two figures and the ridge, within the limits of the axes' x."""
    low, high = axes.get_xlim()
    peak, bandwidth = roof.flops_per_s / 1e9, roof.memory_bytes_per_s / 1e9
    x = [low, np.clip(roof.ridge, low, high), high]
    axes.plot(x, [roof.attainable_flops_per_s(value) / 1e9 for value in x], color=BLACK, zorder=2)
    bottom, top = axes.get_ylim()
    axes.set_ylim(bottom, max(top, peak * 3))
    axes.axvline(roof.ridge, color=GREY, linewidth=0.8, linestyle=":", zorder=1)
    axes.text(
        high / 1.1, peak * 1.15, f"peak {peak:,.0f} GFLOP/s", ha="right", va="bottom", fontsize=8
    )
    axes.text(
        roof.ridge * 1.06,
        bottom * 1.2,
        f"ridge {roof.ridge:.3g} FLOP/B",
        color="#666666",
        va="bottom",
        fontsize=8,
    )
    at = max(low * 1.3, bottom / bandwidth * 1.5)
    axes.text(
        at,
        at * bandwidth * 1.15,
        f"memory {bandwidth:,.0f} GB/s",
        va="bottom",
        fontsize=8,
        rotation=np.rad2deg(np.arctan(1.15 * bandwidth)),  # along the line in log-log
        rotation_mode="anchor",
        transform_rotates_text=True,
    )


def label_points(
    fig: Figure, axes: Axes, points: np.ndarray, radii: np.ndarray, names: Sequence[str]
) -> None:
    """Writes names beside the first ``len(names)`` points of a finished figure.

    Places around a point are tried from near to far, and the first is taken where the name covers
    neither another name, nor a marker, a line or a text of the figure; one further off is joined to
    its point.

    Args:
        fig: Figure; its layout is fixed from here on.
        axes: Axes of the points.
        points: Coordinates x and y of all markers, [number, 2].
        radii: Radii of the markers, in points (1/72 inch).
        names: Names of the first markers.
    """
    renderer = FigureCanvasAgg(fig).get_renderer()
    fig.draw_without_rendering()  # the layout is fixed from here on, so that boxes stay true
    fig.set_layout_engine("none")
    pixels = axes.transData.transform(points)
    reach = np.asarray(radii) * fig.dpi / 72
    markers = [
        Bbox.from_extents(x - r, y - r, x + r, y + r)
        for (x, y), r in zip(pixels, reach, strict=True)
    ]
    written = [text.get_window_extent(renderer) for text in axes.texts]
    if axes.get_legend():
        written.append(axes.get_legend().get_window_extent(renderer))
    curves = [line for line in axes.lines if line.get_zorder() >= 2]  # below that, mere guides
    lines = np.concatenate([_pixels(line) for line in curves] or [np.empty((0, 2))])
    frame = axes.get_window_extent(renderer)
    for index, name in enumerate(names):
        taken = [*written, *markers[:index], *markers[index + 1 :]]
        # Every place is tried with a real label, because only that one knows its box. The label
        # with the fewest clashes so far stays on the figure; the other of the two is removed.
        best: tuple[int, Annotation | None] = (10**6, None)
        for distance, angle in itertools.product(DISTANCES, ANGLES):
            label = _annotate(axes, points[index], name, radii[index], distance, angle)
            box = text_box(label, renderer)
            clashes = sum(box.overlaps(other) for other in taken) + (not _inside(box, frame))
            clashes += bool(lines.size) and _crosses(lines, box.padded(2))
            if clashes < best[0]:
                best, label = (clashes, label), best[1]
            if label is not None:
                label.remove()
            if best[0] == 0:
                break
        written.append(text_box(best[1], renderer).padded(2))


def text_box(label: Annotation, renderer: RendererBase) -> Bbox:
    """Returns the box that a label's text covers, in pixels, without the line to its point."""
    label.update_positions(renderer)
    return Text.get_window_extent(label, renderer)


def _pixels(line: Line2D) -> np.ndarray:
    """Returns points on a drawn line, [number, 2], so close that no text fits between two."""
    corners = line.get_transform().transform(np.column_stack(line.get_data()))
    return Path(corners).interpolated(200).vertices


def _crosses(points: np.ndarray, box: Bbox) -> bool:
    low, high = points >= box.min, points <= box.max
    return bool((low & high).all(axis=1).any())


def _annotate(
    axes: Axes, at: np.ndarray, name: str, radius: float, distance: float, angle: float
) -> Annotation:
    across, up = np.cos(angle), np.sin(angle)
    away = radius + distance
    line = {"arrowstyle": "-", "color": GREY, "linewidth": 0.6, "shrinkB": radius}
    return axes.annotate(
        name,
        at,
        xytext=(away * across, away * up),
        textcoords="offset points",
        ha="left" if across > 0.1 else "right" if across < -0.1 else "center",
        va="bottom" if up > 0.1 else "top" if up < -0.1 else "center",
        fontsize=7.5,
        arrowprops=line if distance >= LINE_FROM else None,
        zorder=4,
    )


def _inside(box: Bbox, frame: Bbox) -> bool:
    return frame.x0 <= box.x0 and box.x1 <= frame.x1 and frame.y0 <= box.y0 and box.y1 <= frame.y1
