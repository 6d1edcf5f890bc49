"""What changed while a script ran, and the record of the steps after each change.

A watch to the end of a script leaves medians of blocks of steps, and begins a window after each
change that it notices. Of a record without blocks the steps are judged, by the same statistic.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import pandas as pd
from ddplab_watch.change_points import BATCH, Change, ChangePoints
from ddplab_watch.step_blocks import (
    BACKWARD,
    COPY,
    ELEMENTS,
    MEMORY,
    SINGLE,
    STEP,
    Block,
    Schedule,
    block_steps,
)

from common.analysis.step_parts import flags
from common.diagnose.evidence.bundle import Bundle

OF_WINDOWS = ("steps", "buckets", "stacks", "host-waits", "surroundings")
"""Tables whose rows belong to one window."""
TIMES = {
    "data": ["data_time_ms"],
    "forward": ["forward_time_ms"],
    "update": ["optimizer_time_ms"],
    "between": ["between_time_ms"],
    BACKWARD: ["backward_time_ms", "exchange_time_ms", "buffers_time_ms"],
    STEP: ["step_time_ms", "between_time_ms"],
    MEMORY: ["resident_bytes"],
    ELEMENTS: ["elements"],
}
"""Columns of ``steps`` that add up to what a block has; those that are missing count as 0."""


@dataclass(frozen=True)
class Part:
    """Steps from a change on, up to the next one.

    Attributes:
        change: the change.
        bundle: record of these steps; None where there is none of all ranks.
    """

    change: Change
    bundle: Bundle | None


def parts_of(bundle: Bundle) -> tuple[Bundle, list[Part]]:
    """Divides a bundle into the record before any change, and what follows each change."""
    noticed = bundle.of("changes")
    if len(noticed):
        changes = [recorded_change(row) for row in noticed.to_dict("records")]
        slower = [change for change in changes if change.phase != BATCH]
        windows = {change: number for number, change in enumerate(slower, 1)}
        parts = [
            Part(change, _of_window(bundle, windows[change]) if change in windows else None)
            for change in changes
        ]
        return _of_window(bundle, 0) or bundle, parts
    first = _of_window(bundle, 0) or bundle
    if "window" in bundle.of("steps") or len(bundle.of("blocks")):
        return first, [Part(change, None) for change in changes_in(recorded_blocks(bundle))]
    changes = list(changes_in(_blocks_of_steps(bundle.of("steps"))))
    if not changes:
        return bundle, []
    ends = [*(change.step for change in changes[1:]), np.inf]
    parts = [
        Part(change, _between(bundle, change.step, end))
        for change, end in zip(changes, ends, strict=True)
    ]
    return _between(bundle, -1, changes[0].step) or bundle, parts


def recorded_change(row: dict[str, object]) -> Change:
    """Returns a change as rank 0 wrote it, its numbers of steps and ranks whole again."""
    rank = None if pd.isna(row["rank"]) else int(row["rank"])
    change = {"rank": rank, "step": int(row["step"]), "noticed": int(row["noticed"])}
    return Change(**({field.name: row[field.name] for field in fields(Change)} | change))


def changes_in(blocks: Sequence[Block]) -> Iterator[Change]:
    """Yields the changes that are noticed in blocks of one run, in their order."""
    if not blocks:
        return
    points = ChangePoints(sorted(blocks[0].ranks))
    for block in blocks:
        if change := points.add(block):
            yield change


def recorded_blocks(bundle: Bundle) -> list[Block]:
    """Returns the blocks that all ranks have recorded."""
    table, ranks = bundle.of("blocks"), bundle.about["rank"].nunique()
    blocks = []
    for (first, last), rows in table.groupby(["first", "last"]):
        if len(rows) == ranks:
            # Blocks of an older watch have the copy of a batch in its data.
            by_rank = {int(row["rank"]): {COPY: 0.0} | row for row in rows.to_dict("records")}
            blocks.append(Block(int(first), int(last), float(rows["unix_s"].max()), by_rank))
    return blocks


def _blocks_of_steps(steps: pd.DataFrame) -> list[Block]:
    """Makes blocks of a table of steps: of those that all ranks have, without warm-up."""
    steps = steps[~flags(steps["warmup"])] if ELEMENTS in steps else steps[:0]
    ranks = sorted(steps["rank"].unique())
    complete = steps[steps.groupby("step")["rank"].transform("nunique") == len(ranks)]
    if complete.empty:
        return []
    table = pd.DataFrame({"rank": complete["rank"], "number": complete["step"]})
    for name, columns in TIMES.items():
        held = complete.reindex(columns=columns).apply(pd.to_numeric, errors="coerce")
        table[name] = held.fillna(0.0).sum(axis=1)
    fetched_ms = pd.to_numeric(complete.get("fetch_time_ms", table["data"]), errors="coerce")
    table[COPY] = (table["data"] - fetched_ms.fillna(table["data"])).clip(lower=0)
    table["data"] -= table[COPY]
    table["alone_ms"] = table[[*SINGLE]].sum(axis=1)
    ended_s = complete["ended_s"] if "ended_s" in complete else table["number"]
    table["ended_s"] = pd.to_numeric(ended_s)
    longest = block_steps(float(table[STEP].median()) / 1e3, len(ranks))
    numbers = np.sort(table["number"].unique())
    schedule, blocks = Schedule(0, longest), []
    while schedule.last < len(numbers):
        within = numbers[schedule.first : schedule.last + 1]
        rows = table[table["number"].between(within[0], within[-1])]
        by_rank = {
            int(rank): group[[*TIMES, COPY]].median().to_dict() | {"alone_ms": [*group["alone_ms"]]}
            for rank, group in rows.groupby("rank")
        }
        ended_s = float(rows["ended_s"].max())
        blocks.append(Block(int(within[0]), int(within[-1]), ended_s, by_rank))
        schedule.advance()
    return blocks


def _of_window(bundle: Bundle, number: int) -> Bundle | None:
    """Returns the record of a window; None where a rank has no step in it."""
    return _restricted(bundle, lambda table: _window(table) == number)


def _window(table: pd.DataFrame) -> pd.Series:
    return table["window"].fillna(0) if "window" in table else pd.Series(0, table.index)


def _between(bundle: Bundle, first: float, end: float) -> Bundle | None:
    """Returns the record of the steps from one on, up to another; None where there are none."""

    def within(table: pd.DataFrame) -> pd.Series:
        if "step" not in table:
            return pd.Series(True, table.index)
        return (table["step"] >= first) & (table["step"] < end)

    return _restricted(bundle, within)


def _restricted(bundle: Bundle, keep: Callable[[pd.DataFrame], pd.Series]) -> Bundle | None:
    """Returns a bundle with some rows of the tables in ``OF_WINDOWS``, and all of the others."""
    rows = {
        name: table[keep(table)].reset_index(drop=True) if name in OF_WINDOWS else table
        for name, table in bundle.rows.items()
    }
    rows = {name: table.drop(columns="window", errors="ignore") for name, table in rows.items()}
    if rows["steps"]["rank"].nunique() < bundle.about["rank"].nunique():
        return None
    return replace(bundle, rows={name: table for name, table in rows.items() if len(table)})
