"""Reads single rows of the tables that nccl-tests and all_reduce_bench.py print."""

from __future__ import annotations

import re
from dataclasses import dataclass

from common.errors import UserError

PREFIX = re.compile(r"^\s*(?:\[[\d,]+\]<\w+>:|\d+:)?[\s#]*")
_GB_PER_S = {"GBps": 1e9, "GB/s": 1e9, "Gbps": 1e9 / 8, "Gb/s": 1e9 / 8}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)i?B")


@dataclass(frozen=True)
class Row:
    """A row: size in bytes, seconds, and both bandwidths in GB/s as they are printed."""

    size_bytes: float
    time_s: float
    algbw: float
    busbw: float


def check_units(text: str, number: int) -> None:
    """Raises UserError unless a line below a header has the units of nccl-tests."""
    units = re.findall(r"\(([^)]*)\)", text)
    if units[:5] != ["B", "elements", "us", "GB/s", "GB/s"]:
        printed = ", ".join(units[:5]) or "none"
        raise UserError(
            f"line {number}: units {printed}; nccl-tests prints B, elements, us, GB/s, GB/s"
        )


def nccl_row(size_text: str, cells: list[str], number: int) -> Row | None:
    """Returns a row of nccl-tests; None of a message without length."""
    try:
        size, time_us, algbw, busbw = map(float, (size_text, *cells))
    except ValueError:
        raise UserError(f"line {number}: no time and bandwidths in columns of numbers") from None
    if size == 0:
        return None
    if algbw > 1 and not 0.98 < size / max(time_us, 1e-9) / 1e3 / algbw < 1.02:
        raise UserError(f"line {number}: {size:.0f} bytes in {time_us:g} us are not {algbw:g} GB/s")
    return Row(size, time_us * 1e-6, algbw, busbw)


def markdown_row(cells: dict[str, str], number: int) -> Row:
    """Returns a row of all_reduce_bench.py."""
    text = cells.get("payload", cells.get("size", ""))
    payload = _SIZE.fullmatch(text)
    if payload is None:
        raise UserError(f"line {number}: size {text!r}; a number of B, KiB, MiB or GiB")
    size_bytes = float(payload[1]) * 1024 ** " KMGT".index(payload[2] or " ")
    algbw, busbw = (_bandwidth(cells[name], number) for name in ("algbw", "busbw"))
    return Row(size_bytes, size_bytes / algbw, algbw / 1e9, busbw / 1e9)


def cells_of(line: str) -> list[str]:
    """Returns the cells of a line of a Markdown table; none of another line."""
    line = line.strip()
    return [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else []


def _bandwidth(cell: str, number: int) -> float:
    """Returns bytes per second. Raises UserError for another unit, and for what is not above 0."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z/]+)", cell)
    if match is None or match[2] not in _GB_PER_S or not float(match[1]) > 0:
        raise UserError(f"line {number}: bandwidth {cell!r}; above 0, in GBps or Gbps")
    return float(match[1]) * _GB_PER_S[match[2]]
