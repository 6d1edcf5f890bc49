"""Sends one pass's gradients by DDP and by the watch's exchange: exchange.py FOLDER CAP LOSES."""

from __future__ import annotations

import json
import sys
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist
from ddplab_watch.exchanging import Exchange
from torch import nn
from torch.nn.parallel import DistributedDataParallel

folder, cap_mb, loses = Path(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = nn.Sequential(*(nn.Linear(width, 30) for width in (20, 30, 30, 30)))
torch.manual_seed(1 + rank)
values = torch.randn(16, 20)
ddp = DistributedDataParallel(model, bucket_cap_mb=cap_mb)
for _ in range(2):  # DDP makes its final buckets after the first pass
    model.zero_grad()
    ddp(values).square().sum().backward()
expected = [parameter.grad.clone() for parameter in model.parameters()]
logged = ddp._get_ddp_logging_data()
rebuilt = logged.get("rebuilt_bucket_sizes", logged.get("bucket_sizes"))
sizes = [int(size) for size in rebuilt.split(",")]
parameters = list(model.parameters())
exchange = Exchange([*sizes, *sizes], parameters, dist.group.WORLD)  # as of two passes
lost = {"failed": False}


def lose(gradient: torch.Tensor) -> None:
    raise RuntimeError("a hook of the script's own")


largest = []
for _ in range(2):
    handles = [parameter.register_hook(exchange.ready) for parameter in parameters]
    if loses and rank == 1:
        handles.append(parameters[0].register_hook(lose))
    exchange.begin()
    found: tuple[torch.Tensor, ...] = ()
    try:
        found = torch.autograd.grad(model(values).square().sum(), parameters)
    except RuntimeError:
        lost["failed"] = True
    finally:
        for handle in handles:
            handle.remove()
        exchange.finish()
    pairs = zip(found, expected, strict=False)
    largest += [((a - b).abs().max() / b.abs().max()).item() for a, b in pairs]
ends = [0, *exchange.ends]
told = {"sent": [4 * (b - a) for a, b in pairwise(ends)], "sizes": sizes, **lost}
text = json.dumps(told | {"difference": max(largest, default=None)})
(folder / f"out-{rank}.json").write_text(text)
dist.destroy_process_group()
