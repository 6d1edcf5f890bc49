"""The peak memory of a training step, followed operator by operator, or seen by the allocator.

PyTorch's ``MemTracker`` sees every operator's outputs come and go. On fake tensors, which have
shapes and no data, it follows a step of gpt2-xl in seconds on a laptop. What a kernel needs inside
(a workspace of cuBLAS, say) it does not see.

The allocator sees a real step. On a GPU the caching allocator counts what tensors use (allocated)
and what it holds from the driver (reserved). The CPU's allocator keeps no counters, but tells the
profiler of every allocation; there is nothing reserved, as what is freed goes back to the C
library.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from common.errors import UserError
from common.perfmodel.one_device.workload import Workload
from common.runtime import torch_internals
from common.training.recording.memory_watch import AllocationWatch
from common.training.step import TokenBatch, TrainingStep

CATEGORIES = {
    "Parameter": "parameters",
    "Gradient": "gradients",
    "Optstate": "optimizer states",
    "Activation": "made in the forward pass",
    "Temp": "made in the backward pass",
    "Buffer": "buffers",
    "Other": "batch and others",
}
"""The tracker's name of each category of memory, and ours."""


@dataclass(frozen=True)
class TrackedPeak:
    """The peak of memory in bytes by category, and the phase in which it was reached."""

    phase: str
    categories: dict[str, int]

    @property
    def total_bytes(self) -> int:
        return sum(self.categories.values())


def track_step(workload: Workload) -> TrackedPeak:
    """Follows the second step of ``workload`` on fake tensors; the first makes optimizer states.

    A float16 loss is not scaled here, which changes no size. Raises UserError where the workload is
    compiled, so that there are no operators to see.
    """
    if workload.compile:
        raise UserError(
            "compile: a compiled step hides its operators from the memory tracker; leave out "
            "--compile to analyse the memory of the step in eager mode"
        )
    device = torch.device("cpu")
    with torch_internals.fake_tensors():
        step = TrainingStep(workload, device)
        step.scaler = torch.amp.GradScaler(device.type, enabled=False)
        batch = empty_batch(workload, device)
        step.run(itertools.repeat(batch))  # the optimizer makes its states
        tracker = torch_internals.memory_tracker()
        tracker.track_external(step.model, step.optimizer, *batch)
        phase, reached = "", 0

        def note(name: str) -> None:
            nonlocal phase, reached
            total = _peak_sizes(tracker, device)["Total"]
            if total > reached:
                phase, reached = name, total

        with tracker:
            for _ in range(workload.gradient_accumulation):
                tracker.reset_mod_stats()  # it follows one pass through the modules
                loss = step.forward(*batch)
                note("forward")
                loss.backward()
                note("backward")
            del loss
            step.update()
            note("update")
    sizes = _peak_sizes(tracker, device)
    return TrackedPeak(phase, {name: sizes.get(key, 0) for key, name in CATEGORIES.items()})


def saved_by_layer(workload: Workload) -> pd.DataFrame:
    """Measures on fake tensors the bytes that each layer keeps for the backward pass.

    Columns ``layer`` (``block 0`` …, ``head and loss``) and ``saved_bytes``. Each storage counts
    once, where it is first kept; parameters do not count, their low-precision copies do. Raises
    UserError with activation checkpointing, whose tensors are kept out of sight.
    """
    if workload.activation_checkpointing:
        raise UserError("activation_checkpointing keeps each block's input only; nothing to list")
    with torch_internals.fake_tensors():
        step = TrainingStep(workload, torch.device("cpu"))
        batch = empty_batch(workload, torch.device("cpu"))
        storages = {parameter.untyped_storage()._cdata for parameter in step.model.parameters()}
        kept: dict[str, int] = {}
        alive: list[Tensor] = []
        layer = "embeddings"

        def enter(name: str) -> None:
            nonlocal layer
            layer = name

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage._cdata not in storages:
                storages.add(storage._cdata)
                alive.append(tensor)  # or its storage's address would be used again
                kept[layer] = kept.get(layer, 0) + storage.nbytes()
            return tensor

        for index, block in enumerate(step.model.blocks):
            block.register_forward_pre_hook(lambda *_, name=f"block {index}": enter(name))
        step.model.ln_f.register_forward_pre_hook(lambda *_: enter("head and loss"))
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            step.forward(*batch)
    return pd.DataFrame(kept.items(), columns=["layer", "saved_bytes"])


def empty_batch(workload: Workload, device: torch.device) -> TokenBatch:
    """Returns zeros as tokens and targets of the workload's shape, both int64 [batch, length]."""
    shape = (workload.batch_size, workload.seq_len)
    tokens, targets = (torch.zeros(shape, dtype=torch.int64, device=device) for _ in range(2))
    return tokens, targets


def _peak_sizes(tracker: Any, device: torch.device) -> dict[str, int]:
    """Returns the bytes of each category at the peak so far, and in ``Total``."""
    sizes = tracker.get_tracker_snapshot("peak")[device]
    return {str(getattr(key, "value", key)): size for key, size in sizes.items()}


@dataclass(frozen=True)
class AllocatorPeak:
    """The peak of allocated memory during one step; ``reserved_bytes`` on a GPU only."""

    allocated_bytes: int
    reserved_bytes: int | None


def measure_peak(
    workload: Workload, device: torch.device, snapshot: Path | None = None
) -> AllocatorPeak:
    """Runs three steps of ``workload`` on ``device``; returns the allocator's peak in the third.

    Other tensors of this process on a GPU count too, so there should be none. ``snapshot`` is a
    file for the allocator's history of that step, on a GPU. Raises torch.OutOfMemoryError.
    """
    step = TrainingStep(workload, device)
    batches = itertools.repeat(empty_batch(workload, device))
    for _ in range(2):
        step.run(batches)
    return peak_of_step(step, batches, snapshot)


def peak_of_step(
    step: TrainingStep, batches: Iterable[TokenBatch], snapshot: Path | None = None
) -> AllocatorPeak:
    """Makes one more step; returns its peak. ``snapshot`` is as ``measure_peak`` takes it."""
    device = step.device
    if device.type == "cpu":
        watch = AllocationWatch(step.model, step.optimizer)
        step.run(batches)
        return AllocatorPeak(watch.finish(), None)
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    if snapshot:
        torch.cuda.memory._record_memory_history(max_entries=200_000)
    step.run(batches)
    torch.cuda.synchronize(device)
    if snapshot:
        torch.cuda.memory._dump_snapshot(str(snapshot))
        torch.cuda.memory._record_memory_history(enabled=None)
    return AllocatorPeak(
        torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
    )
