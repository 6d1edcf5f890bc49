"""A training as PyTorch's tutorial writes it: one model, one loop, DDP around it."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--batch_size", type=int, default=512)
parser.add_argument("--width", type=int, default=896)
arguments = parser.parse_args()

dist.init_process_group("gloo")
torch.manual_seed(0)
data = TensorDataset(torch.randn(16384, 256), torch.randint(0, 64, (16384,)))
sampler = DistributedSampler(data)
loader = DataLoader(data, arguments.batch_size, sampler=sampler)
width = arguments.width
layers = [nn.Linear(256, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()]
model = DistributedDataParallel(nn.Sequential(*layers, nn.Linear(width, 64)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
step = 0
while step < arguments.steps:
    sampler.set_epoch(step)
    for values, targets in loader:
        loss = nn.functional.cross_entropy(model(values), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if step >= arguments.steps:
            break
dist.destroy_process_group()
