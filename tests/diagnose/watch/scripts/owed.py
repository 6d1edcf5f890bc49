"""Makes steps of which a pass fails on rank 1, and the exchanges after it: owed.py FOLDER."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from ddplab_watch.owed import OwedPasses
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Failing(torch.autograd.Function):
    """Fails where half of the gradients are computed."""

    @staticmethod
    def forward(context, values):
        return values.clone()

    @staticmethod
    def backward(context, gradient):
        raise RuntimeError("out of memory")


class Model(nn.Module):
    """Fails at a pass of its own, ``place`` says where; its buffers change in each."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(20, 30), nn.BatchNorm1d(30), *(nn.Linear(30, 30) for _ in range(3))
        )
        self.unused = nn.Linear(3, 3)
        self.passes, self.failing, self.place = 0, 0, ""

    def load(self):
        if self.place == "load" and self.passes == self.failing - 1:
            raise RuntimeError("out of memory")

    def forward(self, values):
        self.passes += 1
        fails = self.passes == self.failing
        if fails and self.place == "forward":
            raise RuntimeError("out of memory")
        values = self.layers[:3](values)
        return self.layers[3:](Failing.apply(values) if fails else values)


class Pass:
    """A pass as the trials make it."""

    def __init__(self, values):
        self.values = values

    def forward(self, module):
        return [module(self.values).square().sum()], [torch.ones(())]


folder = Path(sys.argv[1])
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = Model()
everyone = torch.randn(2, 16, 20)
used, told = list(model.layers.parameters()), {}
for place, failing, static in itertools.product(("load", "forward", "backward"), (1, 4), (0, 1)):
    why = ""
    model.unused.requires_grad_(not static)
    for has_failed in (False, True):
        ddp = DistributedDataParallel(
            model, bucket_cap_mb=0.002, static_graph=bool(static), find_unused_parameters=not static
        )
        passes = OwedPasses(ddp, used)
        model.passes, model.place = 0, place
        model.failing = failing if rank == 1 and not has_failed else 0

        for _ in range(2 if has_failed else (failing + 2) // 3):
            model.zero_grad(set_to_none=True)
            for index in range(3):  # the first is the one that fails
                passes.run(Pass(everyone[rank]), silent=index == 1, load=model.load)
            dist.all_reduce(torch.zeros(1))  # meets no bucket
            if passes.error:
                why = str(passes.error)
        passes.remove()
        del ddp
    averaged = [parameter.grad.clone() for parameter in used]
    expected = [torch.zeros_like(each) for each in averaged]
    for index in (0, 1):
        model.zero_grad(set_to_none=True)
        for _ in range(3):
            model(everyone[index]).square().sum().backward()
        for sum_of, parameter in zip(expected, used, strict=True):
            sum_of += parameter.grad / 2
    pairs = zip(averaged, expected, strict=True)
    difference = max(((a - b).abs().max() / b.abs().max()).item() for a, b in pairs)
    told[f"{place} {failing} {static}"] = why, difference
(folder / f"out-{rank}.json").write_text(json.dumps(told))
dist.destroy_process_group()
