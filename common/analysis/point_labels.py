"""Names beside points, none on top of another."""

from __future__ import annotations

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

from common.analysis.plots import GREY

ANGLES = np.deg2rad([30, -30, 150, -150, 0, 180, 90, -90, 60, -60, 120, -120])
DISTANCES = (4, 12, 24, 38, 54, 72, 92)  # points from the rim of a marker
LINE_FROM = 12


def label_points(
    fig: Figure, axes: Axes, points: np.ndarray, radii: np.ndarray, names: Sequence[str]
) -> None:
    """Name the first ``len(names)`` points of a finished figure.

    Places around a point are tried from near to far, and the first is taken where the name covers
    neither another name, nor a marker, a line or a text of the figure; one further off is joined to
    its point.

    Args:
        points: [number, 2], x and y of all markers.
        radii: of the markers, in points (1/72 inch).
        names: of the first markers.
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
        others = [*written, *markers[:index], *markers[index + 1 :]]
        best: tuple[int, Annotation | None] = (10**6, None)
        for distance, angle in ((d, a) for d in DISTANCES for a in ANGLES):
            label = _annotate(axes, points[index], name, radii[index], distance, angle)
            box = text_box(label, renderer)
            clashes = sum(box.overlaps(other) for other in others) + (not _inside(box, frame))
            clashes += bool(lines.size) and _crosses(lines, box.padded(2))
            if clashes < best[0]:
                best, label = (clashes, label), best[1]
            if label is not None:
                label.remove()
            if best[0] == 0:
                break
        written.append(text_box(best[1], renderer).padded(2))


def text_box(label: Annotation, renderer: RendererBase) -> Bbox:
    """What a label's text covers, in pixels, without the line to its point."""
    label.update_positions(renderer)
    return Text.get_window_extent(label, renderer)


def _pixels(line: Line2D) -> np.ndarray:
    """Points on a line as it is drawn, [number, 2], close enough that no text fits between two."""
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
