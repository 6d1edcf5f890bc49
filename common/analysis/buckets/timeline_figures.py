"""The backward pass as predicted and as measured, one above the other on the same clock."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from common.analysis.style import BLACK, GREEN, ORANGE, RED, SKY, figure
from common.perfmodel.ddp.timeline import BackwardTimeline
from common.perfmodel.perfetto_trace import ALL_REDUCE, COMPUTATION, COPIES, slices

ROWS = {COMPUTATION: 2, ALL_REDUCE: 1, COPIES: 0}
COLOURS = {COMPUTATION: SKY, ALL_REDUCE: ORANGE, COPIES: GREEN}
HEIGHT = 0.62
SMALLEST_LABELLED = 0.022
"""Share of the width that a box needs for its bucket's number."""
SMALLEST_EDGED = 0.004
"""Share of the width below which a white edge would hide a box."""


def predicted_and_measured(
    predicted: BackwardTimeline,
    measured: BackwardTimeline | None,
    caption: str,
    title: str = "",
) -> Figure:
    """Draws computation, all-reduces and copies of each pass; where only one is known, that one.

    Boxes carry the number of their bucket; all-reduces that are in flight together share a row.
    The dashed line is the end of the other pass.
    """
    passes = {"predicted": predicted} | ({"measured": measured} if measured else {})
    longest_ms = max(timeline.total_s for timeline in passes.values()) * 1e3
    size = (7.2, 1.1 + 1.55 * len(passes))
    with figure(caption, size, nrows=len(passes), sharex=True, squeeze=False) as (fig, grid):
        for axes, (name, timeline) in zip(grid[:, 0], passes.items(), strict=True):
            _draw(axes, timeline, longest_ms)
            axes.set_title(f"{name}: {timeline.total_s * 1e3:.1f} ms", loc="left", fontsize=9)
            for other in passes.values():
                if other is not timeline:
                    axes.axvline(other.total_s * 1e3, color=BLACK, linestyle="--", linewidth=0.8)
        grid[-1, 0].set_xlabel("time since the backward pass began (ms)")
        fig.suptitle(title, x=0.01, ha="left", fontsize=9.5)
    return fig


def _draw(axes: Axes, timeline: BackwardTimeline, longest_ms: float) -> None:
    boxes = slices(timeline)
    lanes = 1 + max((box.lane for box in boxes), default=0)
    for box in boxes:
        start_ms, length_ms = box.start_s * 1e3, (box.end_s - box.start_s) * 1e3
        height = HEIGHT / lanes if box.kind == ALL_REDUCE else HEIGHT
        middle = ROWS[box.kind]
        if box.kind == ALL_REDUCE:
            middle += HEIGHT / 2 - (box.lane + 0.5) * height
        axes.barh(
            middle,
            length_ms,
            left=start_ms,
            height=height,
            color=COLOURS[box.kind],
            edgecolor="white",
            linewidth=0.4 if length_ms > SMALLEST_EDGED * longest_ms else 0,
        )
        if box.event and length_ms > SMALLEST_LABELLED * longest_ms:
            number, place = f"{box.event.index + 1}", start_ms + length_ms / 2
            axes.text(place, middle, number, ha="center", va="center", fontsize=6.5)
    ready_ms = [event.ready_s * 1e3 for event in timeline.events]
    axes.vlines(ready_ms, 1.31, 1.69, color=BLACK, linewidth=0.6)
    total_ms, end_ms = timeline.total_s * 1e3, timeline.compute_end_s * 1e3
    axes.axvspan(end_ms, total_ms, color=RED, alpha=0.12, linewidth=0)
    axes.set_yticks(list(ROWS.values()), list(ROWS))
    axes.set_ylim(-0.45, 2.45)
    axes.set_xlim(0, longest_ms * 1.01)
    axes.grid(axis="y", visible=False)
