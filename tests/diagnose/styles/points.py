"""A classifier of shapes from clouds of points, a small PointNet++ trained by plain functions.

Faults: fps (clouds are thinned by farthest-point sampling whenever they are loaded, not once, as in
MegEngine/OMNet#5), balance (a weighted sampler balances the classes, with which each rank draws
from all shapes, as in Parskatt/RoMa#32, and by one seed draws the same ones), guards (hooks that
look for NaNs around each module were left on).
"""

import argparse
from dataclasses import dataclass, fields
from itertools import islice, pairwise

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, WeightedRandomSampler

SHAPES, CLASSES, RAW, POINTS, CHECKS = 192, 8, 512, 256, (torch.isnan, torch.isinf)
STAGES = (64, 12, (6, 32, 64)), (24, 12, (67, 96, 192)), (8, 8, (195, 256, 768))


@dataclass
class Config:
    steps: int = 60
    batch: int = 8
    seed: int = 0
    fault: str = "none"


def make_shapes(thin):
    labels = np.minimum(np.arange(SHAPES) % (CLASSES + 4), CLASSES - 1)  # many of the last class
    rays = np.random.default_rng(0).standard_normal((SHAPES, RAW, 3), dtype=np.float32)
    power = np.geomspace(0.6, 12, CLASSES, dtype=np.float32)[labels, None, None]
    clouds = rays / (np.abs(rays) ** power).sum(-1, keepdims=True) ** (1 / power)
    return list(zip(map(farthest_points, clouds) if thin else clouds, labels, strict=True))


def farthest_points(cloud):
    chosen, distance = [0], np.full(len(cloud), np.inf, dtype=np.float32)
    while len(chosen) < POINTS:
        distance = np.minimum(distance, ((cloud - cloud[chosen[-1]]) ** 2).sum(1))
        chosen.append(distance.argmax())
    return cloud[chosen]


def collate(batch):
    clouds, labels = zip(*batch, strict=True)
    thinned = [cloud if len(cloud) == POINTS else farthest_points(cloud) for cloud in clouds]
    scale = 0.8 + 0.4 * torch.rand(len(labels), 1, 3)
    return scale * torch.from_numpy(np.stack(thinned)), torch.tensor(labels)


def make_sampler(shapes, balance):
    if not balance:
        return DistributedSampler(shapes)
    labels = np.array([label for _, label in shapes])
    return WeightedRandomSampler(1 / np.bincount(labels)[labels], num_samples=len(shapes))


def shared_mlp(widths):
    blocks = [
        (nn.Linear(a, b, bias=False), nn.BatchNorm1d(b), nn.ReLU()) for a, b in pairwise(widths)
    ]
    return nn.Sequential(*sum(blocks, ()))


def group(xyz, features, centers, neighbours):
    middle, batch = xyz[:, :centers], torch.arange(len(xyz))[:, None, None]
    index = torch.cdist(middle, xyz).topk(neighbours, largest=False).indices
    return middle, torch.cat([xyz[batch, index] - middle[:, :, None], features[batch, index]], -1)


class PointNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stages = nn.ModuleList(shared_mlp(widths) for *_, widths in STAGES)
        self.head = nn.Sequential(shared_mlp((768, 512)), nn.Linear(512, CLASSES))

    def forward(self, xyz):
        features = xyz
        for mlp, (centers, neighbours, _) in zip(self.stages, STAGES, strict=True):
            xyz, grouped = group(xyz, features, centers, neighbours)
            features = mlp(grouped.flatten(0, 2)).unflatten(0, grouped.shape[:3]).max(2).values
        return self.head(features.max(1).values)


def check_finite(module, inputs, output):
    assert not any(found(x).any() for x in (*inputs, output) for found in CHECKS), module


def train(cfg):
    torch.manual_seed(cfg.seed)
    shapes = make_shapes(thin=cfg.fault != "fps")
    sampler = make_sampler(shapes, balance=cfg.fault == "balance")
    loader = DataLoader(shapes, cfg.batch, sampler=sampler, collate_fn=collate)
    net = PointNet()
    if cfg.fault == "guards":
        net.apply(lambda module: module.register_forward_hook(check_finite))
    model = nn.parallel.DistributedDataParallel(net, broadcast_buffers=False)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3, fused=True)
    for epoch in range(-(-cfg.steps // len(loader))):
        if isinstance(sampler, DistributedSampler):
            sampler.set_epoch(epoch)
        for xyz, label in islice(loader, cfg.steps - epoch * len(loader)):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(xyz), label, label_smoothing=0.2).backward()
            optimizer.step()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    for field in fields(Config):
        parser.add_argument(f"--{field.name}", type=field.type, default=field.default)
    dist.init_process_group("gloo")
    train(Config(**vars(parser.parse_args())))
    dist.destroy_process_group()
