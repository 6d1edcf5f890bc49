"""A training step under a plan: the model wrapped, its optimizer, and its micro-batches."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from common.errors import RunFailed
from common.models.traced import block_paths
from common.models.traced_memory import PRODUCTS
from common.planning.space import SINGLE, Plan
from common.runtime.group.process_group import Worker
from common.runtime.timing import clock_for
from common.training.ddp import make_ddp
from common.training.parallel import can_shard, gradient_sync, make_mesh, shard
from common.training.precision import autocast
from common.training.recording.memory_watch import AllocationWatch
from common.tuning.user_model import UserModel, checked_loss

LEARNING_RATE = 1e-5
PEAKS = 2
"""Steps on a CPU of which the smallest peak counts: what gloo's threads free late, on a busy
machine, is missed and makes a peak look larger."""


class PlannedStep:
    """A user's model as a plan trains it, on this rank; all ranks make it together.

    Args:
        user: the model with a micro-batch of the plan; its module is wrapped in place.
        mesh: ranks that FSDP spreads the model over; by default as the plan says.
        ranks_per_node: ranks of a node, for HYBRID_SHARD.
        updates: whether a step updates the parameters.
    """

    def __init__(
        self,
        user: UserModel,
        plan: Plan,
        worker: Worker,
        mesh: DeviceMesh | None = None,
        ranks_per_node: int = 1,
        *,
        updates: bool = True,
    ) -> None:
        self.user, self.plan, self.worker = user, plan, worker
        self.autocast_to = "float32" if plan.is_sharded else plan.precision
        self.idle = plan.strategy == SINGLE and not worker.is_main
        module = user.module.train()
        recompute(module, plan.checkpointing)
        self.model: nn.Module = module
        if plan.is_sharded:
            for parameter in module.parameters():  # which DDP does by itself
                dist.broadcast(parameter.data, src=0)
            policy = MixedPrecisionPolicy()
            if plan.precision == "bfloat16":
                policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
            blocks = blocks_of(module)
            units = [
                blocks[first : first + plan.blocks_per_unit]
                for first in range(0, len(blocks), plan.blocks_per_unit)
            ]
            self.model = shard(
                module,
                units,
                mesh or make_mesh(worker, plan.strategy, ranks_per_node),
                reshard=plan.strategy != "SHARD_GRAD_OP",
                policy=policy,
                root_policy=policy,
                prefetch=plan.prefetch,
            )
        elif plan.strategy != SINGLE:
            self.model = make_ddp(module, worker.device, bucket_cap_mb=plan.bucket_cap_mib)
        self.updates = updates
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self.optimizer = make_optimizer(trained, plan.strategy == "ZERO1")

    def run(self) -> None:
        """Runs one step."""
        if self.idle:
            return
        count = self.plan.accumulation
        for index in range(count):
            is_last = index == count - 1 or self.plan.reduces_each
            with gradient_sync(self.model, self.plan.strategy, is_last):
                with autocast(self.autocast_to, self.worker.device):
                    loss = checked_loss(self.user, self.model)
                (loss / count).backward()
        if self.updates:
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def timed_s(self) -> float:
        """Runs a step that all ranks begin together; returns its seconds on this rank."""
        # Under SINGLE the others are idle: they wait for nothing.
        return seconds_of(self.run, self.worker, together=self.plan.strategy != SINGLE)

    def peak_bytes(self) -> int:
        """Runs steps that are not the first; returns the peak of this rank's allocations in one."""
        device = self.worker.device
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            torch.cuda.reset_peak_memory_stats(device)
            self.run()
            torch.cuda.synchronize(device)
            return torch.cuda.max_memory_allocated(device)
        if self.idle:
            return 0
        peaks = []
        for _ in range(PEAKS):
            watch = AllocationWatch(self.model, self.optimizer, self.user.batch)
            self.run()
            # The profiler's stop can fail by itself, while gloo's threads still free tensors.
            with suppress(MemoryError):
                peaks.append(watch.finish())
        if not peaks:
            raise RunFailed(f"the profiler ended with no memory in {PEAKS} steps")
        return min(peaks)


def seconds_of(work: Callable[[], object], worker: Worker, *, together: bool = True) -> float:
    """Does ``work``, which ranks begin ``together``; returns its seconds on this rank's device."""
    clock = clock_for(worker.device)
    if together:
        worker.barrier()
    clock.wait()
    start = clock.mark()
    work()
    end = clock.mark()
    clock.wait()
    return clock.elapsed_s(start, end)


def close_ddp(model: nn.Module) -> None:
    """Ends DDP's reducer, where there is one, while the parameters that it hooks on are alive.

    Left to Python's collector, which frees both in any order, it ended ranks by a signal.
    """
    if isinstance(model, DistributedDataParallel):
        model.zero_grad(set_to_none=True)
        model.reducer = model.logger = None


def drop_unused(worker: Worker) -> None:
    """Frees a model that nothing refers to any more; its parts refer to each other."""
    gc.collect()
    if worker.device.type == "cuda":
        torch.cuda.empty_cache()


def make_optimizer(parameters: Sequence[nn.Parameter], in_parts: bool) -> torch.optim.Optimizer:
    """Makes AdamW with one fused kernel; ``in_parts`` is ZeRO-1's, over all ranks."""
    if in_parts:
        return ZeroRedundancyOptimizer(parameters, torch.optim.AdamW, lr=LEARNING_RATE, fused=True)
    return torch.optim.AdamW(parameters, lr=LEARNING_RATE, fused=True)


def blocks_of(module: nn.Module) -> list[nn.Module]:
    """Returns a module's blocks, in the order in which they are registered."""
    return [module.get_submodule(path) for path in block_paths(module)]


def recompute(module: nn.Module, kind: str) -> None:
    """Lets blocks compute their forward pass again: all of it, or but every second product.

    Models of transformers do it themselves, and leave out their cache of keys and values then.
    """
    if kind == "none":
        return
    settings: dict[str, object] = {"use_reentrant": False}
    if kind == "selective":
        settings["context_fn"] = every_second_product
    if switch := checkpointing_switch(module):
        getattr(module, switch)(settings)
        return
    for block in blocks_of(module):
        block.forward = partial(checkpoint, block.forward, **settings)


def checkpointing_switch(module: nn.Module) -> str:
    """Returns the method by which a model of transformers recomputes its blocks by itself.

    The newest name comes first; it is empty for a model that has none.
    """
    names = ("activation_checkpointing_enable", "gradient_checkpointing_enable")
    has_switch = getattr(module, "supports_gradient_checkpointing", False)
    return next((name for name in names if has_switch and hasattr(module, name)), "")


def in_half(user: UserModel) -> UserModel:
    """Returns a model whose weights and inputs are bfloat16; buffers stay, as FSDP leaves them."""
    for parameter in user.module.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.bfloat16()

    def cast(leaf: object) -> object:
        is_float = isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
        return leaf.bfloat16() if is_float else leaf

    return replace(user, batch=tree_map(cast, user.batch))


def every_second_product() -> tuple:
    """Returns checkpointing contexts that keep the first, third … product of a block."""
    products = Counter()

    def policy(context: object, operator: object, *_: object, **__: object) -> CheckpointPolicy:
        if operator not in PRODUCTS:
            return CheckpointPolicy.PREFER_RECOMPUTE
        products[context.is_recompute] += 1
        keeps = products[context.is_recompute] % 2 == 1
        return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def why_unshardable(module: nn.Module, worker: Worker) -> str:
    """Returns why FSDP cannot take a module here; empty where it can."""
    if not can_shard(worker):
        return "on GPUs it exchanges over NCCL, not over gloo"
    blocks = block_paths(module)
    owners: dict[int, str] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        block = next((path for path in blocks if name.startswith(f"{path}.")), "")
        owner = owners.setdefault(id(parameter), block)
        if owner != block:
            return f"{name} is shared between two of its units"
    return ""
