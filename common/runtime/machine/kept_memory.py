"""Freed memory that the process keeps, so that the next training step finds it mapped already.

glibc returns large freed blocks to the kernel, at the latest from 32 MiB on. A training step on a
CPU frees and allocates gradients, logits and activations each time, and the kernel clears every
4 KiB page of them when it is first touched: for GPT-2 124M a few hundred thousand page faults a
step. On GPUs PyTorch's own allocator keeps freed memory; here glibc is told to (mallopt(3)).
"""

from __future__ import annotations

import contextlib
import ctypes
import platform
from collections.abc import Iterator

import torch

TRIM_THRESHOLD, MMAP_THRESHOLD, MMAP_MAX = -1, -3, -4
"""Numbers of mallopt's settings, from glibc's malloc.h."""
MIB = 2**20


@contextlib.contextmanager
def kept_memory() -> Iterator[bool]:
    """Keeps freed memory inside the block; yields True if this system can (glibc only).

    The whole process is affected, and holds its peak until the end of the block. Afterwards the
    thresholds are those that glibc's own adjustment reaches after blocks of 32 MiB were freed.
    """
    if platform.libc_ver()[0] != "glibc":
        yield False
        return
    libc = ctypes.CDLL(None)
    libc.mallopt(MMAP_MAX, 0)  # large blocks come from the heap, where freed ones are used again
    libc.mallopt(TRIM_THRESHOLD, -1)  # and its end is not given back
    try:
        yield True
    finally:
        libc.mallopt(MMAP_MAX, 65536)
        libc.mallopt(MMAP_THRESHOLD, 32 * MIB)
        libc.mallopt(TRIM_THRESHOLD, 64 * MIB)
        libc.malloc_trim(0)


def settle_heap(gradient_bytes: int) -> None:
    """Brings glibc into the state in which DDP leaves it, where freed gradients are kept.

    DDP frees its first buckets when it makes the final ones. By the first free of a large block
    glibc learns to take blocks up to that size from the heap, and to give the heap's end back only
    where twice as much is free (mallopt(3), M_MMAP_THRESHOLD). Until then a step's gradients go
    back to the kernel when they are dropped: 4,000 page faults in a pass of GPT-2 Nano, which make
    it 7 to 10 % longer than the passes that DDP makes.

    Args:
        gradient_bytes: bytes of the model's gradients, of which DDP's first bucket but one takes
            25 MiB at most.
    """
    block = torch.empty(min(gradient_bytes, 25 * MIB), dtype=torch.uint8)
    del block
