"""A small 3D network which classifies clips, trained by a runner that calls hooks.

Faults: shards (rank 1 has the folder of videos in a higher resolution, as in NVIDIA/DALI#3151),
browse (a hook writes clips of each batch to disk for viewing, as in open-mmlab/mmengine#853),
rebalance (a hook makes the balanced sampler anew before each epoch, which reads all clips for
their labels, as in galatolofederico/pytorch-balanced-batch#1).
"""

import argparse
from tempfile import TemporaryDirectory

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, WeightedRandomSampler

FRAMES, COUNTS = 8, [8, 60, 90, 130, 200, 270]


class ClipDataset:
    def __init__(self, size, seed):
        rng = np.random.default_rng(seed)
        self.labels = np.repeat(np.arange(len(COUNTS)), COUNTS)
        still = rng.integers(0, 200, (len(self.labels), 3, 1, size, size), dtype=np.uint8)
        drift = np.multiply.outer(self.labels, np.arange(FRAMES + 4)).astype(np.uint8)
        self.videos = still + drift[:, None, :, None, None]

    def __getitem__(self, i):
        start = int(torch.randint(4, ()))
        clip = torch.from_numpy(self.videos[i][:, start : start + FRAMES]).float()
        clip = F.interpolate(clip, scale_factor=0.5, mode="bilinear")
        return (clip - 110) / 60, int(self.labels[i])


def balanced_sampler(labels):
    counts = np.bincount(labels)
    return WeightedRandomSampler(1 / counts[labels], int(len(counts) * counts.min()))


class Hook:
    def before_epoch(self, runner): ...
    def before_step(self, runner): ...
    def after_step(self, runner): ...


class OptimizerHook(Hook):
    def after_step(self, runner):
        runner.optimizer.zero_grad()
        runner.loss.backward()
        runner.optimizer.step()


class ClipVisualizationHook(Hook):
    def before_step(self, runner):
        frames = F.interpolate(runner.batch[0] * 60 + 110, scale_factor=(1, 3, 3)).byte()
        np.savez_compressed(f"{runner.work_dir.name}/rank{dist.get_rank()}", frames.numpy())


class BalanceHook(Hook):
    def before_epoch(self, runner):
        runner.sampler = balanced_sampler([label for _, label in runner.dataset])


class Runner:
    def __init__(self, model, dataset, hooks):
        self.model, self.dataset, self.hooks = model, dataset, hooks
        self.sampler, self.work_dir = balanced_sampler(dataset.labels), TemporaryDirectory()
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def call_hook(self, name):
        for hook in self.hooks:
            getattr(hook, name)(self)

    def batches(self, batch_size):
        while True:
            self.call_hook("before_epoch")
            yield from DataLoader(self.dataset, batch_size, sampler=self.sampler)

    def run(self, max_steps, batch_size):
        for _, batch in zip(range(max_steps), self.batches(batch_size), strict=False):
            self.batch = batch
            self.call_hook("before_step")
            self.loss = F.cross_entropy(self.model(self.batch[0]), self.batch[1])
            self.call_hook("after_step")


def block(inputs, outputs, stride):
    conv = nn.Conv3d(inputs, outputs, 3, stride, 1, bias=False)
    return nn.Sequential(conv, nn.GroupNorm(4, outputs), nn.ReLU())


parser = argparse.ArgumentParser()
for flag, default in {"steps": 60, "batch_size": 8, "fault": "none"}.items():
    parser.add_argument(f"--{flag}", type=type(default), default=default)
args = parser.parse_args()
dist.init_process_group("gloo")
torch.manual_seed(rank := dist.get_rank())
folder = ClipDataset(80 if args.fault == "shards" and rank == 1 else 64, seed=rank)
body = block(3, 24, (1, 2, 2)), block(24, 48, 1), block(48, 64, 2), nn.AdaptiveAvgPool3d(1)
net = DistributedDataParallel(nn.Sequential(*body, nn.Flatten(), nn.Linear(64, len(COUNTS))))
extra = {"browse": [ClipVisualizationHook()], "rebalance": [BalanceHook()]}.get(args.fault, [])
Runner(net, folder, [OptimizerHook(), *extra]).run(args.steps, args.batch_size)
dist.destroy_process_group()
