"""The backward pass as predicted and as measured, bucket by bucket, and where the two part.

A pass is measured on every rank (``bucket-timeline.csv``), each with the start of its own backward
pass as 0; all ranks start it together. What counts is the last rank: a bucket is ready when it is
on all ranks, its all-reduce begins when the last rank has begun it.

The difference in length is taken apart exactly. A pass is made of terms: for each bucket the
computation of its gradients, the wait before its all-reduce, the all-reduce and the copy back. The
predicted pass is turned into the measured one by putting in the measured terms one after another,
in order of time. What this does to the end of the pass is the term's effect: how much it moved the
forecast when it came to be known. A term that is hidden behind others has none, and all effects add
up to the difference.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from common.analysis.buckets.measurements import Assignment2Run
from common.analysis.buckets.sweep import BucketSweep
from common.csv_tables import numbers, read_table
from common.errors import UserError
from common.perfmodel.buckets import cap_label
from common.perfmodel.ddp.timeline import BackwardTimeline, BucketEvent
from common.perfmodel.perfetto_trace import Around, copy_starts_s
from common.runtime.records.run_directory import find_table

TABLE = "bucket-timeline.csv"
KEYS = ("bucket_cap_mib", "iteration", "rank", "bucket")
MOMENTS = ("ready_ms", "start_ms", "end_ms", "copied_ms", "compute_end_ms", "backward_ms")

COMPUTATION, WAIT, ALL_REDUCE = "computation", "wait for the bucket before", "all-reduce"
COPY_OUT, REST = "copy-out", "rest of the pass"
TERMS = (COMPUTATION, WAIT, ALL_REDUCE, COPY_OUT, REST)
GAPS = {
    "bucket": "bucket",
    "size_mib": ("size (MiB)", "{:.2f}"),
    "term": "term",
    "predicted_ms": "predicted (ms)",
    "measured_ms": "measured (ms)",
    "gap_ms": ("gap (ms)", "{:+.1f}"),
    "effect_ms": ("effect on the end (ms)", "{:+.1f}"),
}
"""Titles of ``gaps``."""
SHOWN_GAPS = 8
EFFECTS = {name: GAPS[name] for name in ("term", "effect_ms")}
"""Titles of ``effects``."""


@dataclass(frozen=True)
class MeasuredTimelines:
    """Watched backward passes: ``table`` has a row per cap (NaN is DDP's default), pass, rank and
    bucket, with the columns of ``bucket-timeline.csv``."""

    table: pd.DataFrame

    def caps(self) -> list[float | None]:
        """Returns the caps in MiB in the order they were watched; None for DDP's default."""
        caps = self.table["bucket_cap_mib"].drop_duplicates()
        return [None if pd.isna(cap) else float(cap) for cap in caps]

    def passes(self, cap_mib: float | None) -> list[BackwardTimeline]:
        """Returns the passes at a cap, each the slowest of all ranks at every moment.

        Their ``compute_alone_s`` is NaN, as it was not measured, and members of buckets are
        unknown. Raises UserError for a cap that was not watched.
        """
        rows = self._of(cap_mib)
        return [_slowest(ranks) for _, ranks in rows.groupby("iteration")]

    def typical(self, cap_mib: float | None) -> BackwardTimeline:
        """Returns the pass at a cap whose length is the (lower) median."""
        passes = sorted(self.passes(cap_mib), key=lambda timeline: timeline.total_s)
        return passes[(len(passes) - 1) // 2]

    def median_s(self, cap_mib: float | None) -> float:
        """Returns the median length of the watched passes at a cap, in seconds."""
        return float(np.median([timeline.total_s for timeline in self.passes(cap_mib)]))

    def in_flight(self, cap_mib: float | None) -> tuple[int, float]:
        """Returns the most all-reduces that a rank had in flight at once, and the share of the time
        with any in flight in which there was more than one."""
        most, busy_s, shared_s = 0, 0.0, 0.0
        for _, rows in self._of(cap_mib).groupby(["iteration", "rank"]):
            spans = rows[["start_ms", "end_ms"]].to_numpy() / 1e3
            counts, lengths = _under_way(spans)
            most = max(most, int(counts.max(initial=0)))
            busy_s += float(lengths[counts >= 1].sum())
            shared_s += float(lengths[counts >= 2].sum())
        return most, shared_s / busy_s if busy_s else 0.0

    def _of(self, cap_mib: float | None) -> pd.DataFrame:
        caps = self.table["bucket_cap_mib"]
        rows = self.table[caps.isna() if cap_mib is None else caps == cap_mib]
        if rows.empty:
            watched = ", ".join(map(cap_label, self.caps()))
            raise UserError(f"no pass was watched at {cap_label(cap_mib)} MiB, only at {watched}")
        return rows


def read_timelines(path: Path | str) -> MeasuredTimelines:
    """Reads ``bucket-timeline.csv``.

    Raises UserError for a table that cannot be one: moments that are no times or come in no
    possible order, or ranks and buckets that are missing.
    """
    table = read_table(path, [*KEYS, "size_bytes", *MOMENTS])
    for column in MOMENTS:
        table[column] = numbers(table, column, path, at_least=0)
    table["size_bytes"] = numbers(table, "size_bytes", path, above=0)
    for earlier, later in (
        ("ready_ms", "start_ms"),
        ("start_ms", "end_ms"),
        ("end_ms", "copied_ms"),
    ):
        wrong = table[later] < table[earlier] - 1e-6
        if wrong.any():
            row = int(wrong.idxmax())
            raise UserError(
                f"{path}: line {row + 2}: {later} {table[later][row]:g} is before {earlier} "
                f"{table[earlier][row]:g}"
            )
    for (cap, iteration), rows in table.groupby(["bucket_cap_mib", "iteration"], dropna=False):
        expected = rows["rank"].nunique() * rows["bucket"].nunique()
        if len(rows) != expected or set(rows["bucket"]) != set(range(rows["bucket"].nunique())):
            raise UserError(
                f"{path}: not every rank has every bucket at cap "
                f"{cap_label(None if pd.isna(cap) else cap)} MiB, iteration {iteration}"
            )
    return MeasuredTimelines(table)


def timelines_of(run: Assignment2Run) -> MeasuredTimelines | None:
    """Returns the watched passes of a run; None where it did not watch any."""
    path = find_table(run.run_dir, TABLE, "ddp_benchmark")
    return read_timelines(path) if path else None


def shown_cap(watched: MeasuredTimelines | None, wanted_mib: float) -> float | None:
    """Returns the cap to show: the wanted one where it was watched or nothing was, else the
    nearest."""
    if watched is None:
        return wanted_mib
    explicit = [cap for cap in watched.caps() if cap is not None]
    return min(explicit, key=lambda cap: abs(np.log(cap / wanted_mib)), default=None)


def around_passes(sweep: BucketSweep, cap_mib: float | None) -> Around | None:
    """Returns the medians of what lay around the backward passes of a sweep at a cap; None if none
    did."""
    caps = sweep.steps["bucket_cap_mib"]
    rows = sweep.steps[caps.isna() if cap_mib is None else caps == cap_mib]
    if rows.empty:
        return None
    after = rows["step_time_ms"] - rows["forward_time_ms"] - rows["backward_time_ms"]
    forward_s, update_s = rows["forward_time_ms"].median() / 1e3, after.median() / 1e3
    return Around(float(forward_s), max(0.0, float(update_s)))


def gaps(predicted: BackwardTimeline, measured: BackwardTimeline) -> pd.DataFrame:
    """Returns every term of both passes and its effect on the length of the pass; one row per term.

    Columns: bucket (counted from 1; missing for the rest of the pass), size_mib, term (of TERMS),
    predicted_ms, measured_ms, gap_ms (measured − predicted), effect_ms. A bucket's computation is
    the time since the bucket before it was ready, of the last bucket up to the end of computation.

    Raises UserError where the two have different buckets.
    """
    sizes = [[event.size_bytes for event in pass_.events] for pass_ in (predicted, measured)]
    if sizes[0] != sizes[1]:
        raise UserError(
            f"the predicted pass has {len(sizes[0])} buckets, the first of {sizes[0][0]:,} bytes; "
            f"the measured one {len(sizes[1])}, the first of {sizes[1][0]:,}: another model, cap "
            "or DDP options"
        )
    count = len(sizes[0])
    made, target = _terms_s(predicted), _terms_s(measured)
    seen_s = [_seen_s(timeline) for timeline in (predicted, measured)]
    reduced = [(index, term) for index in range(count) for term in TERMS[:3]]
    copied = [(index, COPY_OUT) for index in range(count)]
    rows, end_s = [], _end_s(made)
    for index, term in [*reduced, *copied, (0, REST)]:
        # The last bucket's computation has the tail after it.
        last = index + 2 if term == COMPUTATION and index + 1 == count else index + 1
        made[term][index:last] = target[term][index:last]
        moved_s, end_s = _end_s(made) - end_s, _end_s(made)
        values = [by_term[term][index] * 1e3 for by_term in seen_s]
        named = (index + 1, sizes[0][index] / 2**20) if term != REST else (pd.NA, float("nan"))
        rows.append((*named, term, *values, values[1] - values[0], moved_s * 1e3))
    table = pd.DataFrame(rows, columns=list(GAPS))
    return table.astype({"bucket": "Int64"})


def largest_gaps(table: pd.DataFrame) -> pd.DataFrame:
    """Returns the ``SHOWN_GAPS`` rows of ``gaps`` with the largest effect, then the largest gap."""
    columns = ["effect_ms", "gap_ms"]
    order = table[columns].abs().round(6).sort_values(columns, ascending=False, kind="stable")
    return table.loc[order.index[:SHOWN_GAPS]].reset_index(drop=True)


def effects(predicted: BackwardTimeline, measured: BackwardTimeline) -> pd.DataFrame:
    """Returns the difference, term and effect_ms, by kind of term and in all."""
    by_term = gaps(predicted, measured).groupby("term")["effect_ms"].sum().reindex(TERMS)
    rows = [*by_term.items(), ("measured − predicted", by_term.sum())]
    return pd.DataFrame(rows, columns=list(EFFECTS))


def watched_facts(
    run: Assignment2Run, watched: MeasuredTimelines, cap_mib: float | None
) -> dict[str, str]:
    """Returns how long the watched passes were, beside those of the sweep, and what overlapped."""
    watched_ms = watched.median_s(cap_mib) * 1e3
    timed_s = run.sweep.measured_s().get(cap_mib)
    most, share = watched.in_flight(cap_mib)
    facts = {"cap": f"{cap_label(cap_mib)} MiB", "watched passes, median": f"{watched_ms:.1f} ms"}
    if timed_s:
        facts["passes of the sweep, not watched"] = f"{timed_s * 1e3:.1f} ms"
        facts["watched over not watched"] = f"{watched_ms / (timed_s * 1e3) - 1:+.1%}"
    return facts | {
        "all-reduces in flight at once, at most": f"{most}",
        "share of the time in flight with more than one": f"{share:.0%}",
    }


def copy_facts(
    run: Assignment2Run, predicted: BackwardTimeline, measured: BackwardTimeline | None
) -> dict[str, str]:
    """Returns what the model takes for DDP's copies, how well that is known, and what was seen.

    DDP over a group of one rank copies and sends nothing: what it adds to the backward pass is the
    copies, in and out. Where the interval over rounds holds 0, they cannot be told from nothing by
    that difference; the copies out may be known from DDP's own record besides.
    """
    added = run.copies
    ends = added.interval.text("{:+.1f}")
    costs = run.model.costs
    per_byte = costs.copy_in_s_per_byte + costs.copy_out_s_per_byte
    copies_ms = per_byte * run.profile.total_bytes * 1e3
    facts = {
        "copies can be told from nothing": added.said,
        "copies in the model, in and out": f"{copies_ms:.1f} ms",
        "measured with DDP on one rank": f"{added.estimate:+.1f} ms ({ends})",
    }
    if (copied_s := run.calibration.overlap.copy_out_s) is not None:
        out_ms = np.nanmedian(copied_s) * 1e3
        facts["copies out, as DDP on one rank recorded them"] = f"{out_ms:.1f} ms"
    if measured is None:
        return facts
    terms = gaps(predicted, measured)
    out_ms = terms.loc[terms["term"] == COPY_OUT, "measured_ms"].sum()
    return facts | {"copies out in the watched pass": f"{out_ms:.1f} ms"}


def _terms_s(timeline: BackwardTimeline) -> dict[str, np.ndarray]:
    """Returns the lengths in seconds from which the end of a pass follows, by term and bucket.

    Computation has one more, the tail after the last gradient. A bucket waits from the moment it
    could start, the one before being done. The rest of the pass is one length.
    """
    ready, start, end, copied = _moments(timeline.events)
    could_start = np.maximum(ready, np.r_[-np.inf, end[:-1]])
    return {
        COMPUTATION: np.diff(np.r_[0.0, ready, timeline.compute_end_s]),
        WAIT: start - could_start,
        ALL_REDUCE: end - start,
        COPY_OUT: copied - np.array(copy_starts_s(timeline)),
        REST: np.array([timeline.total_s - copied[-1]]),
    }


def _end_s(terms_s: Mapping[str, np.ndarray]) -> float:
    """Returns when a pass of these lengths ends."""
    *ready, compute_end = np.cumsum(terms_s[COMPUTATION])
    ends, end = [], -np.inf
    for could_start, delay, length in zip(ready, terms_s[WAIT], terms_s[ALL_REDUCE], strict=True):
        end = max(could_start, end) + delay + length
        ends.append(end)
    copied = compute_end
    for end, copy in zip(ends, terms_s[COPY_OUT], strict=True):
        copied = max(copied, end) + copy
    return float(copied + terms_s[REST][0])


def _seen_s(timeline: BackwardTimeline) -> dict[str, np.ndarray]:
    """Returns the lengths that a reader sees: a bucket waits from its own ready time on."""
    terms_s = _terms_s(timeline)
    ready, start, _, _ = _moments(timeline.events)
    *computed, tail = terms_s[COMPUTATION]
    computed[-1] += tail
    return terms_s | {COMPUTATION: np.array(computed), WAIT: start - ready}


def _moments(events: Sequence[BucketEvent]) -> np.ndarray:
    """Stacks when each bucket was ready, started, reduced and copied back: [4, buckets], in s."""
    return np.array(
        [(event.ready_s, event.start_s, event.end_s, event.copied_s) for event in events]
    ).T


def _slowest(rows: pd.DataFrame) -> BackwardTimeline:
    """Joins the ranks to one pass, the last rank counting at every moment."""
    last = rows.groupby("bucket")[[*MOMENTS, "size_bytes"]].max().sort_index()
    times = last[list(MOMENTS)] / 1e3
    events = tuple(
        BucketEvent(int(bucket), (), int(size), *moments)
        for bucket, size, *moments in zip(
            last.index,
            last["size_bytes"],
            *(times[column].tolist() for column in MOMENTS[:4]),
            strict=True,
        )
    )
    compute_end_s, total_s = float(times["compute_end_ms"].max()), float(times["backward_ms"].max())
    return BackwardTimeline(total_s, compute_end_s, float("nan"), events)


def _under_way(spans: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Counts the spans between each two neighbouring moments; returns counts and lengths."""
    moments = np.unique(spans)
    middle = (moments[1:] + moments[:-1]) / 2
    counts = ((spans[:, :1] <= middle) & (middle < spans[:, 1:])).sum(axis=0)
    return counts, np.diff(moments)
