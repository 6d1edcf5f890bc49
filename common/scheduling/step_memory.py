"""The memory of a training step on a CPU, for any batch size, from two small steps.

Every operator's outputs are followed while a step of two texts is computed, and again for three.
The operators are the same, so at each of them the difference is the memory of one text: a straight
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

from common.runtime.machine.memory_limit import available_memory_bytes, writable_bytes

MARGIN = 0.1
"""Share of the memory left free, for kernels' work space and for fragmentation."""


@dataclass(frozen=True)
class StepMemory:
    """Bytes that a step takes beyond the parameters, which are allocated already.

    Attributes:
        held_bytes: allocated during the whole step: optimizer states.
        fixed_bytes: [operators] allocated after each operator for any batch, such as gradients.
        sample_bytes: [operators] allocated after each operator for each text of the greatest
            length.
    """

    held_bytes: int
    fixed_bytes: np.ndarray
    sample_bytes: np.ndarray

    def peak_bytes(self, batch_size: int) -> int:
        """Returns the peak of the bytes allocated in a step of a batch size."""
        return self.held_bytes + int((self.fixed_bytes + batch_size * self.sample_bytes).max())

    def largest_batch(self, limit_bytes: int, upper_bound: int) -> int:
        """Returns the largest batch size up to the upper bound that fits the limit; 0 if none."""
        sizes = range(upper_bound, 0, -1)
        return next((size for size in sizes if self.peak_bytes(size) <= limit_bytes), 0)


def measure_step_memory(
    step: Callable[[int], object], model: nn.Module, held_bytes: int = 0
) -> StepMemory:
    """Measures the memory of any step, by following two small ones.

    Args:
        step: computes forward and backward pass of a batch size, in this thread.
        model: the model, whose parameters and buffers are not counted.
        held_bytes: as in ``StepMemory``.
    """
    # After each operator the total is fixed + batch size · sample. Two batch sizes give both: the
    # slope is three − two, the value at 0 is 3 · two − 2 · three. A single text is not used, as
    # some copies are not needed for it.
    two, three = (_totals(step, model, batch_size) for batch_size in (2, 3))
    return StepMemory(held_bytes, 3 * two - 2 * three, three - two)


def rank_limit_bytes(ranks_here: int) -> int:
    """Returns the bytes that a rank may still take: its share or its own limit, less a margin.

    ``ranks_here`` are those that share this machine's memory.
    """
    share = available_memory_bytes() / ranks_here
    return int((1 - MARGIN) * min(share, _below_own_limit_bytes()))


def _totals(step: Callable[[int], object], model: nn.Module, batch_size: int) -> np.ndarray:
    with _Allocations([*model.parameters(), *model.buffers()]) as allocations:
        step(batch_size)
    return np.array(allocations.totals)


class _Allocations(TorchDispatchMode):
    """A running total of the bytes of storages that operators return and that still exist.

    ``totals`` has the total after each operator.
    """

    def __init__(self, tensors: list[Tensor]) -> None:
        super().__init__()
        self.totals: list[int] = []
        self._now = 0
        self._storages = weakref.WeakSet(tensor.untyped_storage() for tensor in tensors)

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
    """Returns the bytes this process may still allocate below its own limit; infinite if none."""
    if sys.platform != "linux":
        return float("inf")
    import resource

    limit, _ = resource.getrlimit(resource.RLIMIT_DATA)
    return float("inf") if limit == resource.RLIM_INFINITY else max(0, limit - writable_bytes())
