"""The peak memory of a rank: the process's in each step, and allocations in one to the byte."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

from common.runtime import private
from common.runtime.machine.memory_limit import reset_peak_resident, resettable_peak_bytes
from common.training.recording.tracing import silence_profiler


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
    and frees; what gloo's threads free it does not see. Memory held before the step is added:
    this rank's parts of parameters and optimizer states, and DDP's buckets.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        silence_profiler(torch.device("cpu"))
        states = [value for state in optimizer.state.values() for value in state.values()]
        held = [*model.parameters(), *filter(torch.is_tensor, states)]
        self._held_bytes = sum(_local(tensor).nbytes for tensor in held)
        if isinstance(model, DistributedDataParallel):
            self._held_bytes += sum(parameter.nbytes for parameter in model.parameters())
        self._profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        self._profiler.start()

    def finish(self) -> int:
        """Stops the measurement; returns the largest number of bytes allocated at once."""
        self._profiler.stop()
        # The peak is the largest running sum, above what was held at the start.
        changes = private.memory_changes(self._profiler)
        return self._held_bytes + max(itertools.accumulate(changes, initial=0))


def _local(tensor: Tensor) -> Tensor:
    """Returns this rank's part of a DTensor; a plain tensor as it is."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
