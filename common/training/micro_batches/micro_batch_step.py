"""One training step in which every rank has a micro-batch of its own size.

The loss is a mean over the global batch, over its samples or its tokens. DDP averages over ranks,
so each rank's own mean is scaled first (``common.exercises.loss_scale``).

Where a rank runs out of memory, all ranks drop what they have computed and repeat the step in
halves: the gradients of a batch are those of its parts, added up.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from common.errors import RunFailed
from common.exercises.loss_scale import loss_scale
from common.runtime.machine.memory_limit import NO_PRIMITIVE, is_out_of_memory
from common.scheduling.loader import MicroBatch
from common.training.ddp import SETTLING_STEPS, exchanging
from common.training.precision import autocast, grad_scaler
from common.training.scaling.timed_exchange import TimedExchange
from common.training.step import update


@dataclass(frozen=True)
class StepParts:
    """Parts of a step on this rank, in seconds, with its loss."""

    step_s: float
    planning_s: float
    """Time that the step waited for plan and collation."""
    compute_s: float
    """Time until this rank's last gradient was ready; where a step was repeated, that of its last
    run."""
    exchange_s: float
    """Time from this rank's last gradient until all are averaged: waiting for slower ranks, and
    communication that the backward pass did not hide."""
    loss: float
    """Part of the global batch's mean loss on this rank; the parts of all ranks add up to it."""
    halvings: int
    """Number of times that the step was repeated in halves for lack of memory."""


class MicroBatchStep:
    """A model under DDP, its optimizer, and the step they make. All ranks make it together.

    Args:
        precision: float32, float64 (a model of float64 weights), bfloat16 or float16.
        loss_mean: ``samples`` or ``tokens``: what counts the same in the mean. Under ``tokens`` a
            text's loss counts as often as it has tokens.
    """

    def __init__(
        self,
        exchange: TimedExchange,
        optimizer: torch.optim.Optimizer,
        *,
        precision: str = "float32",
        loss_mean: str = "samples",
    ) -> None:
        self.exchange, self.optimizer = exchange, optimizer
        self.worker, self.precision, self.loss_mean = exchange.worker, precision, loss_mean
        self.scaler = grad_scaler(precision, self.worker.device)

    def run(self, next_batch: Callable[[], MicroBatch]) -> tuple[StepParts, MicroBatch]:
        """Makes one update. ``next_batch`` is called inside the step: what it holds up is counted.

        Returns:
            what the step was made of, and the micro-batch it was made with.

        Raises:
            RunFailed: a single text needs more memory than there is.
        """
        clock = self.exchange.clock
        clock.wait()
        start = clock.mark()
        batch = next_batch()
        planned = clock.mark()
        halvings = 0
        while True:
            began = clock.mark()
            loss, failed = self._attempt(batch, 2**halvings)
            # NaN from one rank is NaN on all: only then do they have to talk.
            broken = failed or self.exchange.is_poisoned()
            if not broken or not self._agree(batch, failed, 2**halvings):
                break
            halvings += 1
        exchanged = clock.mark()
        # Gradients stay views of DDP's buckets, and the next pass adds to them in place.
        update(self.exchange.model, self.optimizer, self.scaler, set_to_none=False)
        end = clock.mark()
        clock.wait()
        ready = self.exchange.ready
        parts = StepParts(
            step_s=clock.elapsed_s(start, end),
            planning_s=clock.elapsed_s(start, planned),
            compute_s=clock.elapsed_s(began, ready),
            exchange_s=clock.elapsed_s(ready, exchanged),
            loss=loss.item(),
            halvings=halvings,
        )
        return parts, batch

    def settle(self, batch: MicroBatch) -> None:
        """Runs passes whose gradients are dropped, until DDP's buckets are what they will be."""
        for _ in range(SETTLING_STEPS):
            self.exchange.begin()
            self.backward(batch, self.exchange.ddp)
            self.optimizer.zero_grad(set_to_none=True)

    def make_states(self) -> None:
        """Makes the optimizer allocate its states now, and not in a step that runs out of memory.

        One step with gradients of 0 and a learning rate of 0, which is then forgotten.
        """
        rates = [group["lr"] for group in self.optimizer.param_groups]
        for group in self.optimizer.param_groups:
            group["lr"] = 0.0
            for parameter in group["params"]:
                parameter.grad = torch.zeros_like(parameter)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        for state in self.optimizer.state.values():
            for value in filter(torch.is_tensor, state.values()):
                value.zero_()
        for group, lr in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = lr

    def local_pass(self, batch: MicroBatch) -> float:
        """Runs both passes without any exchange; returns their seconds. Gradients are dropped."""
        clock = self.exchange.clock
        clock.wait()
        self.exchange.begin()
        start = clock.mark()
        self.backward(batch, self.exchange.model)
        self.exchange.slow_down()
        end = clock.mark()
        clock.wait()
        self.optimizer.zero_grad(set_to_none=True)
        return clock.elapsed_s(start, end)

    def backward(self, batch: MicroBatch, model: nn.Module) -> Tensor:
        """Runs both passes of ``batch``; returns its part of the global mean loss, detached."""
        tokens, texts = batch.tokens, len(batch.labels)  # counted before they are on a GPU
        batch = batch.to(self.worker.device)
        with autocast(self.precision, self.worker.device):
            logits = model(batch.input_ids, batch.attention_mask)
        if logits.dtype in (torch.float16, torch.bfloat16):
            logits = logits.float()
        losses = functional.cross_entropy(logits, batch.labels, reduction="none")
        if self.loss_mean == "tokens":
            weights = batch.attention_mask.sum(1)
            mean_loss = (losses * weights).sum() / weights.sum()
            local, total = tokens, batch.plan.total_tokens
        else:
            mean_loss = losses.mean()
            local, total = texts, batch.plan.global_batch
        ranks = self.worker.world_size
        scaled = mean_loss * loss_scale(self.loss_mean, ranks, local, total)
        self.scaler.scale(scaled).backward()
        return scaled.detach() / ranks

    def _attempt(self, batch: MicroBatch, pieces: int) -> tuple[Tensor, bool]:
        """Computes gradients of the batch in so many pieces, exchanged after the last one.

        Returns the loss, and True if this rank ran out of memory.
        """
        parts = batch.split(pieces)
        total = torch.zeros((), device=self.worker.device)
        self.exchange.begin()
        try:
            for index, part in enumerate(parts):
                with exchanging(self.exchange.ddp, index == len(parts) - 1):
                    total = total + self.backward(part, self.exchange.ddp)
            return total, False
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            if NO_PRIMITIVE in str(error):
                # oneDNN does not recover from it, whatever is free afterwards; go on without it.
                torch.backends.mkldnn.set_flags(_enabled=False)
        self.free()
        self.exchange.give_up()
        return total, True

    def _agree(self, batch: MicroBatch, failed: bool, pieces: int) -> bool:
        """Returns True if the step must be repeated; all ranks are then ready for it."""
        # Where nobody failed the gradients are NaN by themselves: training goes on, as it would.
        answers = self.worker.gather((failed, len(batch.labels), batch.longest))
        out_of_memory = [rank for rank, (no_memory, _, _) in enumerate(answers) if no_memory]
        if not out_of_memory:
            return False
        for rank in out_of_memory:
            _, texts, longest = answers[rank]
            if texts <= pieces:
                raise RunFailed(
                    f"rank {rank} has no memory for a single text of {longest} tokens: lower "
                    "--max_length, or take a smaller model"
                )
        self.free()
        self.exchange.wrap()
        self.settle(batch.first_tokens())
        return True

    def free(self) -> None:
        """Frees gradients and what the allocator keeps."""
        self.optimizer.zero_grad(set_to_none=True)
        gc.collect()
        if self.worker.device.type == "cuda":
            torch.cuda.empty_cache()
