"""What real DDP and ``fully_shard`` hold on two ranks: one JSON line a case, from rank 0."""

from __future__ import annotations

import itertools
import json

import torch
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

from common.benchmarks.memory_tracker import empty_batch
from common.perfmodel.sharding import STRATEGIES
from common.perfmodel.workload import Workload
from common.runtime.process_group import process_group
from common.training.step import TrainingStep, build_model

WORKLOAD = Workload("gpt2-nano", 8, 128, optimizer_implementation="fused")


def local_bytes(tensors) -> int:
    """Bytes of this rank's part of the tensors."""
    own = [t.to_local() if hasattr(t, "to_local") else t for t in tensors]
    return sum(tensor.nbytes for tensor in own if tensor.numel() > 1)


def parallel(strategy: str, model: torch.nn.Module) -> torch.nn.Module:
    """The model under a strategy, in one unit per block and one for the rest."""
    if strategy == "DDP":
        return DistributedDataParallel(model)
    reshard = strategy == "FULL_SHARD"
    for block in model.blocks:
        fully_shard(block, reshard_after_forward=reshard)
    return fully_shard(model, reshard_after_forward=reshard)


with process_group("cpu") as worker:
    for strategy in STRATEGIES[1:]:
        model = parallel(strategy, build_model(WORKLOAD, worker.device))
        step = TrainingStep(WORKLOAD, worker.device, model=model)
        batches = itertools.repeat(empty_batch(WORKLOAD, worker.device))
        for _ in range(2):
            step.run(batches)
        tokens, targets = next(batches)
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            step.forward(tokens, targets).backward()
        gradients = local_bytes(parameter.grad for parameter in model.parameters())
        step.update()
        parameters = local_bytes(model.parameters())
        states = [value for state in step.optimizer.state.values() for value in state.values()]
        events = profiler.profiler.kineto_results.events()
        memory = sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns())
        above = max(itertools.accumulate(event.nbytes() for event in memory))
        buckets = parameters if strategy == "DDP" else 0  # made with DDP, before the profile
        found = {
            **{"strategy": strategy, "parameters": parameters, "gradients": gradients},
            **{"states": local_bytes(states)},
        }
        found["peak"] = parameters + found["states"] + buckets + above
        if worker.is_main:
            print(json.dumps(found), flush=True)
        del step, model
