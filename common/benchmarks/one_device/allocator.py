"""The peak of a real training step as PyTorch's allocator saw it, on a GPU or on the CPU.

On a GPU the caching allocator counts what tensors use (allocated) and what it holds from the
driver (reserved). The CPU's allocator keeps no counters, but tells the profiler of every
allocation; there is nothing reserved, as what is freed goes back to the C library.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from common.benchmarks.one_device.memory_tracker import empty_batch
from common.perfmodel.one_device.workload import Workload
from common.training.recording.memory_watch import AllocationWatch
from common.training.step import TrainingStep


@dataclass(frozen=True)
class AllocatorPeak:
    """The peak of allocated memory during one step; ``reserved_bytes`` on a GPU only."""

    allocated_bytes: int
    reserved_bytes: int | None


def measure_peak(
    workload: Workload, device: torch.device, snapshot: Path | None = None
) -> AllocatorPeak:
    """Runs three steps of ``workload`` on ``device``; returns the allocator's peak in the third.

    Args:
        workload: the step to run.
        device: the step's device. Other tensors of this process on a GPU count too, so there
            should be none.
        snapshot: file for the allocator's history of that step, on a GPU.

    Raises:
        torch.OutOfMemoryError: it does not fit.
    """
    step = TrainingStep(workload, device)
    batches = itertools.repeat(empty_batch(workload, device))
    for _ in range(2):
        step.run(batches)
    if device.type == "cuda":
        return _cuda_peak(step, batches, device, snapshot)
    watch = AllocationWatch(step.model, step.optimizer)
    step.run(batches)
    return AllocatorPeak(watch.finish(), None)


def _cuda_peak(
    step: TrainingStep, batches: Iterable, device: torch.device, snapshot: Path | None
) -> AllocatorPeak:
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
