"""Reads collectives as people have them: NVIDIA's nccl-tests, all_reduce_bench.py, NCCL Inspector.

nccl-tests (and AMD's rccl-tests) print a row per size with times out of place, which are taken,
and in place. ``all_reduce_bench.py`` of stas00/ml-engineering prints a Markdown table of
bandwidths, each with its unit; its sizes are powers of two, whether they are called KB or KiB.
NCCL Inspector writes a line of JSON for each collective of each rank. What else is in the file,
such as NCCL's log or a launcher's prefix, does not matter; a file may have several tables.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from common.errors import UserError, naming
from common.perfmodel.collectives import MeasuredAllReduce, bus_bandwidth
from common.perfmodel.printed.rows import (
    PREFIX,
    Row,
    cells_of,
    check_units,
    markdown_row,
    nccl_row,
)

READ = ("all_reduce", "all_gather", "reduce_scatter")
_NCCL_HEADER = re.compile(r"\bsize\s+count\s+type\b.*\btime\s+algbw\s+busbw\b")
_MARKDOWN_HEADER = re.compile(r"\|.*\balgbw\b.*\|")
_INSPECTOR = '"coll_perf"'
_RANK = re.compile(r"#\s+Rank\s+(\d+)\b(?:.*?\bon\s+(\S+)\s+device\s+\d+\s+\[[^\]]*\]\s*(.*\S))?")
_NAMED = re.compile(r"\b(\w+)_perf\b")
_OVER = re.compile(r"\bover (\d+) ranks\b")
_PROPERTIES = re.compile(r"DeviceProperties\(name='([^']+)'")
_NEXT_TEST = re.compile(r"#\s*(?:nThread\s+\d|Collective test starting|Using devices)")
_FACTS = ("Rank", "nThread", "Using devices", "_perf", " ranks", "DeviceProperties")
"""Words by which a line is known that may say something of a test."""
_INSPECTED = {"AllReduce": READ[0], "AllGather": READ[1], "ReduceScatter": READ[2]}


@dataclass(frozen=True)
class PrintedCollective:
    """A table of one collective.

    Attributes:
        collective: a member of ``READ``.
        sizes_bytes: size of each row; of an all-gather or a reduce-scatter that of the whole
            tensor.
        gpu: name of the GPUs; empty where the file does not tell.
        nodes: number of hosts; 0 where the file does not tell.
        where: file and line of the table.
    """

    collective: str
    ranks: int
    sizes_bytes: tuple[float, ...]
    times_s: tuple[float, ...]
    gpu: str = ""
    nodes: int = 0
    where: str = ""

    @property
    def curve(self) -> MeasuredAllReduce:
        """Returns seconds by size. Raises UserError for sizes that are none of a curve."""
        return MeasuredAllReduce(self.sizes_bytes, self.times_s)

    def busbw_gb_per_s(self) -> np.ndarray:
        """Returns the bus bandwidth of each row, as nccl-tests has it."""
        share = 1 if self.collective == "all_reduce" else 1 / 2
        return bus_bandwidth(self.sizes_bytes, self.times_s, self.ranks) * share / 1e9


@dataclass
class _Table:
    """A table that is being read."""

    file: str
    number: int
    is_nccl: bool
    columns: list[str]
    rows: list[Row] = field(default_factory=list)
    has_sum: bool = True
    awaits_units: bool = False
    is_open: bool = True


@dataclass
class _Facts:
    """What lines before a table, and after it, say of the test."""

    named: set[str] = field(default_factory=set)
    ranks: set[int] = field(default_factory=set)
    hosts: set[str] = field(default_factory=set)
    gpus: set[str] = field(default_factory=set)
    over: int = 0


class CollectiveTables:
    """A reader of lines, file after file; ``notes`` say what it skipped, if not ``strict``."""

    def __init__(self, *, strict: bool = True) -> None:
        self.strict, self.notes = strict, []
        self.file = ""
        self._tests: list[tuple[_Facts, _Table]] = []
        self._facts = _Facts()
        # (communicator, operation, size, ranks, hosts) → number of the call → seconds.
        self._inspected: dict[tuple, dict[int, float]] = {}

    def take(self, number: int, text: str, file: str = "") -> bool:
        """Takes a line; returns True if it is one of a table.

        Raises UserError, if ``strict``, for a row that cannot be read, with the line's number.
        """
        if file != self.file:
            self.file, self._facts = file, _Facts()
            if self._tests:
                self._tests[-1][1].is_open = False
        try:
            return self._take(number, text)
        except UserError as error:
            if self.strict:
                raise
            self.notes.append(f"{file}: {error}")
            if self._tests:
                self._tests[-1][1].is_open = False
                if not self._tests[-1][1].rows:
                    self._tests.pop()
            return True

    def _take(self, number: int, text: str) -> bool:
        if _INSPECTOR in text:
            return self._take_inspected(text)
        table = self._tests[-1][1] if self._tests else None
        if table and table.is_open and table.awaits_units:
            table.awaits_units = False
            check_units(text, number)
            return True
        if "algbw" in text and _NCCL_HEADER.search(text):
            columns = PREFIX.sub("", text).split()
            self._begin(_Table(self.file, number, True, columns, awaits_units=True))
        elif "algbw" in text and _MARKDOWN_HEADER.search(text):
            columns = [re.split(r"[\s(]", cell)[0].lower() for cell in cells_of(text)]
            if not {"payload", "size"} & {*columns} or not {"busbw", "algbw"} <= {*columns}:
                raise UserError(
                    f"line {number}: columns {', '.join(columns)}; payload, busbw and algbw"
                )
            self._begin(_Table(self.file, number, False, columns))
        elif not (table and table.is_open and self._take_row(table, number, text)):
            self._take_fact(text)
            return False
        return True

    def _begin(self, table: _Table) -> None:
        if self._tests and self._tests[-1][0] is self._facts:  # nothing said of the next test
            self._facts = replace(self._facts, named=set())
        self._tests.append((self._facts, table))

    def _take_fact(self, text: str) -> None:
        if not any(word in text for word in _FACTS):
            return
        if self._tests and self._tests[-1][0] is self._facts and _NEXT_TEST.search(text):
            self._facts = _Facts()
        facts = self._facts
        if match := _RANK.search(text):
            facts.ranks.add(int(match[1]))
            if match[2]:
                facts.hosts.add(match[2])
                facts.gpus.add(match[3])
        elif match := _OVER.search(text):
            facts.over = int(match[1])
        elif match := _PROPERTIES.search(text):
            facts.gpus.add(match[1])
        facts.named.update(_NAMED.findall(text))

    def _take_row(self, table: _Table, number: int, text: str) -> bool:
        if table.is_nccl:
            cells = PREFIX.sub("", text).split()
            time = table.columns.index("time")
            if len(cells) < time + 3 or not (cells[0].isdigit() and cells[1].isdigit()):
                return False
            if row := nccl_row(cells[0], cells[time : time + 3], number):
                table.rows.append(row)
            if "redop" in table.columns:
                table.has_sum = cells[table.columns.index("redop")] != "none"
            return True
        cells = cells_of(text)
        if not cells:
            table.is_open = False
        elif not set("".join(cells)) <= set(":- "):
            if len(cells) != len(table.columns):
                raise UserError(
                    f"line {number}: {len(cells)} columns, the header has {len(table.columns)}"
                )
            table.rows.append(markdown_row(dict(zip(table.columns, cells, strict=True)), number))
        return bool(cells)

    def _take_inspected(self, text: str) -> bool:
        try:
            record = json.loads(text[text.index("{") :])
            header, call = record["header"], record["coll_perf"]
            ranks, size = int(header["n_ranks"]), float(call["coll_msg_size_bytes"])
            operation, seconds = str(call["coll"]), float(call["coll_exec_time_us"]) / 1e6
            key = (str(header["id"]), operation, size, ranks, int(header.get("nnodes", 0)))
            sequence = int(call["coll_sn"])
        except (ValueError, KeyError, TypeError, RecursionError):
            return False  # the last line of a file that was cut
        if size > 0 and 0 < seconds < float("inf") and ranks > 1:
            calls = self._inspected.setdefault(key, {})
            # A rank's time has its wait for the last one: that of the last is the call's own.
            calls[sequence] = min(seconds, calls.get(sequence, seconds))
        return True

    def tables(self) -> list[PrintedCollective]:
        """Returns all tables, in their order.

        Raises UserError, if ``strict``, for one whose collective or number of ranks cannot be told.
        """
        finished = []
        for facts, table in self._tests:
            try:
                finished.append(self._finished(facts, table))
            except UserError as error:
                if self.strict:
                    raise
                self.notes.append(f"{table.file}: line {table.number}: {error}")
        return [*finished, *self._inspections()]

    def _finished(self, facts: _Facts, table: _Table) -> PrintedCollective:
        if table.awaits_units and self.strict:
            check_units("", table.number + 1)
        if not table.rows:
            raise UserError("no rows below the header")
        collective = _collective(facts.named, table.rows, table.has_sum)
        return PrintedCollective(
            collective=collective,
            ranks=_ranks(facts, table.rows, collective),
            sizes_bytes=tuple(row.size_bytes for row in table.rows),
            times_s=tuple(row.time_s for row in table.rows),
            gpu=next(iter(facts.gpus)) if len(facts.gpus) == 1 else "",
            nodes=len(facts.hosts),
            where=f"[{table.file}:{table.number}]",
        )

    def _inspections(self) -> list[PrintedCollective]:
        """Returns what NCCL Inspector wrote: the median call of each size."""
        tables: dict[tuple, dict[float, float]] = {}
        for (name, operation, size, ranks, nodes), calls in self._inspected.items():
            if operation in _INSPECTED:
                # An Inspector's size of an all-gather or a reduce-scatter is one rank's part.
                total = size if operation == "AllReduce" else size * ranks
                rows = tables.setdefault((name, operation, ranks, nodes), {})
                rows[total] = float(np.median([*calls.values()]))
        return [
            PrintedCollective(
                collective=_INSPECTED[operation],
                ranks=ranks,
                sizes_bytes=tuple(sorted(rows)),
                times_s=tuple(rows[size] for size in sorted(rows)),
                nodes=nodes,
                where=f"[communicator {name}]",
            )
            for (name, operation, ranks, nodes), rows in tables.items()
        ]


def is_printed(path: Path | str) -> bool:
    """Returns True if the file holds what one of the benchmarks prints."""
    return any(
        _NCCL_HEADER.search(x) or _MARKDOWN_HEADER.search(x) or _INSPECTOR in x
        for x in _lines(path)
    )


def _lines(path: Path | str) -> list[str]:
    try:
        return Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):  # whoever reads it as a table says so
        return []


def read_printed(path: Path | str, collective: str | None = None) -> PrintedCollective:
    """Reads the table of a file for which ``is_printed`` holds, of one collective if it is given.

    The collective and the number of ranks are those that the file names. Where it does not, they
    follow from bus bandwidth over algorithm bandwidth, which is 2(n−1)/n for an all-reduce and
    (n−1)/n for its halves (nccl-tests, doc/PERFORMANCE.md).

    Raises UserError, of one line with the path, for other units, other collectives, rows that
    cannot be read or contradict themselves, and a number of ranks that cannot be told.
    """
    reader = CollectiveTables()
    with naming(path):
        for number, line in enumerate(_lines(path), 1):
            reader.take(number, line)
        return _only(reader.tables(), collective)


def _only(tables: list[PrintedCollective], collective: str | None) -> PrintedCollective:
    chosen = [table for table in tables if collective in (None, table.collective)]
    if not chosen:
        names = dict.fromkeys(table.collective for table in tables)
        raise UserError(f"times of {', '.join(names) or 'nothing'}, not of {collective}")
    if len(chosen) > 1:
        most = max(len(table.sizes_bytes) for table in chosen)
        chosen = [table for table in chosen if len(table.sizes_bytes) == most]
    if len(chosen) > 1:
        raise UserError(f"{len(chosen)} tables of {chosen[0].collective}: give a file of one")
    chosen[0].curve  # noqa: B018 - refuses sizes that are none of a curve, with the path
    return chosen[0]


def _collective(named: set[str], rows: list[Row], has_sum: bool) -> str:
    if len(named) == 1:
        (collective,) = named
    elif not has_sum:
        collective = "all_gather"
    else:
        # 2(n−1)/n is at least 1, and (n−1)/n below it.
        fastest = max(rows, key=lambda row: row.algbw)
        is_whole = fastest.busbw >= fastest.algbw * 0.995
        collective = "all_reduce" if is_whole else "reduce_scatter"
    if collective not in READ:
        raise UserError(f"{collective}: the collectives that are read are {', '.join(READ)}")
    return collective


def _ranks(facts: _Facts, rows: list[Row], collective: str) -> int:
    if facts.ranks:
        return len(facts.ranks)
    if facts.over:
        return facts.over
    rounds = 2 if collective == "all_reduce" else 1
    fastest = max(rows, key=lambda row: row.algbw)
    # Bandwidths are printed to a hundredth: the true ones are within half of it.
    ratios = [(fastest.busbw + off) / (fastest.algbw - off) for off in (-0.005, 0.005)]
    numbers = {round(rounds / (rounds - ratio)) for ratio in ratios if ratio < rounds}
    if max(ratios) >= rounds or len(numbers) > 1 or min(numbers) < 2:
        raise UserError("the number of ranks is not stated; keep nccl-tests' '# Rank' lines")
    return numbers.pop()
