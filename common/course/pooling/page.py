"""What a class has measured, as tables, figures and a page of Markdown."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from common.analysis.runs import written_whole
from common.analysis.show import Table, show
from common.analysis.style import BLACK, BLUE, DPI, GREY, RED, figure
from common.course.pooling.estimates import RATIO, worded
from common.course.pooling.pool import LEAST_STUDENTS, Pool, Pooled
from common.runtime.wording import counted

FOREST = "forest-{:02d}-{}.png"
AXES = {
    RATIO: "ratio",
    "added": "share added (%)",
    "saved": "share saved (%)",
}
"""Titles of a forest's axis, by how a quantity is worded."""
QUANTITIES = {
    "assignment": "assignment",
    "quantity": "quantity",
    "verdict": "verdict",
    "students": ("students", "{:.0f}"),
    "shown_value": "class",
    "shown_interval": "95 % interval",
    ("above", "below"): ("above / below", "{} / {}"),
    "opposite": ("opposite order", "{:.0f}"),
    "settled_opposite": ("of them settled", "{:.0f}"),
    "differ": ("who differs", lambda names: names or "–"),
}
"""Titles of the page's first table; the verdict stands before the number."""
NOTES = (
    "A student counts once, whatever the number of rounds; from ten students on, the tenth at "
    "either end is trimmed. All intervals hold at once with 95 %; "
    f"fewer than {LEAST_STUDENTS} students settle nothing.",
    "Above / below: students whose own number is above no difference (a ratio of 1, a share of 0) "
    "or below. Opposite order: those who would have named the other order than the class from "
    "their own data; of them settled: those whose own interval says so. Without a settled class "
    "there is no order.",
    "Who differs lies outside of the interval in which the other students lead to expect a further "
    "one. All such comparisons hold at once with 95 %, so the page names somebody by chance in at "
    "most 5 % of classes. It may be a machine, a mistake, or other work meanwhile.",
    "A regret is held against the cap that is the fastest in the other rounds, as the fastest of "
    "the same round is so by luck. So a regret of nothing may come out below 0.",
)


def tabulate(pool: Pool) -> Table:
    """Returns a row per quantity."""
    table = pool.quantities
    form = [_form(wording) for wording in table["wording"]]
    value = [text(number) for text, number in zip(form, table["value"], strict=True)]
    interval = [
        judged.ratio.interval.map(partial(worded, judged.first.wording)).text(words, "student")
        for judged, words in zip(pool.pooled, form, strict=True)
    ]
    return show(table.assign(shown_value=value, shown_interval=interval), QUANTITIES)


def _form(wording: str):
    return (lambda value: f"{value:.2f}") if wording == RATIO else (lambda value: f"{value:+.1%}")


def page(pool: Pool) -> str:
    """Returns the page as Markdown: the class, its hardware, and what was left out."""
    hardware = pool.hardware
    machines = pd.DataFrame({"student": hardware.index, "hardware": hardware.to_numpy()})
    parts = [
        f"# What {counted(len(hardware), 'student')} measured",
        tabulate(pool)._repr_markdown_(),
        "\n".join(f"- {note}" for note in NOTES),
        "## Machines",
        "Ratios are pooled over machines that differ; each is a student's own.",
        show(machines)._repr_markdown_(),
        "## Not pooled",
        "\n".join(f"- {line}" for line in left_out_lines(pool)) or "Nothing was left out.",
    ]
    return "\n\n".join(part.rstrip("\n") for part in parts) + "\n"


def left_out_lines(pool: Pool) -> list[str]:
    """Returns a line for each thing that was not pooled: whose, what and why."""
    return [f"{line.student}, {line.what}: {line.reason}" for line in pool.left_out]


def write_pool(pool: Pool, output: Path) -> list[str]:
    """Writes pool.md, three CSV tables and a figure per quantity, all or nothing.

    Figures of an earlier pool in the same folder are taken away.

    Returns:
        the names of the files.

    Raises UserError where the folder cannot be written to.
    """
    with written_whole(output) as beside:
        (beside / "pool.md").write_text(page(pool))
        pool.quantities.to_csv(beside / "pool.csv", index=False)
        pool.students.to_csv(beside / "students.csv", index=False)
        lines = [(line.student, line.what, line.reason) for line in pool.left_out]
        left_out = pd.DataFrame(lines, columns=["student", "what", "reason"])
        left_out.to_csv(beside / "left-out.csv", index=False)
        for name, forest in _forests(pool):
            forest.savefig(beside / name, dpi=DPI)
        names = sorted(path.name for path in beside.iterdir())
    for path in output.glob(FOREST.replace("{:02d}-{}", "*")):
        if path.name not in names:
            path.unlink()
    return names


def _forests(pool: Pool) -> Iterator[tuple[str, Figure]]:
    for number, pooled in enumerate(pool.pooled, start=1):
        words = re.sub(r"[^a-z0-9]+", "-", pooled.first.quantity.lower()).strip("-")
        yield FOREST.format(number, words[:60]), forest(pooled)


def forest(pooled: Pooled) -> Figure:
    """Draws a line per student with the own interval, and the pooled one below them.

    A student who differs from the others is red; the grey band is the pooled interval.
    """
    first, rows = pooled.first, pooled.rows()
    scale = 1.0 if first.wording == RATIO else 100.0
    differing = set(pooled.differing)
    row = pooled.row()
    caption = (
        f"Assignment {first.assignment}; a student's own 95 % interval over rounds, none of a "
        "single one; the class's over students"
    )
    height = 0.26 * len(rows) + 1.7
    with figure(caption, figsize=(7.2, height)) as (fig, axes):
        for number, student in enumerate(rows):
            color = RED if student["student"] in differing else BLUE
            ends = [scale * student["low"], scale * student["high"]]
            axes.plot(ends, [number, number], color=color, lw=1.4)
            axes.plot(scale * student["value"], number, "o", color=color, ms=4.5)
        bottom = len(rows) + 0.4
        axes.plot([scale * row["low"], scale * row["high"]], [bottom, bottom], color=BLACK, lw=3)
        axes.plot(scale * row["value"], bottom, "D", color=BLACK, ms=6)
        if not np.isnan(row["low"]):
            axes.axvspan(scale * row["low"], scale * row["high"], color=GREY, alpha=0.15, lw=0)
        axes.axvline(scale * worded(first.wording, 1.0), color=GREY, ls="--", lw=1)
        names = [student["student"] for student in rows]
        axes.set_yticks([*range(len(rows)), bottom], [*names, f"class ({len(rows)})"], fontsize=8)
        axes.set_ylim(bottom + 0.7, -0.7)
        _limit(axes, rows, row, scale, first.wording)
        axes.set_xlabel(f"{AXES[first.wording]}; dashed: no difference")
        axes.set_title(f"{first.quantity}\n{pooled.verdict}", fontsize=9, loc="left")
    return fig


def _limit(axes, rows: list[dict], row: dict, scale: float, wording: str) -> None:
    """Keeps an interval of two rounds, which may be endless, from hiding all others."""
    values = np.array([student["value"] for student in rows] + [row["low"], row["high"]])
    values = scale * np.append(values[np.isfinite(values)], worded(wording, 1.0))
    margin = 0.6 * max(np.ptp(values), 0.02 * scale)
    low, high = axes.get_xlim()
    axes.set_xlim(max(low, values.min() - margin), min(high, values.max() + margin))
