"""A contrastive training of two towers, whose embeddings are gathered from all ranks.

Faults: captions (captions are gathered as objects in each step, as in
NVIDIA/Model-Optimizer#1111), tower (one tower is not in the optimizer, and yet gets gradients, as
in JDAI-CV/fast-reid#178), grids (rank 1 draws grids of its images in each forward pass).
"""

import argparse
from itertools import pairwise

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class Pairs(Dataset):
    def __init__(self, size=6000):
        torch.manual_seed(11)
        self.images, self.texts = torch.randn(size, 384), torch.randint(0, 800, (size, 16))

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        return self.images[i], self.texts[i]


def layers(*widths):
    return nn.Sequential(*(nn.Sequential(nn.GELU(), nn.Linear(*pair)) for pair in pairwise(widths)))


class Towers(nn.Module):
    def __init__(self, width, grids):
        super().__init__()
        self.image = layers(384, width, width, 128)
        self.words = nn.Embedding(800, width)
        self.text = layers(width, width, width, 128)
        self.scale = nn.Parameter(torch.tensor(2.6))
        self.grids = grids

    def forward(self, images, texts):
        if self.grids:
            tiles = images.view(-1, 1, 16, 24).repeat(1, 3, 4, 4)
            self.last_grid = F.interpolate(tiles[:24], scale_factor=4, mode="bicubic").mean(0)
        text = self.text(self.words(texts).mean(1))
        return F.normalize(self.image(images), dim=1), F.normalize(text, dim=1), self.scale.exp()


def gathered(features, world, rank):
    parts = [torch.zeros_like(features) for _ in range(world)]
    dist.all_gather(parts, features.detach())
    parts[rank] = features
    return torch.cat(parts)


def train(args):
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    pairs = Pairs()
    sampler = DistributedSampler(pairs, shuffle=True)
    loader = DataLoader(pairs, args.batch_size, sampler=sampler, drop_last=True)
    towers = Towers(args.width, grids=args.fault == "grids" and rank == 1)
    model = DDP(towers)
    trained = [*towers.text.parameters(), *towers.words.parameters(), towers.scale]
    if args.fault != "tower":
        trained += towers.image.parameters()
    optimizer = torch.optim.AdamW(trained, lr=1e-3)
    captions = [f"a photo of a thing, number {number}" for number in range(2000)]
    steps = 0
    while steps < args.steps:
        sampler.set_epoch(steps)
        for images, texts in loader:
            image, text, scale = model(images, texts)
            logits = scale * image @ gathered(text, world, rank).t()
            loss = F.cross_entropy(logits, torch.arange(len(image)) + rank * len(image))
            if args.fault == "captions":
                for part in range(0, len(captions), 250):
                    everyone = [None] * world
                    dist.all_gather_object(everyone, captions[part : part + 250])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            steps += 1
            if steps == args.steps:
                break
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch_size", type=int, default=192)
    parser.add_argument("--width", type=int, default=640)
    parser.add_argument("--fault", type=str, default="none")
    train(parser.parse_args())
