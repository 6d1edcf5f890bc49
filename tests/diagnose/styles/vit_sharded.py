"""A vision transformer fine-tuned under FSDP2 at several resolutions, with its lower half frozen.

Faults: scales (each rank draws its own order of resolutions, as before m2lines/Samudra#717), frozen
(lower blocks are left out of the optimizer, but their parameters still require gradients, as in
JDAI-CV/fast-reid#178), probe (hooks that gather covariances of layers' inputs before the training
stay on all through it, as in the review of huggingface/peft#2231).
"""

import argparse
import random
from itertools import islice

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

CLASSES, SIDE, PATCH, DIM, HEADS, DEPTH = 12, 128, 8, 128, 4, 4
SIZES = (16, 32, 128)  # the further apart, the more one rank waits for the other with "scales"
FROZEN = ("patches.", "position", "blocks.0.", "blocks.1.")  # the more, the more "frozen" costs
PROBE_STRIDE = 1  # every n-th token enters the covariances: the cost of "probe"


def stripes(count):
    rng = np.random.default_rng(7)
    labels, (y, x) = rng.integers(CLASSES, size=count), np.mgrid[:SIDE, :SIDE]
    angles = labels[:, None, None] * np.pi / CLASSES
    waves = 40 * np.sin((np.cos(angles) * x + np.sin(angles) * y) / 3)
    pixels = (waves[:, None] + rng.normal(128, 25, (count, 3, SIDE, SIDE))).clip(0, 255)
    return TensorDataset(torch.from_numpy(pixels.astype(np.uint8)), torch.from_numpy(labels))


class VisionTransformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.patches = nn.Linear(3 * PATCH * PATCH, DIM)
        self.position = nn.Parameter(0.02 * torch.randn(DIM, SIDE // PATCH, SIDE // PATCH))
        options = {"dropout": 0.0, "activation": "gelu", "batch_first": True, "norm_first": True}
        layers = [nn.TransformerEncoderLayer(DIM, HEADS, 4 * DIM, **options) for _ in range(DEPTH)]
        self.blocks, self.norm = nn.ModuleList(layers), nn.LayerNorm(DIM)
        self.head = nn.Linear(DIM, CLASSES)

    def forward(self, images):
        x = self.patches(F.unfold(images, PATCH, stride=PATCH).transpose(1, 2))
        grid = images.shape[2] // PATCH
        position = F.interpolate(self.position[None], size=(grid, grid), mode="bilinear")
        x = x + position.flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))


class CovarianceProbe:  # in how many dimensions do inputs vary? It helps to choose what to freeze
    def on_build(self, trainer):
        self.sums, layers = {}, [m for m in trainer.model.modules() if isinstance(m, nn.Linear)]
        handles = [layer.register_forward_hook(self.gather) for layer in layers]
        with torch.no_grad():
            trainer.model(next(iter(trainer.loader))[0] / 64.0 - 2)
        self.ranks = [s.trace() ** 2 / s.square().sum() for s in self.sums.values()]
        for handle in handles if trainer.fault != "probe" else []:
            handle.remove()

    @torch.no_grad()
    def gather(self, layer, inputs, output):
        tokens = inputs[0].flatten(0, -2)[::PROBE_STRIDE]
        self.sums[layer] = self.sums.get(layer, 0) + tokens.T @ tokens


class MultiScale:
    def on_epoch(self, trainer):
        self.sizes = [SIZES[i % len(SIZES)] for i in range(len(trainer.loader))]
        seed = 1000 * dist.get_rank() if trainer.fault == "scales" else 0
        random.Random(seed + trainer.sampler.epoch).shuffle(self.sizes)

    def on_batch(self, trainer):
        trainer.images = F.interpolate(trainer.images, size=(self.sizes.pop(),) * 2, mode="area")


class Trainer:
    def __init__(self, args, callbacks):
        self.callbacks, self.fault, self.steps = callbacks, args.fault, args.steps
        torch.manual_seed(3)
        data, self.model = stripes(180), VisionTransformer()
        self.sampler = DistributedSampler(data)
        self.loader = DataLoader(data, args.batch_size, sampler=self.sampler, drop_last=True)
        self.call("on_build")
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(self.fault == "frozen" or not name.startswith(FROZEN))
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for module in [*self.model.blocks, self.model]:
            fully_shard(module, mesh=mesh, reshard_after_forward=False)
        upper = [p for name, p in self.model.named_parameters() if not name.startswith(FROZEN)]
        self.optimizer = torch.optim.AdamW(upper, lr=5e-4, fused=True)

    def call(self, event):
        for callback in self.callbacks:
            getattr(callback, event, lambda trainer: None)(self)

    def fit(self):
        for epoch, start in enumerate(range(0, self.steps, len(self.loader))):
            self.sampler.set_epoch(epoch)
            self.call("on_epoch")
            for images, labels in islice(self.loader, self.steps - start):
                self.images = images / 64.0 - 2
                self.call("on_batch")
                F.cross_entropy(self.model(self.images), labels).backward()
                self.optimizer.step()
                self.optimizer.zero_grad()


parser = argparse.ArgumentParser()
for flag, default in {"steps": 60, "batch_size": 6, "fault": "none"}.items():
    parser.add_argument(f"--{flag}", type=type(default), default=default)
dist.init_process_group("gloo")
Trainer(parser.parse_args(), [CovarianceProbe(), MultiScale()]).fit()
dist.destroy_process_group()
