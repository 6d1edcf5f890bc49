"""The largest micro-batch that each rank's memory holds, found before training.

A dynamic plan may give one rank many short texts, so it must know a limit. On a GPU the limit is
found with real forward and backward passes of the longest texts, by doubling and then bisection;
ranks agree after every pass, so that a rank that runs out of memory never leaves the others
waiting. A CPU does not fail in time (Linux promises more memory than there is and then kills a
process), so there the limit is calculated from two small steps: every operator's outputs are
followed while a step of two texts is computed, and again for three. The operators are the same, so
at each of them the difference is the memory of one text: a straight line in the batch size, and the
highest of these lines is the peak.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from common.errors import RunFailed, UserError
from common.runtime.group.network import ranks_on_machine
from common.runtime.group.process_group import Worker
from common.runtime.machine.memory_limit import (
    available_memory_bytes,
    is_out_of_memory,
    writable_bytes,
)
from common.runtime.seeding import kept_random_numbers

Context = Callable[[], AbstractContextManager]


def probe_largest_batches(
    model: nn.Module,
    max_length: int,
    upper_bound: int,
    worker: Worker,
    *,
    optimizer_states: int = 2,
    precision: Context = nullcontext,
    real_steps: bool | None = None,
) -> list[int]:
    """Finds the largest micro-batch of every rank, in rank order; the same list on every rank.

    Weights and random numbers are restored; gradients are dropped.

    Args:
        model: called as ``model(input_ids, attention_mask)``; not yet wrapped in DDP.
        max_length: tokens of the texts that are tried, the longest there can be.
        upper_bound: the largest batch size to try.
        worker: this rank, whose device is tried.
        optimizer_states: numbers that the optimizer keeps for each parameter; AdamW has 2.
        precision: makes the context of a forward pass, such as autocast's.
        real_steps: try real passes; by default on a GPU only, and on a CPU a calculation.

    Raises UserError for an upper bound below 1, or a rank whose memory holds no text; RunFailed
    where another rank failed for another reason.
    """
    if upper_bound < 1:
        raise UserError(f"probe_max_batch {upper_bound}: at least 1")
    step = LocalStep(model, max_length, worker, optimizer_states, precision)
    if real_steps is None:
        real_steps = worker.device.type == "cuda"
    if real_steps:
        largest = largest_micro_batch(step, upper_bound, worker.gather)
    else:
        largest = calculated_batch(
            step, upper_bound, ranks_on_machine(worker.ranks.local_world_size)
        )
    batch_sizes = worker.gather(largest)
    short = [str(rank) for rank, batch_size in enumerate(batch_sizes) if batch_size == 0]
    if short:
        raise UserError(
            f"max_length {max_length}: not even one such text fits in the memory of "
            f"{'rank' if len(short) == 1 else 'ranks'} {', '.join(short)}; "
            "give a smaller --max_length or a smaller model"
        )
    return batch_sizes


def largest_micro_batch(
    try_step: Callable[[int], object], upper_bound: int, agree: Callable[[object], list]
) -> int:
    """Searches the largest batch size for which ``try_step`` does not run out of memory; 0 if none.

    Sizes double until one fails, then the interval is halved. Every rank takes part in every round:
    one that is done tries nothing, but agrees, until all are done.

    Args:
        try_step: computes a step of a batch size and drops its results.
        upper_bound: never exceeded.
        agree: a collective that gives an item of every rank to every rank, as ``Worker.gather``.

    Raises RunFailed where ``try_step`` failed on another rank for another reason than memory; that
    rank raises the error itself.
    """
    largest, too_large = 0, upper_bound + 1
    failure = None
    while True:
        if largest + 1 < too_large:
            doubling = too_large > upper_bound
            size = min(max(1, 2 * largest), upper_bound) if doubling else (largest + too_large) // 2
            try:
                fitted = fits(try_step, size)
            except Exception as error:  # the others wait in the collective: tell them first
                failure = error
            else:
                largest, too_large = (size, too_large) if fitted else (largest, size)
        reason = f"{type(failure).__name__}: {failure}" if failure else None
        answers = agree((largest + 1 >= too_large, reason))
        if failure:
            raise failure
        for rank, (_, reason) in enumerate(answers):
            if reason:
                raise RunFailed(f"memory probe: rank {rank} failed: {reason.splitlines()[0]}")
        if all(finished for finished, _ in answers):
            return largest


def fits(try_step: Callable[[int], object], batch_size: int) -> bool:
    """Returns True if a step of a batch size does not run out of memory; frees what it took."""
    try:
        try_step(batch_size)
        fitted = True
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        fitted = False
    # Here, not above: until its handler is left, an error holds the frames and all their tensors.
    if not fitted:
        gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    return fitted


class LocalStep:
    """Forward and backward pass of the longest texts, on this rank alone.

    On a GPU a block of memory stands for the rest of training's memory: optimizer states and the
    margin. DDP's buckets are the gradients themselves (gradient_as_bucket_view).
    """

    def __init__(
        self,
        model: nn.Module,
        max_length: int,
        worker: Worker,
        optimizer_states: int = 2,
        precision: Context = nullcontext,
    ) -> None:
        self.model, self.max_length, self.device = model, max_length, worker.device
        self.precision = precision
        trained = sum(p.nbytes for p in model.parameters() if p.requires_grad)
        self.besides_bytes = trained * optimizer_states

    def __call__(self, batch_size: int) -> None:
        """Computes both passes; restores random numbers and drops the gradients."""
        cuda = self.device.type == "cuda"
        was_training = self.model.training
        try:
            with kept_random_numbers(self.device):
                block_bytes = self.besides_bytes + self._margin_bytes() if cuda else 0
                block = torch.empty(block_bytes, dtype=torch.uint8, device=self.device)
                self.forward(batch_size).backward()
                if cuda:
                    torch.cuda.synchronize(self.device)
                del block
        finally:
            self.model.train(was_training)
            self.model.zero_grad(set_to_none=True)

    def forward(self, batch_size: int) -> Tensor:
        """Computes a scalar loss over ``batch_size`` of the longest texts, in training mode."""
        shape = (batch_size, self.max_length)
        input_ids = torch.zeros(shape, dtype=torch.int64, device=self.device)
        self.model.train()
        with self.precision():
            logits = self.model(input_ids, torch.ones_like(input_ids))
        return logits.float().logsumexp(-1).mean()

    def _margin_bytes(self) -> int:
        return int(MARGIN * torch.cuda.get_device_properties(self.device).total_memory)


def calculated_batch(step: LocalStep, upper_bound: int, ranks_here: int) -> int:
    """Calculates the largest batch size; 0 if not even the small steps for it fit.

    ``ranks_here`` are those that share this machine's memory.
    """
    limit_bytes = rank_limit_bytes(ranks_here)
    try:
        memory = measure_step_memory(step, step.model, step.besides_bytes)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return 0
    return memory.largest_batch(limit_bytes, upper_bound)


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

    ``step`` computes both passes of a batch size, in this thread. Parameters and buffers of the
    model are not counted; ``held_bytes`` are as in ``StepMemory``.
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
    """A running total, after each operator, of the bytes of storages that still exist."""

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
