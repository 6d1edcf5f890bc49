"""Data parallelism: the function that wraps a model, and when ranks exchange gradients."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from common.errors import UserError
from common.exercises.bucketed_ddp import BucketedDDP
from common.exercises.fsdp import FSDP
from common.exercises.naive_ddp import NaiveDDP
from common.exercises.overlapped_ddp import OverlappedDDP
from common.models.gpt2 import GPT2
from common.runtime.group.process_group import Worker
from common.training.ddp import exchanging, make_ddp
from common.training.step import check_compiler

if TYPE_CHECKING:
    from common.training.config import TrainingConfig


def parallelise(
    model: GPT2, config: TrainingConfig, worker: Worker, mesh: DeviceMesh | None = None
) -> nn.Module:
    """Returns the model as the strategy trains it; all ranks then have rank 0's weights.

    DDP keeps everything on every rank and all-reduces gradients in buckets. FSDP2 spreads
    parameters, gradients and optimizer states, in one unit per block and one for the rest; the
    strategies differ in when a unit's parameters, gathered for use, are dropped again:

    * ``SHARD_GRAD_OP``: after its backward pass.
    * ``FULL_SHARD``: after its forward pass, too, and gathered again for the backward pass. Not so
      the root's (embeddings and the last norm), which the backward pass begins with.
    * ``HYBRID_SHARD``: as ``FULL_SHARD`` within groups of ranks; gradients are then all-reduced
      between the groups.

    ``MY_…`` are the exercises, whose descriptions say what they do. ``mesh`` are the ranks that
    FSDP spreads the model over, by default all.
    """
    if config.strategy == "single":
        return model
    if config.strategy == "MY_DDP":
        return OverlappedDDP(model)
    if config.strategy == "MY_BUCKETS":
        return BucketedDDP(model, config.bucket_cap_mb)
    if config.strategy == "MY_FSDP":
        return FSDP(model, block_precision(config).param_dtype)
    if config.strategy in ("DDP", "MY_ZERO1"):
        return make_ddp(
            model,
            worker.device,
            bucket_cap_mb=config.bucket_cap_mb,
            gradient_as_bucket_view=config.gradient_as_bucket_view,
        )
    refuse_unshardable(config.strategy, worker)
    for parameter in model.parameters():  # which DDP does by itself
        dist.broadcast(parameter.data, src=0)
    if config.compile:
        check_compiler(worker.device)
        for block in model.blocks:
            block.compile()
    return shard(
        model,
        [[block] for block in model.blocks],
        mesh or make_mesh(worker, config.strategy, config.shard_size),
        reshard=config.strategy != "SHARD_GRAD_OP",
        policy=block_precision(config),
    )


def shard(
    model: nn.Module,
    units: Sequence[Sequence[nn.Module]],
    mesh: DeviceMesh,
    *,
    reshard: bool,
    policy: MixedPrecisionPolicy,
    root_policy: MixedPrecisionPolicy | None = None,
    prefetch: int = 1,
) -> nn.Module:
    """Spreads a model over a mesh by FSDP2: each unit of blocks, and the rest as the root.

    Args:
        units: blocks that are gathered at once, in the order of the forward pass.
        reshard: whether a unit is dropped after its forward pass, too.
        policy: types of the blocks.
        root_policy: types of the root, by default as they are.
        prefetch: units that are gathered ahead of the one that computes; by itself FSDP2 gathers
            one.
    """
    for unit in units:
        modules = unit[0] if len(unit) == 1 else list(unit)
        fully_shard(modules, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy)
    root_policy = root_policy or MixedPrecisionPolicy()
    fully_shard(model, mesh=mesh, reshard_after_forward=False, mp_policy=root_policy)
    if prefetch != 1:
        gather_ahead(model, [unit[0] for unit in units], prefetch)
    return model


def gather_ahead(model: FSDPModule, units: Sequence[FSDPModule], count: int) -> None:
    """Lets FSDP2 gather so many units ahead of the one that computes, in both passes.

    A unit that is told of none gathers the next one in the backward pass, so the last one, and with
    a count of 0 every one, is told of itself, which is there by then.

    Args:
        units: a module of each unit, in the order of the forward pass.
    """
    for order, tell in (
        ([model, *units], FSDPModule.set_modules_to_forward_prefetch),
        ([model, *reversed(units)], FSDPModule.set_modules_to_backward_prefetch),
    ):
        for index, module in enumerate(order):
            tell(module, order[index + 1 : index + 1 + count] or [module])


def can_shard(worker: Worker) -> bool:
    """Returns True if FSDP can run here: not on GPUs joined by gloo.

    For these ``init_device_mesh`` makes a group of NCCL's: torch/distributed/device_mesh.py
    (``new_group`` where the default group is gloo).
    """
    return worker.device.type == "cpu" or worker.backend == "nccl"


def refuse_unshardable(strategy: str, worker: Worker) -> None:
    """Raises UserError where FSDP cannot run under this strategy's name (``can_shard``)."""
    if not can_shard(worker):
        raise UserError(
            f"strategy {strategy}: FSDP on GPUs exchanges over NCCL, not over gloo; leave "
            "out --backend gloo, or use DDP"
        )


def make_mesh(worker: Worker, strategy: str, group_size: int) -> DeviceMesh:
    """Makes a mesh of all ranks in one row, or HYBRID_SHARD's groups of ranks as rows."""
    device, ranks = worker.device.type, worker.world_size
    if strategy != "HYBRID_SHARD":
        return init_device_mesh(device, (ranks,))
    shape = (ranks // group_size, group_size)
    return init_device_mesh(device, shape, mesh_dim_names=("replicate", "shard"))


def block_precision(config: TrainingConfig) -> MixedPrecisionPolicy:
    """Returns a policy that gathers blocks in the precision that autocast computes in.

    That halves the bytes. Gradients are reduced in float32, as DDP's are. Inputs are not cast, so
    that the residual stream stays float32 under every strategy; what differs are the weights of the
    norms, which autocast alone would not round.
    """
    if config.precision != "bfloat16":
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)


@contextmanager
def gradient_sync(model: nn.Module, strategy: str, is_last: bool) -> Iterator[None]:
    """Surrounds a micro-batch's forward and backward pass; gradients are averaged when it ends.

    They are exchanged in the step's last one only, but for MY_FSDP's, which go with each pass.
    Parameters that stay gathered between a forward and a backward pass also stay until then:
    SHARD_GRAD_OP's, and the root's.
    """
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(is_last)
        model.set_reshard_after_backward(is_last, recurse=strategy == "SHARD_GRAD_OP")
    with exchanging(model, is_last):
        yield
    if isinstance(model, FSDP) or (isinstance(model, NaiveDDP) and is_last):
        model.finish_gradient_synchronization()


def without_wrapper(model: nn.Module) -> nn.Module:
    """Returns the model that an exercise has wrapped; any other as it is.

    PyTorch's functions for state dicts see through its own wrappers only.
    """
    return model.module if isinstance(model, NaiveDDP | FSDP) else model
