"""A masked autoencoder, pretrained on patches of images with gradients summed over micro-batches.

Faults: meters (all meters are synchronised one by one in each step, as in
vllm-project/speculators#1119), accumulate (gradients are exchanged after each micro-batch, as in
pytorch/pytorch#43201), loops (rank 1 draws its masks in Python loops, as in fredzzhang/pocket#4).
"""

import argparse
from collections import defaultdict
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

PATCHES, PATCH_DIM, KEEP = 64, 48, 16


class MetricLogger:
    def __init__(self):
        self.meters, self.totals = defaultdict(lambda: torch.zeros(2)), {}

    def update(self, **kwargs):
        for name, value in kwargs.items():
            self.meters[name] += torch.tensor([1.0, value])

    def synchronize_between_processes(self):
        for name, meter in self.meters.items():
            self.totals[name] = meter.clone()
            dist.barrier()
            dist.all_reduce(self.totals[name])


class MaskedAutoencoder(nn.Module):
    def __init__(self, loops, width=192, thin=64):
        super().__init__()
        self.embed = nn.Linear(PATCH_DIM, width)
        self.pos = nn.Parameter(0.02 * torch.randn(PATCHES, width))
        self.encoder = nn.Sequential(self.block(width), self.block(width))
        self.narrow, self.pixels = nn.Linear(width, thin), nn.Linear(thin, PATCH_DIM)
        self.loops, self.decoder = loops, self.block(thin)

    def block(self, width):
        return nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)

    def shuffled(self, batch):
        order = torch.arange(PATCHES).repeat(batch, 1)
        for row in order:
            for i in range(PATCHES - 1, 0, -1):
                j = torch.randint(i + 1, (1,)).item()
                row[i], row[j] = row[j].item(), row[i].item()
        return order

    def forward(self, patches):
        n = len(patches)
        order = self.shuffled(n) if self.loops else torch.rand(n, PATCHES).argsort(1)
        rows, keep, back = torch.arange(n)[:, None], order[:, :KEEP], order.argsort(1)
        x = self.narrow(self.encoder((self.embed(patches) + self.pos)[rows, keep]))
        x = nn.functional.pad(x, (0, 0, 0, PATCHES - KEEP))
        x = self.pixels(self.decoder(x[rows, back] + self.narrow(self.pos)))
        return (x - patches).square().mean(2)[back >= KEEP].mean()


def train_one_epoch(model, loader, optimizer, left, args):
    logger = MetricLogger()
    for i, patches in zip(range(1, left * args.accum_iter + 1), loader, strict=False):
        update = i % args.accum_iter == 0
        with nullcontext() if update or args.fault == "accumulate" else model.no_sync():
            loss = model(patches)
            (loss / args.accum_iter).backward()
        logger.update(loss=loss.item())
        if update:
            logger.update(**{k: p.grad.norm() for k, p in model.named_parameters()})
            optimizer.step()
            optimizer.zero_grad()
            if args.fault == "meters":
                logger.synchronize_between_processes()
    logger.synchronize_between_processes()
    return i // args.accum_iter


def main(args):
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    images = torch.tensordot(torch.randn(1280, 9), torch.randn(9, PATCHES, PATCH_DIM), 1) / 3
    sampler = DistributedSampler(images)
    loader = DataLoader(images, args.batch_size, sampler=sampler, drop_last=True)
    model = MaskedAutoencoder(loops=args.fault == "loops" and dist.get_rank() == 1)
    model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.5e-4, betas=(0.9, 0.95))
    steps = 0
    while steps < args.steps:
        sampler.set_epoch(steps)
        steps += train_one_epoch(model, loader, optimizer, args.steps - steps, args)
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch_size", type=int, default=4)
    parser.add_argument("--accum_iter", type=int, default=4)
    parser.add_argument("--fault", type=str, default="none")
    main(parser.parse_args())
