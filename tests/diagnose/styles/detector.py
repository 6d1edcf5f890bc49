"""An anchor-free detector (a CNN with an FPN, after FCOS) fine-tuned behind frozen early stages.

Faults: mosaic (nine distorted images make one while training waits, as in meituan/YOLOv6#473),
sizes (each rank draws its batches' sizes, as in NovelAI/novelai-aspect-ratio-bucketing#3), stages
(the frozen stages are only left out of the optimizer, as in BINE022/EEGPT#18).
"""

import argparse
from dataclasses import dataclass, fields
from itertools import islice, pairwise

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

SIDE, CLASSES, BOXES, FPN, STRIDES = 96, 6, 3, 48, (4, 8, 16)
TILES = 3  # a mosaic has TILES x TILES images: the cost of "mosaic"
SIZES = (32, 80, 176)  # multiples of 16; the further apart, the more "sizes" costs
WIDTHS, FROZEN = (24, 48, 96, 160), 2  # the stem and so many stages: the cost of "stages"


@dataclass
class Config:
    steps: int = 60
    batch_size: int = 3
    fault: str = "none"


def make_scenes(count):
    rng = np.random.default_rng(5)
    scenes = rng.random((count, 3, SIDE, SIDE), np.float32) / 2
    kinds, colours = rng.integers(CLASSES, size=(count, BOXES)), rng.random((CLASSES, 3, 1, 1))
    corners, extents = rng.integers(16, 48, (2, count, BOXES, 2))
    places = np.concatenate([corners, corners + extents], -1)
    for scene, boxes, labels in zip(scenes, places, kinds, strict=True):
        for (x0, y0, x1, y1), label in zip(boxes, labels, strict=True):
            scene[:, y0:y1, x0:x1] += colours[label]
    return torch.from_numpy(scenes), torch.from_numpy(places), torch.from_numpy(kinds)


class Mosaics(TensorDataset):
    def __getitem__(self, index):
        rng, (scenes, places, kinds) = np.random.default_rng(), (t.numpy() for t in self.tensors)
        chosen = np.append(index, rng.integers(len(self), size=TILES**2 - 1))
        tiles = scenes[chosen] ** rng.uniform(0.7, 1.4, (TILES**2, 1, 1, 1)).astype(np.float32)
        tiles += 0.03 * rng.standard_normal(tiles.shape, np.float32)
        canvas = tiles.reshape(TILES, TILES, 3, SIDE, SIDE).transpose(2, 0, 3, 1, 4)
        image = canvas.reshape(3, SIDE, TILES, SIDE, TILES).mean((2, 4))
        y, x = np.divmod(np.arange(TILES**2), TILES)
        boxes = (places[chosen] + SIDE * np.stack([x, y, x, y], -1)[:, None]) / TILES
        return image, boxes.reshape(-1, 4), kinds[chosen].ravel()


def conv(inputs, width, stride=1):
    layer = nn.Conv2d(inputs, width, 3, stride, 1, bias=False)
    return nn.Sequential(layer, nn.GroupNorm(8, width), nn.ReLU())


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        stages = [[conv(a, b, 2), conv(b, b), conv(b, b)] for a, b in pairwise(WIDTHS)]
        self.stages = nn.ModuleList(nn.Sequential(*stage) for stage in stages)
        self.stem, self.head = conv(3, WIDTHS[0], 2), nn.Conv2d(FPN, CLASSES + 4, 3, padding=1)
        self.lateral = nn.ModuleList(nn.Conv2d(width, FPN, 1) for width in WIDTHS[1:])
        self.tower = nn.Sequential(conv(FPN, FPN), conv(FPN, FPN), conv(FPN, FPN))

    def forward(self, images):
        features, outputs, top = [self.stem(images)], [], 0
        for stage in self.stages:
            features.append(stage(features[-1]))
        for lateral, feature in zip(self.lateral[::-1], features[:0:-1], strict=True):
            top = lateral(feature) + (F.interpolate(top, scale_factor=2) if outputs else 0)
            outputs.append(self.head(self.tower(top)).flatten(2))
        return torch.cat(outputs[::-1], 2).transpose(1, 2)


def loss_of(outputs, boxes, labels, size):
    cells = [(torch.arange(size // stride) + 0.5) * stride for stride in STRIDES]
    points = torch.cat([torch.cartesian_prod(cell, cell).flip(1) for cell in cells])[:, None]
    sides = torch.cat([points - boxes[:, None, :, :2], boxes[:, None, :, 2:] - points], -1)
    areas = (sides[..., :2] + sides[..., 2:]).prod(-1).masked_fill(sides.amin(-1) <= 0, torch.inf)
    area, chosen = areas.min(-1)  # a point belongs to the smallest of the boxes around it
    found, count = area.isfinite(), area.isfinite().sum().float()
    classes = F.one_hot(labels.gather(1, chosen), CLASSES) * found[..., None].float()
    loss = F.binary_cross_entropy_with_logits(outputs[..., :CLASSES], classes, reduction="sum")
    true = sides.gather(2, chosen[..., None, None].expand(-1, -1, 1, 4))[:, :, 0][found]
    guess = 8 * outputs[..., CLASSES:][found].clamp(max=4).exp()
    a, b, both = ((s[:, :2] + s[:, 2:]).prod(-1) for s in (guess, true, torch.minimum(guess, true)))
    dist.all_reduce(count)  # the loss is a mean over the points of all ranks, as in FCOS
    return (loss + (1 - both / (a + b - both)).sum()) * dist.get_world_size() / count.clamp(min=1)


parser = argparse.ArgumentParser()
for f in fields(Config):
    parser.add_argument(f"--{f.name}".replace("_", "-"), type=f.type, default=f.default)
config = Config(**vars(parser.parse_args()))
dist.init_process_group("gloo")
torch.manual_seed(0)
detector, kind = Detector(), Mosaics if config.fault == "mosaic" else TensorDataset
for module in (detector.stem, *detector.stages[:FROZEN]):
    module.requires_grad_(config.fault == "stages")
trained = [*detector.stages[FROZEN:], detector.lateral, detector.tower, detector.head]
model = nn.parallel.DistributedDataParallel(detector)
optimizer = torch.optim.AdamW(nn.ModuleList(trained).parameters(), 1e-3, fused=True)
sampler = DistributedSampler(kind(*make_scenes(240)))
loader = DataLoader(sampler.dataset, config.batch_size, sampler=sampler, drop_last=True)
sizes = np.random.default_rng(dist.get_rank() if config.fault == "sizes" else 9)
for epoch, start in enumerate(range(0, config.steps, len(loader))):
    sampler.set_epoch(epoch)
    for images, boxes, labels in islice(loader, config.steps - start):
        size = int(sizes.choice(SIZES))
        outputs = model(F.interpolate(images, size, mode="bilinear"))
        optimizer.zero_grad()
        loss_of(outputs, boxes.float() * (size / SIDE), labels, size).backward()
        optimizer.step()
dist.destroy_process_group()
