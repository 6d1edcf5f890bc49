"""Made-up batches for benchmarks, in which only the shapes matter."""

from __future__ import annotations

import torch
from torch import Tensor


def random_tokens(
    batch_size: int, sequence_length: int, vocab_size: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Draws uniform tokens and next-token targets, both int64 [batch_size, sequence_length]."""
    shape = (batch_size, sequence_length + 1)
    tokens = torch.randint(vocab_size, shape, device=device)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
