"""A page of a replay: what was measured, what comes out, and what changes would make of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from markupsafe import Markup
from matplotlib.figure import Figure

from common.analysis.html import rendered
from common.analysis.picture import describe, svg
from common.analysis.style import CYCLE, GREY, figure
from common.perfmodel.perfetto_trace import Box
from common.perfmodel.replay.changes import Predicted
from common.perfmodel.replay.engine import Replayed
from common.perfmodel.replay.timeline import KERNEL, WAITS, replayed_boxes, seen_boxes

TEMPLATE = Path(__file__).parents[1] / "answer.html.j2"
MEASURED, REPLAYED = "measured", "replayed"
MOST_LANES, MOST_CHANGES = 8, 2
"""Lanes and changes that are drawn: of the changes, those that save the most."""


def timelines(base: Replayed, answers: Sequence[Predicted]) -> dict[str, list[Box]]:
    """Returns all timelines: measured, replayed, and with each change that could be judged."""
    changed = {a.name: replayed_boxes(a.replayed) for a in answers if a.replayed is not None}
    return {MEASURED: seen_boxes(base.program), REPLAYED: replayed_boxes(base)} | changed


def page(
    title: str, lines: Sequence[str], base: Replayed, answers: Sequence[Predicted], table: object
) -> str:
    """Returns the page as one file of HTML.

    Args:
        title: name of what was replayed.
        lines: what was read, and how well the replay gives it back.
        base: the replay.
        answers: changes, judged or not.
        table: columns, rows and title of the changes.
    """
    drawn = timeline_figure(base, answers)
    assumed = [f"{a.name}: assumed: {text}" for a in answers for text in a.assumed]
    return rendered(
        TEMPLATE,
        title=title,
        subject=lines[0],
        verdict=lines[1:],
        code="",
        picture=Markup(svg(drawn)),
        words=describe(drawn),
        tables=[table],
        why_not=[f"{a.name}: not judged: {a.not_judged}" for a in answers if a.not_judged],
        basis=assumed or ["nothing was assumed"],
    )


def timeline_figure(base: Replayed, answers: Sequence[Predicted]) -> Figure:
    """Draws one step, in the middle: measured, replayed, and with the changes that save most."""
    judged = sorted((a for a in answers if a.replayed), key=lambda a: -a.gain.estimate)
    chosen = judged[:MOST_CHANGES]
    every = timelines(base, chosen)
    runs = {REPLAYED: base} | {answer.name: answer.replayed for answer in chosen}
    spans = {MEASURED: _seen_step(base)} | {name: _step_of(run) for name, run in runs.items()}
    lanes = _lanes(every[MEASURED])
    names = sorted({box.name for boxes in every.values() for box in boxes}, key=_order)
    colours = dict(zip(names, [*CYCLE, *CYCLE, *CYCLE], strict=False)) | {WAITS: "#dddddd"}
    longest_s = max(end - start for start, end in spans.values())
    caption = (
        "One step in the middle of the trace, from the beginning of its first rank; changes are "
        "predicted. The line is where the step ends on its last rank."
    )
    height = 1.2 + len(every) * (0.5 + 0.24 * len(lanes))
    with figure(caption, (7.2, height), nrows=len(every), sharex=True) as (fig, axes):
        for axis, (name, boxes) in zip(axes, every.items(), strict=True):
            start_s, end_s = spans[name]
            _draw(axis, boxes, lanes, colours, (start_s, end_s))
            axis.axvline((end_s - start_s) * 1e3, color=GREY, linewidth=1)
            axis.set_title(f"{name}: {(end_s - start_s) * 1e3:.4g} ms", loc="left", fontsize=8.5)
            axis.set_xlim(0, longest_s * 1.02 * 1e3)
        axes[-1].set_xlabel("ms")
        handles = [axes[0].barh(0, 0, color=colours[name], label=name) for name in names]
        fig.legend(handles, names, loc="outside upper right", ncols=4, fontsize=7)
    return fig


def _order(name: str) -> tuple[bool, bool, str]:
    return name == WAITS, name == KERNEL, name


def _lanes(boxes: Sequence[Box]) -> list[str]:
    """Returns the lanes that are drawn: those that are busy longest, in the order of ranks."""
    busy_s: dict[str, float] = {}
    for box in boxes:
        busy_s[box.lane] = busy_s.get(box.lane, 0.0) + box.end_s - box.start_s
    return sorted(sorted(busy_s, key=lambda lane: -busy_s[lane])[:MOST_LANES])


def _draw(
    axis,
    boxes: Sequence[Box],
    lanes: Sequence[str],
    colours: Mapping[str, str],
    span_s: tuple[float, float],
) -> None:
    start_s, end_s = span_s
    for row, lane in enumerate(lanes):
        for name, colour in colours.items():
            bars = [
                (max(box.start_s, start_s), min(box.end_s, end_s))
                for box in boxes
                if (box.lane, box.name) == (lane, name)
            ]
            pieces = [((a - start_s) * 1e3, (b - a) * 1e3) for a, b in bars if a < b]
            axis.broken_barh(pieces, (row - 0.4, 0.8), facecolors=colour, linewidth=0)
    axis.set_yticks(range(len(lanes)), lanes, fontsize=7)
    axis.invert_yaxis()
    axis.grid(visible=False, axis="y")


def _middle(base: Replayed) -> int:
    numbers = sorted({step.number for step in base.program.steps})
    return numbers[len(numbers) // 2]


def _step_of(run: Replayed) -> tuple[float, float]:
    """Returns when the middle step begins on the first rank, and ends on the last."""
    steps = [step for step in run.program.steps if step.number == _middle(run)]
    ends = [(run.end_s if s.until_end else run.start_s)[s.last] for s in steps]
    return min(float(run.start_s[s.first]) for s in steps), float(max(ends))


def _seen_step(base: Replayed) -> tuple[float, float]:
    """Returns the same of the trace itself."""
    at_s = base.program.seen_s
    steps = [step for step in base.program.steps if step.number == _middle(base)]
    starts = [at_s[step.first][0] for step in steps]
    return min(starts), max(a + s.measured_s for a, s in zip(starts, steps, strict=True))
