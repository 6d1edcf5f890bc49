"""A U-Net that labels tissues in slices of synthetic scans, with an atlas of where tissues lie.

Faults: gzipped (a slice is read from a compressed scan, as in kaiko-ai/eva#705), atlas (the atlas
never changes and yet is broadcast in each forward pass, as in ecmwf/anemoi-core#1278).
"""

import argparse
import gzip
import tempfile
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler


@dataclass
class Config:
    steps: int
    batch_size: int
    fault: str
    shape: tuple[int, int, int, int] = (3, 144, 128, 128)


class SliceDataset(Dataset):
    def __init__(self, cfg, folder, atlas):
        self.cfg, self.folder, rng = cfg, folder, np.random.default_rng(7)
        self.open = gzip.open if cfg.fault == "gzipped" else open
        for scan in range(cfg.shape[0]):
            mask = np.roll(atlas.argmax(1).numpy(), rng.integers(-9, 10, 2), (1, 2))
            pair = np.stack([60 * mask + rng.integers(-64, 64, mask.shape), mask], 1)
            with self.open(f"{folder}/{scan:03d}", "wb") as file:
                file.write(pair.astype(np.int16).tobytes())

    def __len__(self):
        return self.cfg.shape[0] * self.cfg.shape[1]

    def __getitem__(self, index):
        (scan, z), shape = divmod(index, self.cfg.shape[1]), (2, *self.cfg.shape[2:])
        with self.open(f"{self.folder}/{scan:03d}", "rb") as file:
            file.seek(z * 2 * np.prod(shape))
            image, mask = np.frombuffer(file.read(2 * np.prod(shape)), np.int16).reshape(shape)
        return image[None].astype(np.float32) / 100, z, mask.astype(int)


def block(inputs, width):
    convs = [nn.Conv2d(n, width, 3, 1, 1) for n in (inputs, width)]
    return nn.Sequential(convs[0], nn.GroupNorm(4, width), nn.ReLU(), convs[1], nn.ReLU())


class UNet(nn.Module):
    def __init__(self, atlas, w=8):
        super().__init__()
        self.down = nn.ModuleList([block(5, w), block(w, 2 * w), block(2 * w, 4 * w)])
        self.up = nn.ModuleList([block(6 * w, 2 * w), block(3 * w, w)])
        self.head = nn.Conv2d(w, 4, 1)
        self.register_buffer("atlas", atlas)

    def forward(self, image, z):
        high = self.down[0](torch.cat([image, self.atlas[z]], 1))
        middle = self.down[1](F.max_pool2d(high, 2))
        low = F.interpolate(self.down[2](F.max_pool2d(middle, 2)), scale_factor=2)
        low = F.interpolate(self.up[0](torch.cat([low, middle], 1)), scale_factor=2)
        return self.head(self.up[1](torch.cat([low, high], 1)))


class DiceMeter:
    @torch.no_grad()
    def update(self, logits, mask):
        predicted, true = logits.softmax(1), F.one_hot(mask, 4).movedim(3, 1)
        self.dice = 2 * (predicted * true).mean() / (predicted + true).mean()


def train_one_epoch(model, loader, optimizer, meter, steps):
    for _, (image, z, mask) in zip(range(steps), loader, strict=False):
        logits = model(image, z)
        optimizer.zero_grad()
        F.cross_entropy(logits, mask).backward()
        optimizer.step()
        meter.update(logits, mask)


parser = argparse.ArgumentParser()
for name, default in {"steps": 60, "batch_size": 2, "fault": "none"}.items():
    parser.add_argument(f"--{name}", type=type(default), default=default)
cfg = Config(**vars(parser.parse_args()))
dist.init_process_group("gloo")
rough = 9 * torch.rand(1, 4, 6, 8, 8, generator=torch.Generator().manual_seed(7))
atlas = F.interpolate(rough, cfg.shape[1:])[0].transpose(0, 1).softmax(1).contiguous()
model = nn.parallel.DistributedDataParallel(UNet(atlas), forward_sync_buffers=cfg.fault == "atlas")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
meter = DiceMeter()
with tempfile.TemporaryDirectory() as folder:
    sampler = DistributedSampler(SliceDataset(cfg, folder, atlas))
    loader = DataLoader(sampler.dataset, cfg.batch_size, sampler=sampler, drop_last=True)
    for done in range(0, cfg.steps, len(loader)):
        sampler.set_epoch(done)
        train_one_epoch(model, loader, optimizer, meter, cfg.steps - done)
dist.destroy_process_group()
