"""What a training step takes on a CPU, for any batch size, from two small steps.

Every operator's outputs are followed while a step of two texts is computed, and again for three.
The operators are the same, so at each of them the difference is what one text takes: a straight
line in the batch size, and the highest of these lines is the peak. A rank then knows how many texts
fit without filling its memory, which on Linux could get it killed.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from common.runtime.memory_limit import available_memory_bytes, writable_bytes

MARGIN = 0.1
"""Part of the memory left free: for kernels' work space, and for blocks that do not fit a gap."""


@dataclass(frozen=True)
class StepMemory:
    """Bytes that a step takes beyond the parameters, which are there already.

    Attributes:
        held_bytes: what is there in every step: optimizer states.
        fixed_bytes: after each operator, what is there whatever the batch, such as gradients.
        sample_bytes: after each operator, what one text of the greatest length takes.
    """

    held_bytes: int
    fixed_bytes: np.ndarray
    sample_bytes: np.ndarray

    def peak_bytes(self, batch_size: int) -> int:
        """The most that is there at once in a step of that batch size."""
        return self.held_bytes + int((self.fixed_bytes + batch_size * self.sample_bytes).max())

    def largest_batch(self, limit_bytes: int, upper_bound: int) -> int:
        """The largest batch size up to the upper bound that stays within the limit; 0 if none."""
        sizes = range(upper_bound, 0, -1)
        return next((size for size in sizes if self.peak_bytes(size) <= limit_bytes), 0)


def measure_step_memory(
    step: Callable[[int], object], model: nn.Module, held_bytes: int = 0
) -> StepMemory:
    """Follow two steps. Not one of a single text, for which some copies are not needed.

    Args:
        step: computes forward and backward pass of that batch size, in this thread.
        model: whose parameters and buffers are not counted.
        held_bytes: as in ``StepMemory``.
    """
    two, three = (_totals(step, model, batch_size) for batch_size in (2, 3))
    return StepMemory(held_bytes, 3 * two - 2 * three, three - two)


def rank_limit_bytes(ranks_on_host: int) -> int:
    """What one of a host's ranks may still take, its share or up to its limit, less a margin."""
    share = available_memory_bytes() / ranks_on_host
    return int((1 - MARGIN) * min(share, _below_own_limit_bytes()))


def _totals(step: Callable[[int], object], model: nn.Module, batch_size: int) -> np.ndarray:
    with _Allocations([*model.parameters(), *model.buffers()]) as allocations:
        step(batch_size)
    return np.array(allocations.totals)


class _Allocations(TorchDispatchMode):
    """Adds up the storages that operators return, until nobody holds them any more."""

    def __init__(self, known: list[Tensor]) -> None:
        super().__init__()
        self.totals: list[int] = []
        self._now = 0
        self._storages = weakref.WeakSet(tensor.untyped_storage() for tensor in known)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._note(leaf.untyped_storage())
        self.totals.append(self._now)
        return result

    def _note(self, storage: torch.UntypedStorage) -> None:
        if storage not in self._storages:
            self._storages.add(storage)
            self._now += storage.nbytes()
            weakref.finalize(storage, self._forget, storage.nbytes())

    def _forget(self, freed_bytes: int) -> None:
        self._now -= freed_bytes


def _below_own_limit_bytes() -> float:
    """What this process may still write to before its own limit; infinite without one."""
    if sys.platform != "linux":
        return float("inf")
    import resource

    limit, _ = resource.getrlimit(resource.RLIMIT_DATA)
    return float("inf") if limit == resource.RLIM_INFINITY else max(0, limit - writable_bytes())
