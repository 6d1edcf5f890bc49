"""The peak memory of a rank: the process's in each step, and allocations in one to the byte."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile
from torch.utils._pytree import tree_leaves

from common.runtime import torch_internals
from common.runtime.machine.memory_limit import reset_peak_resident, resettable_peak_bytes
from common.training.recording.tracing import silence_profiler

SETTLE_S = 0.001
"""Pause behind each wait for a collective. Gloo's threads drop its tensors, and write its end into
the profiler's records, after its result is there: what they are last to free the profiler does not
see, and a profiler that stopped meanwhile ended ranks by a signal or std::bad_alloc."""


class PeakMemory:
    """The peak of the memory in use during a step.

    On a GPU it is what the caching allocator handed out; on a CPU the process's resident memory,
    with all that Python and its libraries take, where the system tells it.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def start(self) -> None:
        """Starts the measurement: forgets the peak so far."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            return
        reset_peak_resident()  # where that cannot be, the peak is that of the process up to now

    def peak_bytes(self) -> int | None:
        """Returns the peak since ``start``, in bytes; None where the system does not tell."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        return resettable_peak_bytes()


class AllocationWatch:
    """The peak of a CPU's allocations during one step, to the byte.

    The CPU's allocator keeps no counters, but tells the profiler of all that this thread allocates
    and frees; gloo's threads get the time to be done first. Memory held before the step is added:
    this rank's parts of parameters and optimizer states, DDP's buckets, and ``batch``, tensors in
    any nest, where it is not made in the step.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, batch: object = None
    ) -> None:
        silence_profiler(torch.device("cpu"))
        inner = getattr(optimizer, "optim", optimizer)  # of ZeroRedundancyOptimizer
        states = [value for state in inner.state.values() for value in state.values()]
        held = [*model.parameters(), *filter(torch.is_tensor, [*states, *tree_leaves(batch)])]
        self._held_bytes = sum(_local(tensor).nbytes for tensor in held)
        if isinstance(model, DistributedDataParallel):
            trained = (p for p in model.parameters() if p.requires_grad)
            self._held_bytes += sum(parameter.nbytes for parameter in trained)
        self._settled = ExitStack()
        self._settled.enter_context(_settled_waits())
        self._profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        self._profiler.start()

    def finish(self) -> int:
        """Stops the measurement; returns the largest number of bytes allocated at once."""
        with self._settled:
            time.sleep(SETTLE_S)
            self._profiler.stop()
        # The peak is the largest running sum, above what was held at the start.
        changes = torch_internals.memory_changes(self._profiler)
        return self._held_bytes + max(itertools.accumulate(changes, initial=0))


@contextmanager
def _settled_waits() -> Iterator[None]:
    """Pauses behind each wait for a collective."""
    wait = dist.Work.wait

    def settled(work: dist.Work, *arguments: object, **named: object) -> bool:
        outcome = wait(work, *arguments, **named)
        time.sleep(SETTLE_S)
        return outcome

    dist.Work.wait = settled
    try:
        yield
    finally:
        dist.Work.wait = wait


def _local(tensor: Tensor) -> Tensor:
    """Returns this rank's part of a DTensor; a plain tensor as it is."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
