"""A denoiser after PyTorch's oldest tutorial on distributed training: run(rank, size), partitions.

Faults: average_gradients (each gradient is summed by itself, without DDP), threads (eight threads
are set on every rank, as in pytorch/pytorch#22260), reopened (workers start anew in each short
epoch, as in open-mmlab/mmpose#923).
"""

import argparse
import os
from random import Random

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim
from torch.utils.data import DataLoader, Dataset


class Partition(Dataset):
    def __init__(self, data, index):
        self.data, self.index = data, index

    def __len__(self):
        return len(self.index)

    def __getitem__(self, index):
        return self.data[self.index[index]]


class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.time = nn.Linear(1, width)
        self.rise = nn.Linear(256, width)
        self.blocks = nn.ModuleList([nn.Linear(width, width) for _ in range(6)])
        self.fall = nn.Linear(width, 256)

    def forward(self, x, t):
        x = self.rise(x) + self.time(t)
        for block in self.blocks:
            x = x + F.silu(block(x))
        return self.fall(x)


def partition_dataset(batch_size):
    torch.manual_seed(1)
    data = torch.randn(6000, 256)
    indexes = list(range(len(data)))
    Random(1234).shuffle(indexes)
    part = indexes[dist.get_rank() :: dist.get_world_size()]
    return Partition(data, part), batch_size


def average_gradients(model):
    size = float(dist.get_world_size())
    for param in model.parameters():
        dist.all_reduce(param.grad.data, op=dist.ReduceOp.SUM)
        param.grad.data /= size


def run(args):
    torch.manual_seed(1234)
    if args.fault == "threads":
        torch.set_num_threads(8)
    partition, bsz = partition_dataset(args.batch_size)
    workers = {"num_workers": 1, "persistent_workers": args.fault != "reopened"}
    train_set = DataLoader(partition, bsz, shuffle=True, drop_last=True, **workers)
    model = Net(args.width)
    averages = args.fault == "average_gradients"
    if not averages:
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = optim.SGD(model.parameters(), lr=0.01, momentum=0.5)
    step = 0
    while step < args.steps:
        for data in train_set:
            t = torch.rand(len(data), 1)
            noise = torch.randn_like(data)
            optimizer.zero_grad()
            loss = F.mse_loss(model((1 - t) * data + t * noise, t), noise)
            loss.backward()
            if averages:
                average_gradients(model)
            optimizer.step()
            step += 1
            if step == args.steps:
                break


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=70)
    parser.add_argument("--batch_size", type=int, default=200)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--fault", default="none")
    dist.init_process_group("gloo", rank=int(os.environ["RANK"]))
    run(parser.parse_args())
    dist.destroy_process_group()
