"""The tokens of a data set as an endless stream, and the part of it that each rank trains on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from common.data.shard_files import ShardWriter, read_shard, write_shard
from common.errors import UserError
from common.runtime.wording import counted

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["ShardWriter", "TokenBatches", "TokenShards", "read_shard", "write_shard"]

CHUNK_TOKENS = 2**20
"""Tokens that are compared with the vocabulary's size at once."""


@dataclass(frozen=True)
class TokenShards:
    """The shards of one data set as an endless stream of tokens, one epoch after another."""

    paths: tuple[Path, ...]
    lengths: tuple[int, ...]
    """Tokens of each shard."""

    @classmethod
    def open(cls, path: Path | str) -> TokenShards:
        """Opens a folder's ``*.bin``, in the order of their names, or one file.

        Raises:
            UserError: no shard there, or one that ``read_shard`` refuses.
        """
        path = Path(path)
        make = "ddplab data tokens makes shards"
        if not path.exists():
            raise UserError(f"no token shards: {path} does not exist; {make}")
        paths = tuple(sorted(path.glob("*.bin"))) if path.is_dir() else (path,)
        if not paths:
            raise UserError(f"no token shards: {path} holds no *.bin; {make}")
        return cls(paths, tuple(len(read_shard(shard)) for shard in paths))

    @property
    def num_tokens(self) -> int:
        """Returns the number of tokens of all shards, which is one epoch."""
        return sum(self.lengths)

    def read(self, position: int, count: int) -> np.ndarray:
        """Reads the tokens at position, position + 1, … of the endless stream, int64 [count]."""
        if count > self.num_tokens:
            return np.resize(self.read(position, self.num_tokens), count)
        tokens = np.empty(count, np.int64)
        filled = 0
        for shard, start, length in self._spans(position, count):
            tokens[filled : filled + length] = read_shard(self.paths[shard])[start : start + length]
            filled += length
        return tokens

    def check_vocabulary(
        self, vocab_size: int, position: int, count: int, *, this_rank_only: bool = False
    ) -> None:
        """Raises UserError if ``read(position, count)`` has a token >= ``vocab_size``."""
        for shard, start, length in self._spans(position, min(count, self.num_tokens)):
            tokens = read_shard(self.paths[shard])
            for first in range(start, start + length, CHUNK_TOKENS):
                chunk = tokens[first : min(first + CHUNK_TOKENS, start + length)]
                if int(chunk.max()) >= vocab_size:
                    index = int((chunk >= vocab_size).argmax())
                    raise UserError(
                        f"{self.paths[shard]}: token {chunk[index]} at {first + index} is outside "
                        f"the model's vocabulary of {vocab_size} (0 to {vocab_size - 1})",
                        this_rank_only=this_rank_only,
                    )

    def _spans(self, position: int, count: int) -> Iterator[tuple[int, int, int]]:
        """Yields the parts of shards that make up a part of the stream.

        Each is (index of the shard, first token in it, number of tokens).
        """
        if position < 0 or count < 0:
            raise ValueError(f"position {position}, count {count}: neither is below 0")
        shard, start = 0, position % self.num_tokens
        while start >= self.lengths[shard]:
            start -= self.lengths[shard]
            shard += 1
        while count:
            length = min(count, self.lengths[shard] - start)
            yield shard, start, length
            count -= length
            shard, start = (shard + 1) % len(self.lengths), 0


@dataclass(kw_only=True)
class TokenBatches:
    """The micro-batches of one rank.

    Its only state is ``position``, the number of tokens that all ranks have consumed so far.

    A step takes the next ``global_batch_size`` × ``seq_len`` tokens of the stream. Its sequence j
    starts at position + j · seq_len, and its targets are the same tokens one further. Micro-batch
    k of rank r holds the sequences from (k · world_size + r) · micro_batch_size on. So each token
    of an epoch is an input exactly once, and a step sees the same sequences on any number of ranks.

    Raises:
        UserError: sizes below 1 or that do not divide, or a data set too small for one sequence.
    """

    shards: TokenShards
    global_batch_size: int
    micro_batch_size: int
    seq_len: int
    rank: int
    world_size: int
    vocab_size: int
    position: int = 0

    def __post_init__(self) -> None:
        sizes = {
            "global batch size": self.global_batch_size,
            "micro-batch size": self.micro_batch_size,
            "sequence length": self.seq_len,
            "number of ranks": self.world_size,
            "vocabulary size": self.vocab_size,
        }
        for name, size in sizes.items():
            if size < 1:
                raise UserError(f"{name} {size}: must be at least 1")
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank {self.rank} of {self.world_size}")
        at_once = self.micro_batch_size * self.world_size
        if self.global_batch_size % at_once:
            below = self.global_batch_size // at_once * at_once
            nearest = f"{below} or {below + at_once}" if below else f"{at_once}"
            raise UserError(
                f"global batch size {self.global_batch_size} is no multiple of micro-batch size "
                f"{self.micro_batch_size} × {counted(self.world_size, 'rank')}; nearest: {nearest}"
            )
        if self.shards.num_tokens < self.seq_len + 1:
            raise UserError(
                f"{self.shards.paths[0].parent}: {self.shards.num_tokens} tokens; a sequence of "
                f"{self.seq_len} and its targets need at least {self.seq_len + 1}"
            )

    @property
    def accumulation(self) -> int:
        """Returns the number of micro-batches of this rank in a step."""
        return self.global_batch_size // (self.micro_batch_size * self.world_size)

    def next_step(self) -> list[tuple[Tensor, Tensor]]:
        """Reads this rank's micro-batches of the next step and advances by one global batch.

        Returns:
            ``accumulation`` pairs (tokens, targets), both int64 [micro_batch_size, seq_len], on
            the CPU.

        Raises:
            UserError: a token outside the vocabulary, which this rank alone may see.
        """
        batches = [self._micro_batch(k) for k in range(self.accumulation)]
        self.position += self.global_batch_size * self.seq_len
        return batches

    def _micro_batch(self, k: int) -> tuple[Tensor, Tensor]:
        import torch

        # A micro-batch's sequences are adjacent, so one read takes them all and the last target.
        sequence = (k * self.world_size + self.rank) * self.micro_batch_size
        start = self.position + sequence * self.seq_len
        count = self.micro_batch_size * self.seq_len + 1
        tokens = self.shards.read(start, count)
        if int(tokens.max()) >= self.vocab_size:
            self.shards.check_vocabulary(self.vocab_size, start, count, this_rank_only=True)
        shape = (self.micro_batch_size, self.seq_len)
        return (
            torch.from_numpy(tokens[:-1].reshape(shape)),
            torch.from_numpy(tokens[1:].copy().reshape(shape)),
        )
