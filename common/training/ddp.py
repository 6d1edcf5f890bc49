"""DistributedDataParallel, made in one place: what all of its users set, and its hooks.

Everything of this project that puts a model under DDP calls ``make_ddp``: the trainers, the
benchmarks and ``ddplab tune``. What they differ in are DDP's own arguments.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from common.exercises.bucketed_ddp import BucketedDDP
from common.exercises.overlapped_ddp import OverlappedDDP

SETTLING_STEPS = 3
"""Backward passes after which DDP's buckets stay as they are."""
COMPRESSIONS: Mapping[str, torch.dtype | None] = {
    "none": None,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
}
"""Formats that gradients are rounded to on their way; None rounds nothing."""


def make_ddp(
    model: nn.Module,
    device: torch.device,
    *,
    group: dist.ProcessGroup | None = None,
    sync_buffers: bool = True,
    **arguments: object,
) -> DistributedDataParallel:
    """Wraps a model that lies on ``device``; all ranks of the group do so together.

    Args:
        group: the ranks that take part; all by default.
        sync_buffers: send rank 0's buffers to all ranks before each forward pass.
        arguments: DDP's own, such as ``bucket_cap_mb`` (in MiB) or ``static_graph``.
    """
    return DistributedDataParallel(
        model,
        device_ids=[device] if device.type == "cuda" else None,
        process_group=group,
        **({} if sync_buffers else {_buffer_argument(): False}),
        **arguments,
    )


def _buffer_argument() -> str:
    """Returns the name of DDP's argument that sends buffers; torch has renamed it."""
    parameters = inspect.signature(DistributedDataParallel.__init__).parameters
    renamed = "forward_sync_buffers"
    return renamed if renamed in parameters else "broadcast_buffers"


def compress_gradients(
    ddp: DistributedDataParallel, compression: str, group: dist.ProcessGroup | None = None
) -> None:
    """Rounds gradients on their way, by torch's own hook; ``compression`` is of COMPRESSIONS."""
    if compression != "none":
        ddp.register_comm_hook(group, getattr(default_hooks, f"{compression}_compress_hook"))


def exchanging(model: nn.Module, is_last: bool) -> AbstractContextManager:
    """Returns the context of a micro-batch: DDP exchanges gradients in the step's last one only."""
    if is_last or not isinstance(model, DistributedDataParallel | OverlappedDDP | BucketedDDP):
        return nullcontext()
    return model.no_sync()
