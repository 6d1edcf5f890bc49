"""A small segmentation with functions and closures, a writer of events and a monitor of norms.

Faults: events (rank 0 writes histograms of all weights to disk after each step, as in
wandb/wandb#3701), statistics (hooks on all modules keep statistics of activations, as in
wandb/wandb#2268), norms (rank 0 takes the norm of each weight in double precision before each
update).
"""

import argparse
import json
import os
import tempfile
from functools import partial

import torch
import torch.distributed as dist
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def unet(width):
    down = [nn.Conv2d(1, width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    middle = [nn.Conv2d(width, 2 * width, 3, padding=1), nn.ReLU()]
    middle += [nn.Conv2d(2 * width, 2 * width, 3, padding=1), nn.ReLU()]
    up = [nn.Upsample(scale_factor=2), nn.Conv2d(2 * width, width, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*down, *middle, *up, nn.Conv2d(width, 2, 1))


def write_events(file, model, step):
    for name, weight in model.named_parameters():
        counts = torch.histogram(weight.detach().flatten(), bins=60).hist
        file.write(json.dumps({"step": step, "name": name, "counts": counts.tolist()}) + "\n")
        file.flush()
        os.fsync(file.fileno())


def keep_statistics(kept, name, module, inputs, output):
    values = output.detach()
    quantiles = torch.quantile(values.flatten()[:200_000], torch.tensor([0.05, 0.5, 0.95]))
    kept[name] = (values.mean(), values.std(), values.abs().amax(), quantiles)


def norms(model):
    return {
        name: torch.linalg.matrix_norm(weight.detach().double().flatten(1), ord=2).item()
        for _ in range(4)
        for name, weight in model.named_parameters()
        if weight.dim() > 1
    }


def training_step(model, optimizer, before_update, images, masks):
    loss = nn.functional.cross_entropy(model(images), masks)
    loss.backward()
    before_update()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument("--width", type=int, default=24)
    parser.add_argument("--fault", default="none")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    first = dist.get_rank() == 0
    torch.manual_seed(4)
    images = torch.randn(1200, 1, 32, 32)
    data = TensorDataset(images, (images[:, 0] > 0).long())
    sampler = DistributedSampler(data)
    loader = DataLoader(data, args.batch_size, sampler=sampler, drop_last=True)
    net = unet(args.width)
    kept = {}
    if args.fault == "statistics":
        for name, module in net.named_modules():
            if not list(module.children()):
                module.register_forward_hook(partial(keep_statistics, kept, name))
    model = DDP(net)
    optimizer = optim.Adam(model.parameters(), lr=1e-3)
    before_update = partial(norms, net) if args.fault == "norms" and first else lambda: None
    step = 0
    with tempfile.NamedTemporaryFile("w") as events:
        while step < args.steps:
            sampler.set_epoch(step)
            for batch in loader:
                training_step(model, optimizer, before_update, *batch)
                step += 1
                if args.fault == "events" and first:
                    write_events(events, net, step)
                if step == args.steps:
                    break
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
