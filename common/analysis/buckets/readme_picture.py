"""The README's picture: DDP's sweep over bucket caps between two hosts, predicted and measured.

``uv run python -m common.analysis.buckets.readme_picture`` draws it from the recorded run, or from
another one, and prints the caption to write below it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.transforms import Transform

from common.analysis.buckets.choice import cap_or_ties
from common.analysis.buckets.figures import cap_limits, measured_points, ring, star, step_line
from common.analysis.buckets.networks import NetworkRun, open_networks
from common.analysis.buckets.sweep import Accuracy
from common.analysis.runs import recorded_assignment
from common.analysis.style import BLUE, GREY, SMALLEST_CAP_MIB, cap_axis, figure
from common.errors import UserError, naming_os_errors
from common.judged import Verdict
from common.perfmodel.ddp.best_cap import BestCap
from common.runtime.script import run_script

COMMAND = "uv run python -m common.analysis.buckets.readme_picture"
PICTURE = "assignments/assignment2/bucket-sweep.png"
SIZE = (5.4, 3.5)
"""Inches across and down: a README shows them on 700 pixels, the smallest letters 12 high."""
PIXELS_PER_INCH = 260
"""Twice what a README shows, for screens that have them."""


@dataclass(frozen=True)
class PictureSettings:
    """Draw the README's picture: DDP between two hosts, over bucket caps."""

    run_dir: str = ""
    """Run of assignment 2 with emulated hosts to draw; by default the recorded one."""
    output: str = PICTURE
    """PNG file to write."""


def main(settings: PictureSettings) -> None:
    """Draws the picture and prints its caption.

    Raises UserError where the run has no emulated hosts, or the file cannot be written.
    """
    run = slowest_network(settings.run_dir)
    path = Path(settings.output)
    with naming_os_errors(f"--output {path}"):
        draw(run).savefig(path, dpi=PIXELS_PER_INCH, metadata=notes(run))
    print(f"{path}. In the README:\n{caption(run)}")


def slowest_network(run_dir: str = "") -> NetworkRun:
    """Opens the sweep on the slowest link of a run, where the cap matters most.

    Raises UserError where the run has no emulated hosts.
    """
    networks = open_networks(run_dir or recorded_assignment("assignment2"))
    if networks.left_out:
        raise UserError(f"{run_dir}: no runs on emulated hosts; {networks.left_out}")
    return networks.runs[0]


def caption(run: NetworkRun) -> str:
    """Returns hardware, date, source, rounds that lack, and the command, as Markdown."""
    best = run.accuracy().best
    lacking = ""
    if best is not None and best.lead.verdict is Verdict.OPEN:
        lead = best.lead
        lacking = f" No measured cap is called best: {lead.rounds} rounds of {lead.least_rounds}."
    return f"*{run.caption}.*{lacking} Drawn by `{COMMAND}`."


def notes(run: NetworkRun) -> dict[str, str | None]:
    """Returns what the file says of itself; a test sees by it whether the picture is up to date."""
    best, accuracy = run.model.best_cap(), run.accuracy()
    times_ms = ", ".join(f"{time_ms:.1f}" for time_ms in accuracy.table["measured_ms"])
    description = (
        f"{run.caption}. Measured best: {cap_or_ties(accuracy.best)}, of {times_ms} ms; "
        f"b* = {best.cap_mib:.3g} MiB, {best.total_s * 1e3:.1f} ms"
    )
    return {"Description": description, "Software": None}


def draw(run: NetworkRun) -> Figure:
    """Draws T(b) from zero: a line of what is predicted, points with quartiles, both bests.

    Of too few rounds no measured one is marked.
    """
    best = run.model.best_cap()
    alone_ms = run.model.profile.backward_s * 1e3
    with figure(run.caption, figsize=SIZE) as (fig, axes):
        axes.set_title(f"DDP's backward pass, {run.name}", fontsize=10.5, loc="left")
        step_line(axes, best, "predicted", BLUE, 2.2)
        _mark_predicted(axes, best)
        table = measured_points(axes, run.sweep, "measured: median and quartiles")
        _mark_measured(axes, table, run.accuracy())
        axes.axhline(alone_ms, color=GREY, linestyle="--", linewidth=1.2)
        _write(axes, "computation alone", (1, alone_ms), (-2, -11), axes.get_yaxis_transform())
        axes.set_xlim(*cap_limits(run.sweep, (best.cap_mib,), 1.3))
        axes.set_ylim(0, table["q75_ms"].max() * 1.08)
        cap_axis(axes, "bucket cap b (MiB)")
        axes.set_ylabel("time (ms)")
        _legend(axes, (alone_ms + table["median_ms"].min()) / 2)
    return fig


def _write(
    axes: Axes,
    text: str,
    position: tuple[float, float],
    offset_points: tuple[float, float],
    coordinates: Transform,
) -> None:
    """Writes text that ends at a position, moved by an offset."""
    axes.annotate(
        text,
        position,
        xycoords=coordinates,
        xytext=offset_points,
        textcoords="offset points",
        ha="right",
        color="#444444",
        fontsize=8.5,
    )


def _mark_predicted(axes: Axes, best: BestCap) -> None:
    """Marks b* on the line, and all caps that give its buckets."""
    time_ms, chosen = best.total_s * 1e3, best.candidate(best.cap_mib)
    axes.axvspan(
        max(chosen.low_mib, SMALLEST_CAP_MIB),
        chosen.high_mib,
        color=BLUE,
        alpha=0.15,
        linewidth=0,
        label="caps with the buckets of b*",
    )
    label = f"predicted best: b* = {best.cap_mib:.2g} MiB, {time_ms:.0f} ms"
    star(axes, best, best.cap_mib, label, size=13)


def _mark_measured(axes: Axes, table: pd.DataFrame, accuracy: Accuracy) -> None:
    """Marks the fastest measured cap, or all that are tied; says how much the slowest adds."""
    best = accuracy.best
    label = f"measured best: {cap_or_ties(best)}"
    is_open = best is None or best.lead.verdict is Verdict.OPEN
    tied = table["bucket_cap_mib"].isin(() if is_open else best.tied)
    for name, (_, row) in zip((label, *[""] * len(table)), table[tied].iterrows(), strict=False):
        ring(axes, row, name, size=12)
    if accuracy.worst_over_best.is_settled:
        slowest = table[table["bucket_cap_mib"] == accuracy.worst.arm].iloc[0]
        slower = f"{accuracy.worst_over_best.estimate - 1:.0%} slower"
        position = (slowest["bucket_cap_mib"], slowest["q25_ms"])
        _write(axes, slower, position, (6, -14), axes.transData)


def _legend(axes: Axes, middle_ms: float) -> None:
    """Sets the legend at a time that nothing else is drawn at, predictions first."""
    handles, labels = axes.get_legend_handles_labels()
    predicted = [name for name in labels if "measured" not in name]
    order = [*predicted, *sorted(set(labels) - set(predicted), reverse=True)]
    axes.legend(
        [handles[labels.index(name)] for name in order],
        order,
        fontsize=8.5,
        loc="center right",
        bbox_to_anchor=(1, middle_ms),
        bbox_transform=axes.get_yaxis_transform(),
    )


if __name__ == "__main__":
    run_script(main, PictureSettings)
