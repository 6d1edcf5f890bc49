"""Sentences that read their own numbers, about the passes that were watched bucket by bucket."""

from __future__ import annotations

import numpy as np

from common.analysis.assignment2 import Assignment2Run
from common.analysis.tables import Table
from common.analysis.timelines import (
    COPY_OUT,
    MeasuredTimelines,
    effect_by_term,
    gaps,
    largest_gaps,
)
from common.perfmodel.buckets import cap_label
from common.perfmodel.simulator import BackwardTimeline

SHOWN_COLUMNS = {
    "bucket": "bucket",
    "size_mib": "size (MiB)",
    "term": "term",
    "predicted_ms": "predicted (ms)",
    "measured_ms": "measured (ms)",
    "gap_ms": "gap (ms)",
    "effect_ms": "effect on the end (ms)",
}
FORMATS = {
    "size (MiB)": "{:.2f}",
    **dict.fromkeys(("predicted (ms)", "measured (ms)"), "{:.1f}"),
    **dict.fromkeys(("gap (ms)", "effect on the end (ms)"), "{:+.1f}"),
}


def watched_text(
    run: Assignment2Run, watched: MeasuredTimelines | None, cap_mib: float | None
) -> str:
    """How the passes were watched and what that cost; says so where none was."""
    if watched is None:
        return (
            "**This run did not watch its buckets** (it has no `bucket-timeline.csv`), so only the "
            "predicted pass is shown. `uv run ddplab run assignment2` measures both."
        )
    seen_ms = watched.median_s(cap_mib) * 1e3
    timed_ms = {cap: seconds * 1e3 for cap, seconds in run.sweep.measured_s().items()}.get(cap_mib)
    beside = (
        f"; those of the sweep, which nobody watched, {timed_ms:.1f} ms "
        f"({seen_ms / timed_ms - 1:+.1%})"
        if timed_ms
        else ""
    )
    most, share = watched.in_flight(cap_mib)
    together = (
        f"At most {most} all-reduces were in flight at once, for {share:.0%} of the time in which "
        "any was: gloo has two worker threads, and the model serves one after another."
        if most > 1
        else "No two all-reduces were in flight at once."
    )
    return (
        f"The watched passes at {cap_label(cap_mib)} MiB took {seen_ms:.1f} ms in the median"
        f"{beside}. {together}"
    )


def gaps_text(predicted: BackwardTimeline, measured: BackwardTimeline | None) -> str:
    """What the difference between the two passes is made of."""
    if measured is None:
        return "There is no measured pass to compare with."
    effects = effect_by_term(gaps(predicted, measured))
    difference_ms = (measured.total_s - predicted.total_s) * 1e3
    parts = ", ".join(f"{term} {effect:+.1f} ms" for term, effect in effects.items())
    return (
        f"The measured pass is {abs(difference_ms):.1f} ms "
        f"{'longer' if difference_ms > 0 else 'shorter'} than the predicted one. By term: {parts}. "
        f"The largest part is **{effects.abs().idxmax()}**."
    )


def copies_text(
    run: Assignment2Run, predicted: BackwardTimeline, measured: BackwardTimeline | None
) -> str:
    """What the model takes for DDP's copies, how well that is known, and what was seen of them."""
    bookkeeping_ms = run.calibration.overlap.bookkeeping_s * 1e3
    low, middle, high = np.nanquantile(bookkeeping_ms, [0.25, 0.5, 0.75])
    per_byte = run.costs.copy_out_s_per_byte
    text = (
        f"The model has {2 * per_byte * run.profile.total_bytes * 1e3:.1f} ms for all copies, half "
        "of it for those out of the buckets: what DDP over one rank adds to the backward pass, "
        f"{middle:+.1f} ms in the median over rounds (quartiles {low:+.1f} to {high:+.1f}). "
    )
    if low <= 0:
        text += "That cannot be told from nothing, so neither can the copies. "
    if measured is None:
        return text
    seen = gaps(predicted, measured)
    out_ms = seen.loc[seen["term"] == COPY_OUT, "measured_ms"].sum()
    return text + (
        f"In the watched pass copies out took {out_ms:.1f} ms, with the profiler noting each one; "
        "copies in are part of *computation* on both sides."
    )


def gap_table(predicted: BackwardTimeline, measured: BackwardTimeline, count: int = 8) -> Table:
    """The largest gaps as a table to show."""
    found = largest_gaps(gaps(predicted, measured), count)
    return Table(found.rename(columns=SHOWN_COLUMNS), FORMATS)
