"""Token shards on disk: written whole or not at all, checked when they are read.

The format is that of llm.c and modded-nanogpt (``write_datafile`` in llm.c's
``dev/data/data_common.py``), so files made for either can be trained on: a header of 256
little-endian int32, of which the first three are the magic number 20240520, the version 1 and the
number of tokens, then the tokens as little-endian uint16. Files are mapped, never loaded.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import numpy as np

from common.errors import UserError, naming_os_errors

MAGIC, VERSION = 20240520, 1
HEADER_BYTES = 256 * 4
TOKEN_BYTES = 2
LARGEST_TOKEN = 2**16 - 1
SOURCE_FILE = "source.json"
"""Name of the file beside synthetic shards that describes their source."""
MOST_TOKENS = 2**31 - 1
"""Upper bound on the tokens of one shard: the header's count is a signed 32-bit number."""


def write_shard(path: Path | str, tokens: np.ndarray | Sequence[int]) -> None:
    """Writes one shard beside ``path``, flushes it to disk and renames it.

    Args:
        path: the file; what was there before is replaced.
        tokens: integers [count], each from 0 to 65535.

    Raises:
        UserError: a token that 16 bits do not hold, no tokens or too many, an unwritable folder.
    """
    path = Path(path)
    part = _Part(path)
    try:
        part.append(_as_uint16(tokens))
        part.finish()
        part.partial.replace(path)
    except BaseException:
        part.discard()
        raise


class ShardWriter:
    """A writer of arrays of tokens to shards ``<prefix>_000000.bin``, ``<prefix>_000001.bin``, ….

    A context manager. Shards get their names together when the block ends without an exception,
    since a data set that is cut short looks like a whole one; after an exception nothing is left.
    ``written`` then holds (name, tokens) of each shard.

    Raises:
        UserError: the folder holds shards already, which would be mixed with the new ones, or a
            record of their source, or cannot be written; a token that 16 bits do not hold.
    """

    def __init__(
        self, folder: Path | str, prefix: str = "tokens", shard_tokens: int = 100_000_000
    ) -> None:
        if not 1 <= shard_tokens <= MOST_TOKENS:
            raise UserError(f"{shard_tokens} tokens a shard: legal are 1 to {MOST_TOKENS}")
        self.folder = Path(folder)
        self.prefix = prefix
        self.shard_tokens = shard_tokens
        self.num_tokens = 0
        self.written: list[tuple[str, int]] = []
        self._parts: list[_Part] = []

    def __enter__(self) -> ShardWriter:
        if any(self.folder.glob("*.bin")):
            raise UserError(f"{self.folder} holds token shards already; choose another folder")
        if (self.folder / SOURCE_FILE).exists():
            raise UserError(f"{self.folder} holds {SOURCE_FILE} of other shards; remove it")
        self._made_folder = not self.folder.exists()
        with naming_os_errors(f"output folder {self.folder}"):
            self.folder.mkdir(parents=True, exist_ok=True)
        return self

    def append(self, tokens: np.ndarray | Sequence[int]) -> None:
        """Writes tokens, integers [count], after those written before."""
        tokens = _as_uint16(tokens)
        self.num_tokens += len(tokens)
        while len(tokens):
            if not self._parts or self._parts[-1].count == self.shard_tokens:
                if self._parts:
                    self._parts[-1].finish()
                self._parts.append(_Part(self.folder / f"{self.prefix}_{len(self._parts):06d}.bin"))
            room = self.shard_tokens - self._parts[-1].count
            self._parts[-1].append(tokens[:room])
            tokens = tokens[room:]

    def __exit__(
        self, kind: type | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        try:
            if kind is None and self._parts:
                self._parts[-1].finish()
                for part in self._parts:
                    part.partial.replace(part.path)
                    self.written.append((part.path.name, part.count))
        finally:
            for part in self._parts:
                part.discard()
            if self._made_folder and not any(self.folder.iterdir()):
                self.folder.rmdir()


class _Part:
    """A shard being written, under a name that no reader takes for a shard's."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
        self.count = 0
        with naming_os_errors(path):
            self._file: BinaryIO = self.partial.open("wb")
        self._file.write(bytes(HEADER_BYTES))

    def append(self, tokens: np.ndarray) -> None:
        with naming_os_errors(self.path):
            self._file.write(tokens.astype("<u2").tobytes())
        self.count += len(tokens)

    def finish(self) -> None:
        """Writes the header, now that the count is known, and flushes the file to disk."""
        if not 1 <= self.count <= MOST_TOKENS:
            raise UserError(f"{self.path}: {self.count} tokens; a shard holds 1 to {MOST_TOKENS}")
        header = np.zeros(256, "<i4")
        header[:3] = MAGIC, VERSION, self.count
        self._file.seek(0)
        self._file.write(header.tobytes())
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()

    def discard(self) -> None:
        self._file.close()
        self.partial.unlink(missing_ok=True)


def _as_uint16(tokens: np.ndarray | Sequence[int]) -> np.ndarray:
    tokens = np.asarray(tokens)
    if tokens.ndim != 1 or (len(tokens) and tokens.dtype.kind not in "iu"):
        raise ValueError(f"tokens are integers [count], not {tokens.dtype} {list(tokens.shape)}")
    outside = (tokens < 0) | (tokens > LARGEST_TOKEN)
    if outside.any():
        index = int(outside.argmax())
        raise UserError(f"token {tokens[index]} at {index}: a shard holds 0 to {LARGEST_TOKEN}")
    return tokens.astype(np.uint16)


def read_shard(path: Path | str) -> np.memmap:
    """Maps the tokens of one shard, uint16 [count]: only what is accessed is read from disk.

    Raises:
        UserError: the file is missing or no shard of version 1, or does not end where its header
            says.
    """
    path = Path(path)
    with naming_os_errors(path):
        size = path.stat().st_size
        with path.open("rb") as file:
            header = np.frombuffer(file.read(HEADER_BYTES).ljust(HEADER_BYTES, b"\0"), "<i4")
    if size < HEADER_BYTES:
        raise UserError(f"{path}: {size} bytes; a token shard's header alone has {HEADER_BYTES}")
    magic, version, count = map(int, header[:3])
    legal = f"a token shard (16-bit) begins with {MAGIC} and version {VERSION}"
    if magic != MAGIC:
        raise UserError(f"{path}: begins with {magic}; {legal}")
    if version != VERSION:
        raise UserError(f"{path}: begins with {magic} and version {version}; {legal}")
    if count < 1:
        raise UserError(f"{path}: its header says {count} tokens; a shard holds at least 1")
    if size != HEADER_BYTES + count * TOKEN_BYTES:
        body = f"{(size - HEADER_BYTES) / TOKEN_BYTES:.15g}"
        raise UserError(f"{path}: holds {body} tokens, its header says {count}; make it again")
    return np.memmap(path, dtype="<u2", mode="r", offset=HEADER_BYTES, shape=(count,))
