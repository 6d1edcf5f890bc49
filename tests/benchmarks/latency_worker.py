"""One rank that averages gradients through the latency hook: ``latency_worker.py MODE FOLDER``.

- ``compare``: two ranks train a small model with plain DDP and with the hook, on batches of their
  own; ``FOLDER/rank<r>.json`` has the gradients of each step, and of the hook the number of
  buckets and how long each backward pass took.
- ``peer_dies``: rank 1 leaves in the middle of training. Rank 0 writes how its backward pass ended.
- ``breaks``: one rank whose thread cannot reduce. It writes how its backward pass ended.
"""

from __future__ import annotations

import json
import os
import sys
import time
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from common.benchmarks.buckets.ddp_record import bucket_sizes
from common.benchmarks.buckets.latency_hook import LatencyHook, added_latency
from common.runtime.group.process_group import Worker, process_group

CPU = torch.device("cpu")
LATENCY_MS = 20.0
STEPS = 4
CAP_MIB = 0.001
ARMS = {
    "plain": {},
    "views": {"gradient_as_bucket_view": True},
    "static": {"static_graph": True},
    "unused": {"find_unused_parameters": True},
}


def small_ddp(rank: int, **arguments) -> tuple[DistributedDataParallel, torch.Tensor]:
    """Makes the same model on every rank, and a batch of the rank's own."""
    torch.manual_seed(0)
    widths = (16, 24, 20, 18, 17, 16)
    model = nn.Sequential(*(nn.Linear(*pair) for pair in pairwise(widths)))
    torch.manual_seed(rank + 1)
    batch = torch.randn(8, widths[0])
    return DistributedDataParallel(model, bucket_cap_mb=CAP_MIB, **arguments), batch


def train(rank: int, latency_ms: float, **arguments) -> dict:
    """Trains; returns every step's gradients, with a latency also the backward passes' times."""
    ddp, batch = small_ddp(rank, **arguments)
    gradients, times_s, buckets = [], [], []
    with added_latency(latency_ms, CPU) as hook:
        if hook:
            hook.register(ddp)
        for _ in range(STEPS):
            ddp.zero_grad()
            loss = ddp(batch).square().mean()
            start_s = time.perf_counter()
            loss.backward()
            times_s.append(time.perf_counter() - start_s)
            gradients.append([parameter.grad.tolist() for parameter in ddp.parameters()])
            buckets.append(len(bucket_sizes(ddp._get_ddp_logging_data())))
    return {"gradients": gradients, "backward_s": times_s, "buckets": buckets}


def how_it_ends(worker: Worker, hook: LatencyHook) -> dict:
    """Returns the error of the first step that fails, and whether any did within a few."""
    ddp, batch = small_ddp(worker.rank)
    hook.register(ddp)
    for step in range(STEPS):
        if worker.rank == 1 and step == 2:
            os._exit(0)  # as a rank that was killed: nothing is closed in order
        try:
            ddp(batch).square().mean().backward()
        except RuntimeError as error:
            return {"step": step, "error": str(error)}
    return {"step": STEPS, "error": ""}


def main(mode: str, folder: Path) -> None:
    """Does what the mode says."""
    torch.set_num_threads(1)
    with process_group("cpu") as worker:
        if mode == "compare":
            result = {
                name: [train(worker.rank, latency, **arguments) for latency in (0.0, LATENCY_MS)]
                for name, arguments in ARMS.items()
            }
        else:
            hook = LatencyHook(1.0, CPU)
            if mode == "breaks":
                hook._average = lambda _: 1 / 0
            result = how_it_ends(worker, hook)
        (folder / f"rank{worker.rank}.json").write_text(json.dumps(result))
        dist.barrier() if mode == "compare" else os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
