"""The largest micro-batch that each rank's memory holds, found before training.

A dynamic plan may give one rank many short texts, so it must know a limit. On a GPU the limit is
found with real forward and backward passes of the longest texts, by doubling and then bisection;
ranks agree after every pass, so that a rank that runs out of memory never leaves the others
waiting. A CPU does not fail in time (Linux promises more memory than there is and then kills a
process), so there the limit is calculated from two small steps (``step_memory``).
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from common.errors import RunFailed, UserError
from common.runtime.group.network import ranks_on_machine
from common.runtime.group.process_group import Worker
from common.runtime.machine.memory_limit import is_out_of_memory
from common.runtime.seeding import kept_random_numbers
from common.scheduling.step_memory import MARGIN, measure_step_memory, rank_limit_bytes

Context = Callable[[], AbstractContextManager]


@dataclass(frozen=True)
class ProbeResult:
    """The result of the search on one rank.

    Attributes:
        largest: the largest batch size that fitted; 0 if none did.
        tried: every batch size that was tried, in order, and True if it fitted.
        rounds: number of times that the ranks agreed; the same on all of them.
    """

    largest: int
    tried: tuple[tuple[int, bool], ...]
    rounds: int


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

    Raises:
        UserError: an upper bound below 1, or a rank whose memory does not hold a single text.
        RunFailed: another rank failed, for another reason than memory.
    """
    if upper_bound < 1:
        raise UserError(f"probe_max_batch {upper_bound}: at least 1")
    step = LocalStep(model, max_length, worker, optimizer_states, precision)
    if real_steps is None:
        real_steps = worker.device.type == "cuda"
    if real_steps:
        largest = largest_micro_batch(step, upper_bound, worker.gather).largest
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
) -> ProbeResult:
    """Searches the largest batch size for which ``try_step`` does not run out of memory.

    Sizes double until one fails, then the interval is halved. Every rank takes part in every round:
    one that is done tries nothing, but agrees, until all are done.

    Args:
        try_step: computes a step of a batch size and drops its results.
        upper_bound: never exceeded.
        agree: a collective that gives an item of every rank to every rank, as ``Worker.gather``.

    Raises:
        RunFailed: ``try_step`` failed on another rank for another reason; on that rank, the error
            itself is raised.
    """
    largest, too_large = 0, upper_bound + 1
    tried: list[tuple[int, bool]] = []
    rounds, failure = 0, None
    while True:
        if largest + 1 < too_large:
            doubling = too_large > upper_bound
            size = min(max(1, 2 * largest), upper_bound) if doubling else (largest + too_large) // 2
            try:
                fitted = fits(try_step, size)
            except Exception as error:  # the others wait in the collective: tell them first
                failure = error
            else:
                tried.append((size, fitted))
                largest, too_large = (size, too_large) if fitted else (largest, size)
        rounds += 1
        reason = f"{type(failure).__name__}: {failure}" if failure else None
        answers = agree((largest + 1 >= too_large, reason))
        if failure:
            raise failure
        for rank, (_, reason) in enumerate(answers):
            if reason:
                raise RunFailed(f"memory probe: rank {rank} failed: {reason.splitlines()[0]}")
        if all(finished for finished, _ in answers):
            return ProbeResult(largest, tuple(tried), rounds)


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
