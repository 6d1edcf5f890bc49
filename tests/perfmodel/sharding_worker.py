"""What real DDP and ``fully_shard`` hold on two ranks: one JSON line a case, from rank 0.

Arguments: precision, strategy and model of each case, such as ``float32:DDP:gpt2-nano``.
"""

from __future__ import annotations

import itertools
import json
import sys
from dataclasses import replace

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

from common.benchmarks.one_device.memory_tracker import empty_batch
from common.perfmodel.one_device.memory import predict_memory
from common.perfmodel.one_device.sharding import Sharding
from common.perfmodel.one_device.workload import Workload
from common.runtime import torch_internals
from common.runtime.group.process_group import process_group
from common.training.config import TrainingConfig
from common.training.parallel import block_precision
from common.training.step import TrainingStep, build_model

WORKLOAD = Workload("gpt2-nano", 2, 128, optimizer_implementation="fused")
PROFILED_STEPS, WITHIN = 2, 0.02


def local_bytes(tensors) -> int:
    """Counts the bytes of this rank's part of the tensors."""
    own = [t.to_local() if hasattr(t, "to_local") else t for t in tensors]
    return sum(tensor.nbytes for tensor in own if tensor.numel() > 1)


def parallel(strategy: str, precision: str, model: torch.nn.Module) -> torch.nn.Module:
    """Wraps the model in a strategy, in one unit per block and one for the rest.

    Blocks are gathered in the precision that they are computed in, as the trainer does it.
    """
    if strategy in ("DDP", "ZERO1"):
        return DistributedDataParallel(model)
    reshard = strategy == "FULL_SHARD"
    for block in model.blocks:
        policy = block_precision(TrainingConfig(precision=precision))
        fully_shard(block, reshard_after_forward=reshard, mp_policy=policy)
    return fully_shard(model, reshard_after_forward=reshard)


def highest_above(step: TrainingStep, tokens: torch.Tensor, targets: torch.Tensor) -> int:
    """Measures the most bytes allocated at once in both passes, above those before them."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step.forward(tokens, targets).backward()
    return max(itertools.accumulate(torch_internals.memory_changes(profiler)))


with process_group("cpu") as worker:
    for case in sys.argv[1:]:
        precision, strategy, name = case.split(":")
        workload = replace(WORKLOAD, precision=precision, model=name)
        model = parallel(strategy, precision, build_model(workload, worker.device))
        step = TrainingStep(workload, worker.device, model=model, shard_states=strategy == "ZERO1")
        batches = itertools.repeat(empty_batch(workload, worker.device))
        in_buckets = strategy in ("DDP", "ZERO1")
        for _ in range(1 + in_buckets):  # DDP makes its final buckets in the second step
            step.run(batches)
        parameters = local_bytes(model.parameters())
        states = [value for state in step.optimizer.state.values() for value in state.values()]
        buckets = parameters if in_buckets else 0  # made with DDP, before the profile
        most = torch.tensor(local_bytes(states))
        dist.all_reduce(most, dist.ReduceOp.MAX)
        held = parameters + most.item() + buckets
        predicted = predict_memory(workload, Sharding(strategy, worker.world_size)).peak_bytes
        # The profiler does not see what one of gloo's threads frees, which happens when that thread
        # is the last to let go of a gradient: a sum may be too high, never too low. So the least of
        # a further step counts where it is.
        above = []
        for _ in range(PROFILED_STEPS):
            above.append(highest_above(step, *next(batches)))
            gradients = local_bytes(parameter.grad for parameter in model.parameters())
            step.update()
            if not worker.broadcast((1 - WITHIN) * (held + min(above)) > predicted):
                break
        found = {"case": case, "states": most.item(), "parameters": parameters}
        found |= {"gradients": gradients, "peak": held + min(above)}
        if worker.is_main:
            print(json.dumps(found), flush=True)
        del step, model
