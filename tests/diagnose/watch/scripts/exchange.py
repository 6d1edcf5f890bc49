"""Sends passes' gradients by DDP and by the watch's exchange: exchange.py FOLDER.

In buckets of several caps, and at last with a pass that fails on rank 1.
"""

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

CASES = ((0.001, False), (0.005, False), (25.0, False), (0.001, True))


def lose(gradient: torch.Tensor) -> None:
    raise RuntimeError("a hook of the script's own")


def exchanged(cap_mb: float, loses: bool) -> dict:
    """Returns the bytes of DDP's buckets and of those sent, and the largest difference."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(width, 30) for width in (20, 30, 30, 30)))
    torch.manual_seed(1 + rank)
    values = torch.randn(16, 20)
    ddp = DistributedDataParallel(model, bucket_cap_mb=cap_mb)
    for _ in range(3):  # after which DDP tells of the buckets that it made after the first
        model.zero_grad()
        ddp(values).square().sum().backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    logged = ddp._get_ddp_logging_data()
    rebuilt = logged.get("rebuilt_bucket_sizes", logged.get("bucket_sizes"))
    sizes = [int(size) for size in rebuilt.split(",")]
    del ddp
    parameters = list(model.parameters())
    exchange = Exchange([*sizes, *sizes], parameters, dist.group.WORLD)  # as of two passes
    failed, largest = False, []
    for _ in range(2):
        handles = [parameter.register_hook(exchange.ready) for parameter in parameters]
        if loses and rank == 1:
            handles.append(parameters[0].register_hook(lose))
        exchange.begin()
        found: tuple[torch.Tensor, ...] = ()
        try:
            found = torch.autograd.grad(model(values).square().sum(), parameters)
        except RuntimeError:
            failed = True
        finally:
            for handle in handles:
                handle.remove()
            exchange.finish()
        pairs = zip(found, expected, strict=False)
        largest += [((a - b).abs().max() / b.abs().max()).item() for a, b in pairs]
    sent = [4 * (b - a) for a, b in pairwise([0, *exchange.ends])]
    told = {"sent": sent, "sizes": sizes, "failed": failed}
    return told | {"difference": max(largest, default=None)}


folder = Path(sys.argv[1])
dist.init_process_group("gloo")
rank = dist.get_rank()
told = [exchanged(cap_mb, loses) for cap_mb, loses in CASES]
(folder / f"out-{rank}.json").write_text(json.dumps(told))
dist.destroy_process_group()
