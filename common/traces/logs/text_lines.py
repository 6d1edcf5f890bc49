"""Reads files as lines of text, whatever wrote them, in bounded time and memory.

A log may be packed by gzip, in UTF-16 (PowerShell writes it), coloured, labelled by torchrun or
srun, and larger than anybody wants to wait for.
"""

from __future__ import annotations

import gzip
import io
import os
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from common.errors import UserError

MOST_BYTES = 2**28
"""Bytes that are read of a file: half from its beginning, half from its end."""
LONGEST = 2**16
"""Characters of a line; what is beyond is read as a line of the same number."""
HEAD_BYTES = 2**13
GZIP = b"\x1f\x8b"
BOMS = {b"\xff\xfe": "utf-16-le", b"\xfe\xff": "utf-16-be"}
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b\][^\x07]*\x07|[\x00-\x08\x0b\x0c\x0e-\x1f]")
LABEL = re.compile(
    r"\s*(?:\[rank(?P<rank>\d+)\]:|\[[A-Za-z_]+\d+\]:|\d{1,5}: "
    r"|\d{4}-\d\d-\d\dT[\d:.]+(?:Z|[+-]\d\d:?\d\d) (?:std(?:out|err) [FP] )?) ?"
)
"""Labels of PyTorch, of ``torchrun --tee``, of ``srun --label``, and times of a container's log."""
RANK_OF_PATH = re.compile(r"attempt_\d+/(\d+)/std(?:err|out)\.log$|rank[_.-]?(\d+)[^/]*$")
SIGNATURES = {
    b"PK\x03\x04": "a zip archive, weights that torch.save wrote, or Excel (export it as CSV)",
    b"\x7fELF": "a program",
    b"\x89PNG": "a picture",
    b"\xff\xd8\xff": "a picture",
    b"%PDF": "a PDF",
    b"PAR1": "a Parquet table",
    b"SQLite format 3": "an SQLite database (Nsight Systems exports such)",
    b"\x93NUMPY": "an array of NumPy",
    b"\xfd7zXZ": "packed by xz",
    b"BZh": "packed by bzip2",
    b"\x28\xb5\x2f\xfd": "packed by zstd",
    b"\x80\x02": "a pickle",
    b"\x80\x03": "a pickle",
    b"\x80\x04": "a pickle",
    b"\x80\x05": "a pickle",
}


@dataclass(frozen=True)
class Line:
    """A line of a text.

    Attributes:
        file: name of the file, for messages.
        number: number of the line, from 1 on; 0 near the end of a file too large to be counted.
        text: line without colours and labels.
        rank: rank by PyTorch's label, or by the file's name; None where neither tells.
    """

    file: str
    number: int
    text: str
    rank: int | None = None

    @property
    def where(self) -> str:
        """Returns the place of the line, as evidence."""
        return f"[{self.file}:{self.number}]" if self.number else f"[{self.file}, near its end]"


def head_of(path: Path) -> bytes:
    """Reads the beginning of a file, unpacked.

    Raises UserError if it cannot be read, or is gzip that cannot be unpacked.
    """
    try:
        with path.open("rb") as file:
            head = file.read(HEAD_BYTES)
        if head.startswith(GZIP):
            return zlib.decompressobj(wbits=zlib.MAX_WBITS | 16).decompress(head, HEAD_BYTES)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None
    except zlib.error:
        raise UserError(f"{path}: gzip that cannot be unpacked") from None
    return head


def encoding_of(head: bytes) -> str | None:
    """Returns the encoding of a text that begins so; None for what is no text."""
    if head[:2] in BOMS:
        return BOMS[head[:2]]
    zeros = head.count(0)
    if not zeros:
        return "utf-8"
    half, odd = len(head) / 2, head[1::2].count(0)
    for name, matching, elsewhere in (
        ("utf-16-le", odd, zeros - odd),
        ("utf-16-be", zeros - odd, odd),
    ):
        if len(head) > 16 and matching > 0.4 * half and elsewhere < 0.02 * half:
            return name  # text without a mark of its order, mostly of Latin letters
    return None


def looks_like(head: bytes) -> str:
    """Returns what a file that nobody reads looks like, by its beginning."""
    for signature, kind in SIGNATURES.items():
        if head.startswith(signature):
            return kind
    if head[257:262] == b"ustar":
        return "a tar archive; unpack it"
    encoding = encoding_of(head)
    if not head.strip(b"\0 \r\n\t"):
        return "empty"
    if encoding is None:
        return "binary"
    text = head.decode(encoding, errors="replace").lstrip("\ufeff \t\r\n")
    first = next((line.strip() for line in text.splitlines() if line.strip()), "")
    if text[:1] in ("{", "["):
        return "JSON that is not a trace of torch.profiler"
    if "," in first and len(first.split(",")) > 2:
        return f"a table: {_short(first)}"
    return f"text: {_short(first)}"


def _short(text: str) -> str:
    text = "".join(c if c.isprintable() else " " for c in ESCAPES.sub("", text))
    return f"{text[:50]}…" if len(text) > 50 else text


def lines_of(path: Path, name: str, notes: list[str]) -> Iterator[Line]:
    """Yields the lines of a text; what is left out, or breaks off, is noted.

    ``name`` is that of the file in messages; ``notes`` get sentences on what was not read.
    """
    head = head_of(path)
    encoding = encoding_of(head) or "utf-8"
    match = RANK_OF_PATH.search(name)
    rank = int(match[1] or match[2]) if match else None
    try:
        with path.open("rb") as raw:
            packed = raw.read(2) == GZIP
            size = os.fstat(raw.fileno()).st_size
            raw.seek(0)
            if packed:
                with gzip.open(raw) as file:
                    yield from _lines(file, encoding, name, rank, MOST_BYTES)
                    if file.read(1):
                        notes.append(f"{name}: what follows its first {MOST_BYTES >> 20} MiB")
                return
            yield from _lines(raw, encoding, name, rank, MOST_BYTES if size <= MOST_BYTES else -1)
            if size > MOST_BYTES:
                middle = size - MOST_BYTES // 2
                raw.seek(middle + middle % 2)
                for line in _lines(raw, encoding, name, rank, MOST_BYTES):
                    yield Line(line.file, 0, line.text, line.rank)
                notes.append(f"{name}: {(size - MOST_BYTES) >> 20} MiB between beginning and end")
    except (OSError, EOFError, zlib.error):
        notes.append(f"{name}: breaks off; what stands before that was read")


def _lines(raw: BinaryIO, encoding: str, name: str, rank: int | None, most: int) -> Iterator[Line]:
    """Yields lines until so many characters were read; -1 stands for half of what is read."""
    remaining = MOST_BYTES // 2 if most < 0 else most
    file = io.TextIOWrapper(raw, encoding, errors="replace", newline="\n")
    number = 1
    try:
        while remaining > 0 and (text := file.readline(min(LONGEST, remaining))):
            remaining -= len(text) * (2 if encoding.startswith("utf-16") else 1)
            yield _line(name, number, text, rank)
            number += text.endswith("\n")
    finally:
        file.detach()


def _line(name: str, number: int, text: str, rank: int | None) -> Line:
    text = text.lstrip("\ufeff").rstrip("\r\n")
    if not text.isprintable():
        text = ESCAPES.sub("", text)
    while (match := LABEL.match(text)) and match.end():
        rank = int(match["rank"]) if match["rank"] else rank
        text = text[match.end() :]
    return Line(name, number, text, rank)
