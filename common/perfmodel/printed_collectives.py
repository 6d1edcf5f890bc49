"""Reads collectives as benchmarks print them: NVIDIA's nccl-tests, and all_reduce_bench.py.

nccl-tests (and AMD's rccl-tests) print a row per size with times out of place, which are taken,
and in place. ``all_reduce_bench.py`` of stas00/ml-engineering prints a Markdown table of
bandwidths, each with its unit; its sizes are powers of two, whether they are called KB or KiB.
What else is in the file, such as NCCL's log or a launcher's prefix, does not matter.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from common.errors import UserError
from common.perfmodel.collectives import MeasuredAllReduce

READ = ("all_reduce", "all_gather", "reduce_scatter")
_PREFIX = re.compile(r"^\s*(?:\[[\d,]+\]<\w+>:|\d+:)?[\s#]*")
_NCCL_HEADER = re.compile(r"\bsize\s+count\s+type\b.*\btime\s+algbw\s+busbw\b")
_MARKDOWN_HEADER = re.compile(r"\|.*\balgbw\b.*\|")
_GB_PER_S = {"GBps": 1e9, "GB/s": 1e9, "Gbps": 1e9 / 8, "Gb/s": 1e9 / 8}
_SIZE = re.compile(r"([\d.]+)\s*([KMGT]?)i?B")


@dataclass(frozen=True)
class PrintedCollective:
    """A table of one collective.

    Attributes:
        collective: one of ``READ``.
        ranks: number of ranks.
        curve: seconds by size; of an all-gather or a reduce-scatter the size of the whole tensor.
    """

    collective: str
    ranks: int
    curve: MeasuredAllReduce


@dataclass(frozen=True)
class _Row:
    size_bytes: float
    time_s: float
    algbw: float
    busbw: float


def is_printed(path: Path | str) -> bool:
    """Returns True if the file holds what one of the benchmarks prints."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return False
    return any(_NCCL_HEADER.search(x) or _MARKDOWN_HEADER.search(x) for x in text.splitlines())


def read_printed(path: Path | str) -> PrintedCollective:
    """Reads the table of a file for which ``is_printed`` holds.

    The collective and the number of ranks are those that the file names. Where it does not, they
    follow from bus bandwidth over algorithm bandwidth, which is 2(n−1)/n for an all-reduce and
    (n−1)/n for its halves (nccl-tests, doc/PERFORMANCE.md).

    Raises UserError, of one line with the path, for other units, other collectives, rows that
    cannot be read or contradict themselves, and a number of ranks that cannot be told.
    """
    lines = Path(path).read_text(encoding="utf-8").splitlines()
    is_nccl = any(_NCCL_HEADER.search(line) for line in lines)
    try:
        rows, has_sum = (_nccl_rows if is_nccl else _markdown_rows)(lines)
        if not rows:
            raise UserError("no rows below the header")
        text = "\n".join(lines)
        collective = _collective(text, rows, has_sum)
        ranks = _ranks(text, rows, collective)
        curve = MeasuredAllReduce([x.size_bytes for x in rows], [x.time_s for x in rows])
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    return PrintedCollective(collective, ranks, curve)


def _nccl_rows(lines: list[str]) -> tuple[list[_Row], bool]:
    """Returns the rows of nccl-tests, and whether the collective adds up."""
    at = next(number for number, line in enumerate(lines) if _NCCL_HEADER.search(line))
    columns = _PREFIX.sub("", lines[at]).split()
    units = re.findall(r"\(([^)]*)\)", lines[at + 1]) if at + 1 < len(lines) else []
    if units[:5] != ["B", "elements", "us", "GB/s", "GB/s"]:
        printed = ", ".join(units[:5]) or "none"
        raise UserError(
            f"line {at + 2}: units {printed}; nccl-tests prints B, elements, us, GB/s, GB/s"
        )
    time, redop = columns.index("time"), columns.index("redop")
    rows, has_sum = [], False
    for number, line in enumerate(lines[at + 2 :], at + 3):
        cells = _PREFIX.sub("", line).split()
        if len(cells) < time + 3 or not (cells[0].isdigit() and cells[1].isdigit()):
            continue
        try:
            size, time_us, algbw, busbw = map(float, (cells[0], *cells[time : time + 3]))
        except ValueError:
            raise UserError(
                f"line {number}: no time and bandwidths in columns of numbers"
            ) from None
        if size == 0:
            continue
        if algbw > 1 and not 0.98 < size / max(time_us, 1e-9) / 1e3 / algbw < 1.02:
            raise UserError(
                f"line {number}: {size:.0f} bytes in {time_us:g} us are not {algbw:g} GB/s"
            )
        has_sum = cells[redop] != "none"
        rows.append(_Row(size, time_us * 1e-6, algbw, busbw))
    return rows, has_sum


def _markdown_rows(lines: list[str]) -> tuple[list[_Row], bool]:
    """Returns the rows of all_reduce_bench.py, whose collective adds up."""
    at = next(number for number, line in enumerate(lines) if _MARKDOWN_HEADER.search(line))
    columns = [re.split(r"[\s(]", cell)[0].lower() for cell in _cells(lines[at])]
    size = next((columns.index(name) for name in ("payload", "size") if name in columns), None)
    if size is None or "busbw" not in columns:
        raise UserError(f"line {at + 1}: columns {', '.join(columns)}; payload, busbw and algbw")
    rows = []
    for number, line in enumerate(lines[at + 1 :], at + 2):
        cells = _cells(line)
        if not cells:
            break
        if set("".join(cells)) <= set(":- "):
            continue
        if len(cells) != len(columns):
            raise UserError(f"line {number}: {len(cells)} columns, the header has {len(columns)}")
        payload = _SIZE.fullmatch(cells[size])
        if payload is None:
            raise UserError(f"line {number}: size {cells[size]!r}; a number of B, KiB, MiB or GiB")
        size_bytes = float(payload[1]) * 1024 ** " KMGT".index(payload[2] or " ")
        algbw, busbw = (
            _bandwidth(cells[columns.index(name)], number) for name in ("algbw", "busbw")
        )
        rows.append(_Row(size_bytes, size_bytes / algbw, algbw / 1e9, busbw / 1e9))
    return rows, True


def _cells(line: str) -> list[str]:
    line = line.strip()
    return [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else []


def _bandwidth(cell: str, number: int) -> float:
    """Returns bytes per second. Raises UserError for another unit, and for what is not above 0."""
    match = re.fullmatch(r"([\d.]+)\s*([A-Za-z/]+)", cell)
    if match is None or match[2] not in _GB_PER_S or not float(match[1]) > 0:
        raise UserError(f"line {number}: bandwidth {cell!r}; above 0, in GBps or Gbps")
    return float(match[1]) * _GB_PER_S[match[2]]


def _collective(text: str, rows: list[_Row], has_sum: bool) -> str:
    named = set(re.findall(r"\b(\w+)_perf\b", text))
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


def _ranks(text: str, rows: list[_Row], collective: str) -> int:
    named = set(re.findall(r"#\s+Rank\s+(\d+)\b", text))
    if named:
        return len(named)
    if over := re.search(r"\bover (\d+) ranks\b", text):
        return int(over[1])
    rounds = 2 if collective == "all_reduce" else 1
    fastest = max(rows, key=lambda row: row.algbw)
    # Bandwidths are printed to a hundredth: the true ones are within half of it.
    ratios = [(fastest.busbw + off) / (fastest.algbw - off) for off in (-0.005, 0.005)]
    numbers = {round(rounds / (rounds - ratio)) for ratio in ratios if ratio < rounds}
    if max(ratios) >= rounds or len(numbers) > 1 or min(numbers) < 2:
        raise UserError("the number of ranks is not stated; keep nccl-tests' '# Rank' lines")
    return numbers.pop()
