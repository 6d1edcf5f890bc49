"""Ranks that look for their largest micro-batch while one of them has little memory: JSON lines."""

from __future__ import annotations

import ctypes
import json
from functools import partial

import torch
from torch import nn

from common.errors import RunFailed, UserError
from common.runtime.group.process_group import process_group
from common.runtime.machine.memory_limit import limit_memory, writable_bytes
from common.scheduling.memory_probe import largest_micro_batch, probe_largest_batches

LENGTH, WIDTH, BOUND = 128, 2048, 16
ROOM_BYTES = 64 * 2**20
M_MMAP_THRESHOLD = -3  # malloc.h


class Wide(nn.Module):
    """Takes 7 MiB a text, and has few parameters; without matrix products and their work space."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(8, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, input_ids, attention_mask):
        x = self.tokens(input_ids) * attention_mask[:, :, None]
        for _ in range(4):
            x = torch.tanh(x * self.scale)
        return self.head(x.mean(1))


def ended(search) -> str | list:
    """Returns what a search gave, or the kind and words of the error that it ended with."""
    try:
        return search()
    except (ValueError, RunFailed, UserError) as error:
        return f"{type(error).__name__}: {error}"


with process_group("cpu") as worker:

    def broken(batch_size: int) -> None:
        if worker.rank == 1 and batch_size == 4:
            raise ValueError("no such size\nand more")

    found = {"broken": ended(lambda: largest_micro_batch(broken, BOUND, worker.gather))}

    # Tensors are mapped one by one, so that a freed one is the system's again, at once.
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 64 * 1024)
    torch.manual_seed(0)
    model = Wide()
    probe = {"model": model, "worker": worker, "upper_bound": BOUND}
    probe_largest_batches(max_length=LENGTH, real_steps=True, **probe | {"upper_bound": 1})
    if worker.rank == 1:
        limit_memory(writable_bytes() + ROOM_BYTES)
    found["calculated"] = probe_largest_batches(max_length=LENGTH, **probe)
    random_state = torch.get_rng_state()
    kept_mib = []
    for bound in (BOUND, 4):  # a thread that starts meanwhile maps a stack of 8 MiB, once
        before = writable_bytes()
        settings = probe | {"upper_bound": bound}
        largest = probe_largest_batches(max_length=LENGTH, real_steps=True, **settings)
        kept_mib.append((writable_bytes() - before) / 2**20)
        found.setdefault("largest", largest)
    found["kept_mib"] = min(kept_mib)
    found["gradients"] = sum(parameter.grad is not None for parameter in model.parameters())
    found["random_state_is_the_same"] = torch.equal(random_state, torch.get_rng_state())
    for name, real in (("none_fits", True), ("none_fits_by_calculation", False)):
        settings = {"max_length": 12 * LENGTH, "real_steps": real, "upper_bound": 2}
        found[name] = ended(partial(probe_largest_batches, **probe | settings))
    print(json.dumps(found), flush=True)
