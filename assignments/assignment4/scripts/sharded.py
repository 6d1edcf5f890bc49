"""A stack of layers under FSDP2."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=50)
parser.add_argument("--batch_size", type=int, default=512)
parser.add_argument("--width", type=int, default=384)
options = parser.parse_args()
dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
width = options.width
model = nn.Sequential()
for _ in range(4):
    model.append(nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)))
mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
for block in model:
    fully_shard(block, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for _ in range(options.steps):
    values = torch.randn(options.batch_size, width)
    loss = (model(values) - values).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
