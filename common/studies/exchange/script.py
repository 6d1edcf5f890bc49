"""A training script under DDP whose exchange overlaps the backward pass, or waits in get_future.

    script.py overlaps|stalls cpu|cuda

``ddplab study exchange`` has it watched and diagnosed. All-reduces take half of the backward pass.
"""

from __future__ import annotations

import sys
import time

import torch
import torch.distributed as dist
from torch import nn

from common.studies.exchange.emulated_group import EMULATED, Exchange, connect, register
from common.training.ddp import make_ddp

STEPS, LAYERS, BATCH_SIZE = 90, 12, 512
WIDTH = {"cpu": 384, "cuda": 4096}
CAP_MB = {"cpu": 1.2, "cuda": 128}
RATIO = 0.5


def main(arm: str, device_type: str) -> None:
    """Trains an MLP of ``LAYERS`` equal layers; a bucket holds two of them."""
    register(device_type)
    dist.init_process_group(EMULATED, store=dist.HashStore(), rank=0, world_size=1)
    device = torch.device(device_type)
    torch.manual_seed(0)
    width = WIDTH[device_type]
    layers = [module for _ in range(LAYERS) for module in (nn.Linear(width, width), nn.ReLU())]
    model = nn.Sequential(*layers).to(device)
    inputs = torch.randn(BATCH_SIZE, width, device=device)
    gradient_bytes = sum(parameter.nbytes for parameter in model.parameters())
    exchange_s = RATIO * backward_s(model, inputs)
    connect(Exchange(1e-4, gradient_bytes / exchange_s, stalls=arm == "stalls"))
    ddp = make_ddp(model, device, bucket_cap_mb=CAP_MB[device_type])
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-4)
    for _ in range(STEPS):
        optimizer.zero_grad()
        ddp(inputs).square().mean().backward()
        optimizer.step()
    dist.destroy_process_group()


def backward_s(model: nn.Module, inputs: torch.Tensor) -> float:
    """Returns the seconds of a backward pass without DDP, the shortest of ten."""
    times = []
    for _ in range(10):
        loss = model(inputs).square().mean()
        wait_for(inputs)
        start = time.perf_counter()
        loss.backward()
        wait_for(inputs)
        times.append(time.perf_counter() - start)
        model.zero_grad()
    return min(times)


def wait_for(tensor: torch.Tensor) -> None:
    """Waits for a tensor's device."""
    if tensor.device.type == "cuda":
        torch.cuda.synchronize(tensor.device)


if __name__ == "__main__":
    main(*sys.argv[1:])
