"""Made-up batches of tokens, and their way from host memory to the device."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor


def random_tokens(
    batch_size: int, sequence_length: int, vocab_size: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Draws uniform tokens and next-token targets, both int64 [batch_size, sequence_length]."""
    shape = (batch_size, sequence_length + 1)
    tokens = torch.randint(vocab_size, shape, device=device)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


POOL = 8
"""Number of distinct batches that a stream repeats in turn."""


class BatchStream:
    """An endless stream of (tokens, targets) on ``device``, both int64 [batch, length].

    The batches lie in host memory. With ``asynchronous`` they are pinned, and each is copied by a
    CUDA stream of its own while the batch before is computed. Without, as most first scripts do
    it, the copy is made when the batch is asked for. On a CPU both are the same and nothing is
    copied.
    """

    def __init__(
        self,
        batch_size: int,
        seq_len: int,
        vocab_size: int,
        device: torch.device,
        asynchronous: bool = False,
    ) -> None:
        self.device = device
        self.asynchronous = asynchronous and device.type == "cuda"
        host = torch.device("cpu")
        self._pool = [random_tokens(batch_size, seq_len, vocab_size, host) for _ in range(POOL)]
        if self.asynchronous:
            self._pool = [(a.pin_memory(), b.pin_memory()) for a, b in self._pool]
            self._copies = torch.cuda.Stream(device)
            self._next = self._start_copy(0)
        self._index = 0

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return self

    def __next__(self) -> tuple[Tensor, Tensor]:
        if not self.asynchronous:
            tokens, targets = self._pool[self._index % POOL]
            self._index += 1
            return tokens.to(self.device), targets.to(self.device)
        current = torch.cuda.current_stream(self.device)
        current.wait_stream(self._copies)
        batch = self._next
        for tensor in batch:  # keep its memory until the computing stream is done with it
            tensor.record_stream(current)
        self._index += 1
        self._next = self._start_copy(self._index)
        return batch

    def _start_copy(self, index: int) -> tuple[Tensor, Tensor]:
        with torch.cuda.stream(self._copies):
            tokens, targets = self._pool[index % POOL]
            return (
                tokens.to(self.device, non_blocking=True),
                targets.to(self.device, non_blocking=True),
            )
