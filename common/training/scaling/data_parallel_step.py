"""A training step under DDP that knows what its time went to.

It trains any model: accumulation, autocast, gradient compression and DDP's options are settings of
the step. ``timed`` watches DDP's buckets through a communication hook, which notes when this rank's
gradients were ready and when each bucket was back; without it DDP is as it comes, and only the
whole step is timed. On one rank there is no DDP at all.

``exchange_s`` is what passed from the moment this rank's own gradients were ready until they were
averaged; ``divided_exchange`` tells communication from waiting in it.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from common.runtime import torch_internals
from common.runtime.group.process_group import Worker
from common.runtime.timing import clock_for
from common.settings import AtLeast, OneOf, Positive, Settings
from common.training.ddp import (
    COMPRESSIONS,
    SETTLING_STEPS,
    compress_gradients,
    exchanging,
    make_ddp,
)
from common.training.precision import DTYPES, autocast, grad_scaler
from common.training.scaling.timed_exchange import BucketTimes, TimedExchange
from common.training.step import update


@dataclass(frozen=True)
class StepOptions(Settings):
    """Settings of a step; the same on all ranks."""

    accumulation: Annotated[int, AtLeast(1)] = 1
    """Micro-batches per update; gradients are exchanged in the last one."""
    precision: Annotated[str, OneOf(DTYPES)] = "float32"
    """float32, or autocast to bfloat16 or float16 (with a gradient scaler)."""
    compression: Annotated[str, OneOf(COMPRESSIONS)] = "none"
    """none, fp16 or bf16: what gradients are rounded to before they are sent."""
    bucket_cap_mb: Annotated[float | None, Positive] = None
    """DDP's bucket cap in MiB; by default a first bucket of 1 MiB, then 25."""
    static_graph: bool = False
    gradient_as_bucket_view: bool = True
    sync_buffers: bool = False
    """Send rank 0's buffers to all ranks before each forward pass (``broadcast_buffers``)."""
    max_gradient_norm: float | None = None
    """Gradients are scaled so that their joint L2 norm is at most this."""


@dataclass(frozen=True)
class Batch:
    """A micro-batch: what the model is called with, and which samples these are."""

    inputs: tuple[Tensor, ...]
    targets: Tensor
    identities: np.ndarray
    """int64, one per sample: the same number is the same sample."""
    tokens: int
    """Tokens without padding; samples where a batch has no texts."""
    padded_tokens: int
    longest: int

    def pin_memory(self) -> Batch:
        """Returns the batch in memory from which a GPU copies by itself; DataLoader calls this."""
        inputs = tuple(tensor.pin_memory() for tensor in self.inputs)
        return replace(self, inputs=inputs, targets=self.targets.pin_memory())

    def to(self, device: torch.device) -> Batch:
        """Returns the batch on ``device``; copies from pinned memory do not wait."""
        if device.type == "cpu":
            return self
        inputs = tuple(tensor.to(device, non_blocking=True) for tensor in self.inputs)
        return replace(self, inputs=inputs, targets=self.targets.to(device, non_blocking=True))


@dataclass(frozen=True)
class StepTimes:
    """Times of a step on this rank, in seconds. The parts are None where nobody watched."""

    step_s: float
    began_s: float
    """Start of the step on this process's clock."""
    cpu_s: float
    """Processor time of all threads of this process."""
    loss: float
    data_s: float | None = None
    forward_s: float | None = None
    backward_s: float | None = None
    exchange_s: float | None = None
    optimizer_s: float | None = None
    exchanged_bytes: int | None = None
    buckets: tuple[BucketTimes, ...] = ()


class DataParallelStep:
    """A model, its optimizer and the step they make on the ranks of a group, all together.

    Args:
        model: module on ``worker``'s device, called as ``model(*batch.inputs)``.
        loss_of: mean loss over a micro-batch's samples, from the model's output and the batch.
        group: the ranks that take part; all by default.
        timed: watch the buckets.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss_of: Callable[[Tensor, Batch], Tensor],
        worker: Worker,
        options: StepOptions,
        *,
        group: dist.ProcessGroup | None = None,
        timed: bool = True,
    ) -> None:
        self.model, self.optimizer, self.loss_of = model, optimizer, loss_of
        self.worker, self.options, self.group, self.timed = worker, options, group, timed
        self.ranks = dist.get_world_size(group)
        self.clock = clock_for(worker.device)
        self.scaler = grad_scaler(options.precision, worker.device)
        self.output_dtype: torch.dtype | None = None
        """Type of the model's newest output: what it was computed in."""
        self.ddp: nn.Module = model
        self.exchange: TimedExchange | None = None
        if self.ranks > 1:
            self._wrap()

    def _wrap(self) -> None:
        options = self.options
        arguments = {
            "group": self.group,
            "sync_buffers": options.sync_buffers,
            "bucket_cap_mb": options.bucket_cap_mb,
            "gradient_as_bucket_view": options.gradient_as_bucket_view,
            "static_graph": options.static_graph,
        }
        if self.timed:
            self.exchange = TimedExchange(
                self.model, self.worker, compression=options.compression, **arguments
            )
            self.ddp = self.exchange.ddp
        else:
            self.ddp = make_ddp(self.model, self.worker.device, **arguments)
            compress_gradients(self.ddp, options.compression, self.group)

    def run(self, next_batch: Callable[[], Batch]) -> tuple[StepTimes, list[Batch]]:
        """Makes one update. ``next_batch`` is called inside the step, once per micro-batch.

        Returns:
            what it took, and the micro-batches it was made of.
        """
        clock, passes = self.clock, self.options.accumulation
        parts = dict.fromkeys(("data_s", "forward_s", "backward_s", "exchange_s"), 0.0)
        spans, batches, exchanged, buckets = [], [], 0, ()
        total = 0.0  # becomes a tensor of the loss's type
        clock.wait()
        began, cpu_began = time.perf_counter(), time.process_time()
        start = clock.mark()
        for index in range(passes):
            marks = [clock.mark()]
            batch = next_batch()
            batches.append(batch)
            batch = batch.to(self.worker.device)
            marks.append(clock.mark())
            self._begin()
            with exchanging(self.ddp, index == passes - 1):
                loss = self._forward(batch)
                marks.append(clock.mark())
                self.scaler.scale(loss if passes == 1 else loss / passes).backward()
            marks.append(clock.mark())
            total = total + loss.detach()
            ready = self.exchange.ready if self.exchange else None
            spans.append((marks, ready or marks[-1]))
            exchanged += self.exchange.sent_bytes if self.exchange else 0
        optimizer_start = clock.mark()
        update(
            self.model,
            self.optimizer,
            self.scaler,
            max_gradient_norm=self.options.max_gradient_norm,
        )
        end = clock.mark()
        clock.wait()
        cpu_s = time.process_time() - cpu_began
        step_times = StepTimes(clock.elapsed_s(start, end), began, cpu_s, total.item() / passes)
        if not self.timed:
            return step_times, batches
        for (before, fetched, forward, after), ready in spans:
            parts["data_s"] += clock.elapsed_s(before, fetched)
            parts["forward_s"] += clock.elapsed_s(fetched, forward)
            parts["backward_s"] += clock.elapsed_s(forward, ready)
            parts["exchange_s"] += clock.elapsed_s(ready, after)
        if self.exchange:
            (_, _, backward_start, _), _ = spans[-1]
            buckets = self.exchange.bucket_times(backward_start)
        optimizer_s = clock.elapsed_s(optimizer_start, end)
        timed = {"optimizer_s": optimizer_s, "exchanged_bytes": exchanged, "buckets": buckets}
        return replace(step_times, **parts, **timed), batches

    def settle(self, next_batch: Callable[[], Batch]) -> None:
        """Runs passes whose gradients are dropped, until DDP's buckets are what they will be."""
        for _ in range(SETTLING_STEPS if self.ranks > 1 else 1):
            self._begin()
            self._forward(next_batch().to(self.worker.device)).backward()
            self.optimizer.zero_grad(set_to_none=True)

    def close(self) -> None:
        """Takes DDP off the model, so that it can be wrapped anew."""
        if self.ddp is self.model:
            return
        if self.exchange:
            self.ddp = self.model
            self.exchange.close()
            self.exchange = None
        else:
            torch_internals.remove_hooks(self.ddp)
            self.ddp = self.model
        self.optimizer.zero_grad(set_to_none=True)
        gc.collect()  # its buckets, before there are new ones

    def _begin(self) -> None:
        if self.exchange:
            self.exchange.begin()

    def _forward(self, batch: Batch) -> Tensor:
        with autocast(self.options.precision, self.worker.device):
            outputs = self.ddp(*batch.inputs)
        self.output_dtype = outputs.dtype
        if outputs.dtype in (torch.float16, torch.bfloat16):
            outputs = outputs.float()
        return self.loss_of(outputs, batch)
