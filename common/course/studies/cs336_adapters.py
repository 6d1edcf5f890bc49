"""Adapters by which the tests of Stanford CS336's assignment 2 call the exercises of this course.

``ddplab study cs336`` puts this file in the place of their ``tests/adapters.py``. Names are theirs:
those of 2026, and those of 2025, which had buckets. Triton kernels are not among the exercises.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from common.exercises.bucketed_ddp import BucketedDDP
from common.exercises.fsdp import FSDP
from common.exercises.naive_ddp import NaiveDDP
from common.exercises.overlapped_ddp import OverlappedDDP
from common.exercises.sharded_optimizer import ShardedOptimizer
from common.exercises.tiled_attention import TiledAttention


def get_flashattention_autograd_function_pytorch() -> type:
    """Returns tiled attention, A0.4."""
    return TiledAttention


def get_flashattention_autograd_function_triton() -> type:
    """Raises: there are no Triton kernels."""
    raise NotImplementedError


def get_ddp(module: nn.Module) -> nn.Module:
    """Returns overlapped DDP, A1.3."""
    return OverlappedDDP(module)


def ddp_on_after_backward(ddp_model: NaiveDDP, optimizer: torch.optim.Optimizer) -> None:
    """Waits for the gradients of any of the wrappers of DDP."""
    ddp_model.finish_gradient_synchronization()


get_ddp_individual_parameters = get_ddp
ddp_individual_parameters_on_after_backward = ddp_on_after_backward


def get_ddp_bucketed(module: nn.Module, bucket_size_mb: float | None) -> nn.Module:
    """Returns bucketed DDP, A2.4; without a size everything is in one bucket."""
    return BucketedDDP(module, 2.0**20 if bucket_size_mb is None else bucket_size_mb)


ddp_bucketed_on_after_backward = ddp_on_after_backward


def ddp_bucketed_on_train_batch_start(ddp_model: nn.Module, optimizer: object) -> None:
    """Does nothing: counters are set back when gradients have been averaged."""


def get_fsdp(module: nn.Module, compute_dtype: torch.dtype | None = None) -> nn.Module:
    """Returns FSDP, A1.5."""
    return FSDP(module, compute_dtype)


def fsdp_on_after_backward(fsdp_model: FSDP, optimizer: torch.optim.Optimizer) -> None:
    """Waits for the gradients."""
    fsdp_model.finish_gradient_synchronization()


def fsdp_gather_full_params(fsdp_model: FSDP) -> dict[str, Tensor]:
    """Returns all parameters, whole, by name."""
    return fsdp_model.gather_full_params()


def get_sharded_optimizer(
    params: object, optimizer_cls: type[torch.optim.Optimizer], **kwargs: object
) -> torch.optim.Optimizer:
    """Returns the sharded optimizer, A1.4."""
    return ShardedOptimizer(params, optimizer_cls, **kwargs)
