"""All names of PyTorch that are not public, in one place.

Another version may lack one. Then what needs it ends in one line, and everything else works: no
name is looked up before it is used. The watch has its own (``ddplab_watch/torch_internals.py``).
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import profile

from common.errors import UserError

WORKING = "2.9 to 2.15"
"""Versions of torch that were tried."""


def private_attribute(owner: object, *names: str) -> Any:
    """Returns a private attribute: of a module (by its path) or an object, by a chain of names.

    Raises:
        UserError: this version of torch does not have it.
    """
    path = owner if isinstance(owner, str) else type(owner).__name__
    try:
        attribute = importlib.import_module(owner) if isinstance(owner, str) else owner
        for name in names:
            attribute = getattr(attribute, name)
    except (ImportError, AttributeError):
        raise UserError(
            f"torch {torch.__version__} has no {'.'.join((path, *names))}, which this needs; "
            f"versions known to work: torch {WORKING}"
        ) from None
    return attribute


def stager(pin_memory: bool) -> Any:
    """Makes what copies a checkpoint's states into memory that it keeps, by ``stage(states)``."""
    kind = private_attribute("torch.distributed.checkpoint._state_dict_stager", "StateDictStager")
    return kind(pin_memory=pin_memory, share_memory=False)


def record_every_step(ddp: DistributedDataParallel) -> None:
    """Makes DDP time each of its steps, rather than one in a hundred."""
    private_attribute(ddp, "_set_ddp_runtime_logging_sample_rate")(1)


def ddp_record(ddp: DistributedDataParallel) -> dict[str, Any]:
    """Returns what DDP tells of its buckets, and of the last step's times if it timed it."""
    return private_attribute(ddp, "_get_ddp_logging_data")()


def remove_hooks(ddp: DistributedDataParallel) -> None:
    """Takes DDP's hooks off its module's gradients, so that it can be wrapped anew."""
    private_attribute(ddp, "_remove_autograd_hooks")()


def abort_default_group() -> None:
    """Ends the default process group without its other ranks, which may be gone."""
    private_attribute("torch.distributed.distributed_c10d", "_abort_process_group")()


def sleep_on_gpu(cycles: int) -> None:
    """Keeps the current stream busy for so many cycles of the GPU's clock."""
    private_attribute("torch.cuda", "_sleep")(cycles)


def memory_changes(profiler: profile) -> list[int]:
    """Returns the bytes allocated (positive) and released that a profiler saw, in order of time."""
    events = private_attribute(profiler, "profiler", "kineto_results", "events")()
    memory = [event for event in events if event.name() == "[memory]"]
    return [event.nbytes() for event in sorted(memory, key=lambda event: event.start_ns())]


def fake_tensors() -> Any:
    """Makes a context in which tensors have shapes and no data."""
    return private_attribute("torch._subclasses", "FakeTensorMode")()


def memory_tracker() -> Any:
    """Makes a ``MemTracker``, which sees every operator's outputs come and go."""
    return private_attribute("torch.distributed._tools.mem_tracker", "MemTracker")()


def multiply(tensors: Sequence[Tensor], factor: Tensor) -> None:
    """Multiplies all tensors by a scalar in place, in one launch."""
    private_attribute("torch", "_foreach_mul_")(tensors, factor)
