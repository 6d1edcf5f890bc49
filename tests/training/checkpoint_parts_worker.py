"""One of four ranks: saves a model of DDP and one of HYBRID_SHARD, asynchronously.

``checkpoint_parts_worker.py FOLDER``: checkpoints are in FOLDER/STRATEGY, and beside each what it
must hold (``STRATEGY.pt``) and how many bytes each rank kept to write (``STRATEGY.json``).
"""

import json
import sys
from pathlib import Path

import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.tensor import DTensor

from common.perfmodel.one_device.workload import Workload
from common.runtime.group.process_group import process_group
from common.training.checkpoints.checkpoint import Checkpoints
from common.training.checkpoints.states import own_part
from common.training.config import DdpConfig, FsdpConfig
from common.training.parallel import parallelise
from common.training.step import TrainingStep, build_model


def kept_bytes(states: dict) -> int:
    """Counts bytes of the tensors in a nested dictionary that are on this rank."""
    total = 0
    for value in states.values():
        if isinstance(value, dict):
            total += kept_bytes(value)
        elif isinstance(value, torch.Tensor):
            total += (value.to_local() if isinstance(value, DTensor) else value).nbytes
    return total


folder = Path(sys.argv[1])
with process_group("cpu") as worker:
    for config in (
        DdpConfig(model="gpt2-pico", device="cpu"),
        FsdpConfig(model="gpt2-pico", device="cpu", strategy="HYBRID_SHARD", shard_size=2),
    ):
        workload = Workload("gpt2-pico", batch_size=1, seq_len=16)
        model = parallelise(build_model(workload, worker.device), config, worker)
        step = TrainingStep(workload, worker.device, model=model)
        torch.manual_seed(worker.rank)
        step.run([torch.randint(256, (2, 1, 16)).unbind(0)])
        checkpoints = Checkpoints(folder / config.strategy, worker, 1, asynchronous=True)
        checkpoints.save(model, step.optimizer, {"step": 1}, wait=True)
        names = ("model", "optimizer")
        own = own_part(dict(zip(names, get_state_dict(model, step.optimizer), strict=True)), worker)
        sizes = worker.gather(kept_bytes(own))
        whole = StateDictOptions(full_state_dict=True)
        states = get_state_dict(model, step.optimizer, options=whole)
        if worker.is_main:
            (folder / f"{config.strategy}.json").write_text(json.dumps(sizes))
            torch.save(dict(zip(names, states, strict=True)), folder / f"{config.strategy}.pt")
        worker.barrier()
