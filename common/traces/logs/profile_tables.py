"""Reads tables that other tools have made of traces: HTA's and TraceLens', as CSV.

HTA: ``get_temporal_breakdown`` and ``get_comm_comp_overlap``. TraceLens: ``gpu_timeline``,
``straggler_summary`` and ``nccl_summary_implicit_sync`` of its reports.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from common.traces.logs.text_lines import Line

TABLES: dict[str, tuple[str, ...]] = {
    "HTA's temporal breakdown": ("rank", "idle_time_pctg", "non_compute_time_pctg"),
    "HTA's overlap": ("rank", "comp_comm_overlap_pctg"),
    "TraceLens' timeline": ("type", "time ms", "percent"),
    "TraceLens' stragglers": ("rank", "total_wait_time_us", "times_arrived_last"),
    "TraceLens' collectives": ("Collective name", "comm_latency_mean", "skew in start time_mean"),
}
"""Table → columns by which it is known."""
BREAKDOWN, OVERLAP, TIMELINE, STRAGGLERS, COLLECTIVES = TABLES
MOST_ROWS = 100_000


@dataclass(frozen=True)
class Row:
    """A row of a table: column → text, and the rank that its file's name may tell."""

    cells: dict[str, str]
    rank: int | None
    file: str
    where: str

    def number(self, column: str) -> float | None:
        """Returns a cell as a number; None where it is none."""
        try:
            return float(self.cells[column])
        except (KeyError, ValueError):
            return None


@dataclass
class ProfileTables:
    """A reader of lines: table → rows."""

    rows: dict[str, list[Row]] = field(default_factory=dict)
    _columns: Sequence[str] = ()
    _table: str = ""

    def of(self, table: str) -> list[Row]:
        """Returns the rows of a table."""
        return self.rows.get(table, [])

    def take(self, line: Line) -> bool:
        """Takes a line; returns True if it is a table's."""
        if line.number == 1:
            self._table = ""
            self._columns = _cells(line.text)
            kinds = [t for t, named in TABLES.items() if set(named) <= set(self._columns)]
            if kinds:
                self._table = kinds[0]
                self.rows.setdefault(self._table, [])
            return bool(kinds)
        if not self._table:
            return False
        cells = _cells(line.text)
        rows = self.rows[self._table]
        if len(cells) != len(self._columns) or len(rows) >= MOST_ROWS:
            return False
        named = dict(zip(self._columns, cells, strict=True))
        number = named.get("rank", "")
        match = re.search(r"rank[_-]?(\d+)", line.file)
        rank = int(float(number)) if re.fullmatch(r"\d+(\.0)?", number) else match and int(match[1])
        rows.append(Row(named, rank, line.file, line.where))
        return True


def _cells(text: str) -> list[str]:
    return next(csv.reader([text]), [])
