"""The small figures of the first page, one an assignment, and what each shows in a sentence."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes

from common.analysis.buckets.choice import cap_or_ties
from common.analysis.buckets.figures import cap_limits, measured_points, step_line
from common.analysis.buckets.measurements import open_run
from common.analysis.buckets.networks import measured_networks
from common.analysis.findings.finding import UNREADABLE
from common.analysis.micro_batches.lab import open_assignment3
from common.analysis.micro_batches.mode_comparison import DYNAMIC
from common.analysis.one_device.profile import open_profile
from common.analysis.show import judged_format
from common.analysis.style import BLUE, GREY, RED, STYLE, CourseFigure, bar_rows, cap_axis
from common.analysis.sweep_speedups import error_bars
from common.diagnose.changes import find_changes, open_changes, speedup_bars
from common.errors import UserError

SIZE = (3.7, 2.5)
"""Inches."""
MOST_KINDS = 5
"""Kinds of work with a bar of their own."""


@dataclass(frozen=True, eq=False)
class SmallFigure:
    """A figure, its heading, and what it shows, for those who do not see it."""

    title: str
    figure: CourseFigure
    alt: str
    assignment: str = ""


@contextmanager
def _small() -> Iterator[tuple[CourseFigure, Axes]]:
    with matplotlib.rc_context(STYLE | {"font.size": 8.5, "lines.linewidth": 1.5}):
        figure = CourseFigure(figsize=SIZE, layout="constrained")
        yield figure, figure.subplots()


def kinds_of_work(folder: Path) -> SmallFigure:
    """Draws a bar for the share of each kind of work in a step."""
    run = open_profile(folder)
    shares = run.categories()["share"]
    bars = {run.category_name(name): share for name, share in shares[:MOST_KINDS].items()}
    if len(shares) > MOST_KINDS:
        bars["all others"] = shares[MOST_KINDS:].sum()
    with _small() as (figure, axes):
        places = bar_rows(axes, [*bars])
        axes.barh(places, [100 * share for share in bars.values()], color=BLUE)
        axes.set_xlabel("share of a step (%)")
    parts = ", ".join(f"{name} {share:.0%}" for name, share in bars.items())
    return SmallFigure("A step by kind of work", figure, f"Bars, the share of a step: {parts}.")


def bucket_times(folder: Path) -> SmallFigure:
    """Draws the backward pass over bucket caps, predicted and measured, on the slowest network."""
    network = measured_networks(open_run(folder))[0]
    best, fastest = network.model.best_cap(), network.accuracy().best
    limits = cap_limits(network.sweep, (best.cap_mib,), 1.3)
    with _small() as (figure, axes):
        step_line(axes, best, "predicted", BLUE, 1.5)
        table = measured_points(axes, network.sweep, "measured", colour=RED)
        axes.axvline(best.cap_mib, color=GREY, ls="--", lw=1, label="b*")
        predicted_ms = [
            candidate.total_s * 1e3
            for candidate in best.candidates
            if candidate.high_mib >= limits[0]
        ]
        axes.set_xlim(*limits)
        axes.set_ylim(0, 1.15 * max(*predicted_ms, table["q75_ms"].max()))
        cap_axis(axes, "bucket cap (MiB)")
        axes.set_ylabel("backward pass (ms)")
        axes.legend(fontsize=7.5, ncols=3, loc="lower center")
    return SmallFigure(
        f"Bucket cap, {network.name}",
        figure,
        f"Backward pass over bucket caps: predicted as a line, shortest at {best.cap_mib:.3g} MiB; "
        f"{len(table)} measured points, the best of them: {cap_or_ties(fastest)}.",
    )


def modes_by_data_set(folder: Path) -> SmallFigure:
    """Draws dynamic's step over static's on each data set, with the interval and the promise."""
    rows = [
        (comparison.dataset, comparison.summary.loc[DYNAMIC])
        for comparison in open_assignment3(folder).comparisons
        if DYNAMIC in comparison.summary.index
    ]
    if not rows:
        raise UserError(f"mode {DYNAMIC} was not measured")
    with _small() as (figure, axes):
        for height, (_, row) in enumerate(rows):
            ends = error_bars(row.to_frame().T, "ratio")
            label = "measured, 95 %" if height == 0 else None
            axes.errorbar(
                row["ratio"], height, xerr=ends, fmt="o", ms=5, color=RED, capsize=3, label=label
            )
            promise = "promised by the plan" if height == 0 else None
            axes.plot(row["padded_ratio"], height, "|", ms=14, mew=2, color=BLUE, label=promise)
        axes.axvline(1, color=GREY, lw=1)
        axes.set_yticks(range(len(rows)), [name for name, _ in rows])
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.set_xlim(0, max(1.1, *(1.1 * row["ratio_high"] for _, row in rows)))
        axes.grid(visible=False, axis="y")
        axes.set_xlabel("step of dynamic over static")
        axes.legend(fontsize=7.5, loc="lower left", bbox_to_anchor=(0, 1))
    parts = ", ".join(f"{name} {judged_format()(row['judged'])}" for name, row in rows)
    return SmallFigure(
        "Planned micro-batches",
        figure,
        f"Step of dynamic micro-batches over static ones: {parts}.",
    )


def changes_made(folder: Path) -> SmallFigure:
    """Draws predicted and achieved speedup of each proposed change."""
    runs = find_changes(folder)
    if not runs:
        raise UserError("no proposed change was run")
    changes = open_changes(runs[-1])
    table = changes.table
    with _small() as (figure, axes):
        names = speedup_bars(axes, table)
        axes.axvline(1, color=GREY, lw=1)
        axes.grid(visible=False, axis="y")
        axes.set_xlabel(f"speedup of {changes.ranks} ranks")
        axes.legend(fontsize=7.5, ncols=2, loc="lower left", bbox_to_anchor=(0, 1))
    parts = ", ".join(
        f"{name} {predicted:.2f} and {achieved:.2f}"
        for name, predicted, achieved in zip(
            names, table["predicted_speedup"], table["speedup"], strict=True
        )
    )
    return SmallFigure(
        "Changes, predicted and achieved",
        figure,
        f"Bars, the speedup of {changes.ranks} ranks, predicted and achieved: {parts}.",
    )


FIGURES: dict[str, Callable[[Path], SmallFigure]] = {
    "assignment0": kinds_of_work,
    "assignment2": bucket_times,
    "assignment3": modes_by_data_set,
    "assignment4": changes_made,
}
"""The figure of an assignment's findings."""


def figure_of(assignment: str, folder: Path) -> SmallFigure | None:
    """Returns the small figure of an assignment; None where the run has not what it shows.

    Of tables that cannot be read the findings say so.
    """
    if assignment not in FIGURES:
        return None
    try:
        return replace(FIGURES[assignment](folder), assignment=assignment)
    except (UserError, *UNREADABLE):
        return None
