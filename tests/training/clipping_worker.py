"""One of four ranks: limits gradients that FSDP2 has spread, in the way of a GPU.

``clipping_worker.py FOLDER STRATEGY``; rank 0 leaves what it found in FOLDER/STRATEGY.pt.
"""

import sys
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from common.perfmodel.one_device.workload import Workload
from common.runtime.group.process_group import process_group
from common.training.config import FsdpConfig
from common.training.parallel import parallelise
from common.training.step import build_model, limit_in_few_launches


class Count(TorchDispatchMode):
    """How many operations are launched."""

    launches = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.launches += 1
        return function(*args, **(kwargs or {}))


folder, strategies = Path(sys.argv[1]), sys.argv[2:]
with process_group("cpu") as worker:
    for strategy in strategies:
        size = 2 if strategy == "HYBRID_SHARD" else 0
        config = FsdpConfig(model="gpt2-pico", strategy=strategy, shard_size=size, device="cpu")
        workload = Workload("gpt2-pico", batch_size=1, seq_len=16)
        model = parallelise(build_model(workload, worker.device), config, worker)
        torch.manual_seed(worker.rank)  # a batch of its own for each rank
        tokens, targets = torch.randint(256, (2, 1, 16)).unbind(0)
        model(tokens, targets).backward()
        gradients = [parameter.grad for parameter in model.parameters()]
        assert all(isinstance(gradient, DTensor) for gradient in gradients)
        before = [gradient.full_tensor().clone() for gradient in gradients]
        with torch.no_grad(), Count() as count:
            norm = limit_in_few_launches(gradients, 0.5)
        found = {
            "before": before,
            "after": [gradient.full_tensor() for gradient in gradients],
            "norms of all ranks": worker.gather(norm.item()),
            "launches": count.launches,
        }
        if worker.is_main:
            torch.save(found, folder / f"{strategy}.pt")
