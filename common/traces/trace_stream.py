"""Reads a trace record by record, so that one of any size takes little memory.

A trace that was cut off gives all records before the cut, and then the error.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from common.errors import UserError
from common.traces.logs.text_lines import GZIP

CHUNK, PIECE, LONGEST = 2**22, 2**14, 2**25
"""Characters that are looked at and read at a time, and those of the longest record."""
EVENTS = '"traceEvents"'
DECODER = json.JSONDecoder()


def open_trace(path: Path) -> TextIO:
    """Opens a profiler's trace, plain or gzip by its first bytes, whatever its name."""
    with path.open("rb") as file:
        is_packed = file.read(len(GZIP)) == GZIP
    return gzip.open(path, "rt", errors="replace") if is_packed else path.open(errors="replace")


def head_of(path: Path) -> dict:
    """Reads what a trace says of its process before its events: rank, world, host, clock.

    Raises UserError for a file that is no trace.
    """
    try:
        with open_trace(path) as file:
            text = _more(file)
    except (OSError, EOFError, UnicodeError, zlib.error) as error:
        raise _not_a_trace(path, error) from None
    before = text.partition(EVENTS)[0].rstrip().removesuffix(",")
    try:
        return json.loads(before + "}")
    except (ValueError, RecursionError):
        return {}


def records_of(path: Path) -> Iterator[dict]:
    """Yields the records of a trace as they are in the file, with all their arguments.

    Raises UserError for a file that is no trace, or once a trace breaks off.
    """
    try:
        with open_trace(path) as file:
            yield from _records(file, path)
    except (OSError, ValueError, EOFError, zlib.error, RecursionError) as error:
        raise _not_a_trace(path, error) from None


def _not_a_trace(path: Path, error: Exception) -> UserError:
    if isinstance(error, OSError) and error.strerror:
        return UserError(f"{path}: {error.strerror}")
    deep = ", nested too deep" if isinstance(error, RecursionError) else ""
    return UserError(f"{path}: not a trace of torch.profiler{deep}")


class CutOff(UserError):
    """A trace ended before its list of events did."""


def _records(file: TextIO, path: Path) -> Iterator[dict]:
    text = _more(file)
    start = 0 if text.lstrip().startswith("[") else _start_of_events(text)
    position = text.index("[", start) + 1
    count = 0
    while True:
        position = _skip(text, position)
        if text[position : position + 1] == "]":
            if not (count or start):
                raise ValueError("an empty list")
            return
        try:
            record, position = DECODER.raw_decode(text, position)
        except ValueError:
            more = _more(file) if len(text) - position < LONGEST else ""
            if not more:
                raise CutOff(
                    f"{path}: a trace of torch.profiler that breaks off after {count} records"
                ) from None
            text, position = text[position:] + more, 0
            continue
        if not isinstance(record, dict):
            raise ValueError("records are objects")
        count += 1
        yield record


def _more(file: TextIO) -> str:
    """Reads on; what stands before the place where a compressed file breaks off is returned."""
    pieces, remaining = [], CHUNK
    try:
        while remaining > 0 and (piece := file.read(PIECE)):
            pieces.append(piece)
            remaining -= len(piece)
    except (EOFError, zlib.error):
        if not pieces:
            return ""
    return "".join(pieces)


def _start_of_events(text: str) -> int:
    if not text.lstrip().startswith("{"):
        raise ValueError("no object")
    return text.index(EVENTS)


def _skip(text: str, position: int) -> int:
    """Returns the position of the next record, or of the end of the list."""
    while text[position : position + 1] in (" ", "\n", "\r", "\t", ","):
        position += 1
    return position
