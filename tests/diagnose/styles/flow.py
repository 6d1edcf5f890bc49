"""A rectified flow on small images with running averages of its weights, in an engine with events.

Faults: averages (running averages are taken in a loop over parameters, out of place and in double
precision, as before huggingface/diffusers#7685), samples (the first rank draws samples after each
of the short epochs, as in Nerogar/OneTrainer#230), checkpoints (activations are computed again in
the backward pass though there is memory for them, as before Nerogar/OneTrainer#40).
"""

import argparse
from collections import defaultdict
from functools import partial
from itertools import islice, pairwise

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, DistributedSampler

SIDE, TIME, STEPS_PER_EPOCH = 16, 64, 8
# Decays of the running averages: the more, the more "averages" costs.
DECAYS = (0.9, 0.98, 0.99, 0.995, 0.999, 0.9999)
SAMPLED, EULER_STEPS = 8, 12  # images and steps of the solver: the cost of "samples"
WIDTHS = (32, 64, 96, 128)  # the wider, the more "checkpoints" and "averages" cost


class Block(nn.Module):
    def __init__(self, inputs, width):
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(8, inputs), nn.Conv2d(inputs, width, 3, padding=1)
        self.norm2, self.conv2 = nn.GroupNorm(8, width), nn.Conv2d(width, width, 3, padding=1)
        self.time, self.skip = nn.Linear(TIME, width), nn.Conv2d(inputs, width, 1)

    def forward(self, x, time):
        h = self.conv1(F.silu(self.norm1(x))) + self.time(time)[..., None, None]
        return self.skip(x) + self.conv2(F.silu(self.norm2(h)))


class UNet(nn.Module):
    def __init__(self, checkpoints):
        super().__init__()
        pairs = list(pairwise(WIDTHS))
        self.run = partial(checkpoint, use_reentrant=False) if checkpoints else nn.Module.__call__
        self.enter, self.head = nn.Conv2d(3, WIDTHS[0], 1), nn.Conv2d(WIDTHS[0], 3, 3, padding=1)
        self.down = nn.ModuleList(Block(*pair) for pair in [WIDTHS[:1] * 2, *pairs])
        self.middle = Block(WIDTHS[-1], WIDTHS[-1])
        self.up = nn.ModuleList(Block(a + b, a) for a, b in reversed(pairs))

    def forward(self, x, t):
        angles, x, skips = t[:, None] * torch.logspace(0, 3, TIME // 2), self.enter(x), []
        time = torch.cat([angles.sin(), angles.cos()], 1)
        for block in self.down:
            x = self.run(block, F.avg_pool2d(x, 2) if skips else x, time)
            skips.append(x)
        x = self.run(self.middle, x, time)
        for block, skip in zip(self.up, skips[-2::-1], strict=True):
            x = self.run(block, torch.cat([F.interpolate(x, scale_factor=2), skip], 1), time)
        return self.head(F.silu(x))


class Engine(defaultdict):  # lists of handlers by events
    def fire(self, event, *payload):
        for handler in self[event]:
            handler(*payload)

    def run(self, loader, steps):
        for epoch, start in enumerate(range(0, steps, len(loader))):
            loader.sampler.set_epoch(epoch)
            for images in islice(loader, steps - start):
                self.fire("step", images)
            self.fire("epoch")
        self.fire("end")


def main(steps, batch_size, fault):
    torch.manual_seed(8)
    count = STEPS_PER_EPOCH * batch_size * dist.get_world_size()
    data = F.interpolate(torch.rand(count, 3, 2, 2), SIDE, mode="bilinear")
    unet, dtype = UNet(fault == "checkpoints"), torch.double if fault == "averages" else torch.float
    names, weights = zip(*unet.named_parameters(), strict=True)
    averages = {decay: [w.detach().to(dtype, copy=True) for w in weights] for decay in DECAYS}
    model = nn.parallel.DistributedDataParallel(unet)
    optimizer = torch.optim.Adam(weights, lr=5e-4, fused=True)
    torch.manual_seed(100 + dist.get_rank())

    def process(images):
        noise, t = torch.randn_like(images), torch.rand(len(images))
        optimizer.zero_grad()
        flow = model(torch.lerp(images, noise, t[:, None, None, None]), t)
        F.mse_loss(flow, noise - images).backward()
        optimizer.step()

    @torch.no_grad()
    def average(images):
        for decay, kept in averages.items():
            if fault == "averages":
                kept[:] = [
                    decay * k + (1 - decay) * w.double() for k, w in zip(kept, weights, strict=True)
                ]
            else:
                torch._foreach_lerp_(kept, weights, 1 - decay)

    @torch.no_grad()
    def sample():
        state = dict(zip(names, [kept.float() for kept in averages[DECAYS[0]]], strict=True))
        x = torch.randn(SAMPLED, 3, SIDE, SIDE)
        for n in range(EULER_STEPS if dist.get_rank() == 0 else 0, 0, -1):
            t = torch.full((SAMPLED,), n / EULER_STEPS)
            x = x - functional_call(unet, state, (x, t)) / EULER_STEPS

    engine = Engine(list, step=[process, average])
    engine["epoch" if fault == "samples" else "end"].append(sample)
    engine.run(DataLoader(data, batch_size, sampler=DistributedSampler(data)), steps)


parser = argparse.ArgumentParser()
for flag, default in {"steps": 60, "batch-size": 9, "fault": "none"}.items():
    parser.add_argument(f"--{flag}", type=type(default), default=default)
dist.init_process_group("gloo")
main(**vars(parser.parse_args()))
dist.destroy_process_group()
