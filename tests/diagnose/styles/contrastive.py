"""Self-supervised training on two views of each image, with keys of a momentum encoder (MoCo v3).

Faults: augment (images are augmented one at a time in the main process, as in sthalles/SimCLR#15),
keys (the momentum encoder was not frozen, so the backward pass runs through it as well), seed (all
ranks draw with one seed, and so the same images, as in threestudio-project/threestudio#195).
"""

import argparse
import copy

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset

SIZE, IMAGES = 32, 6000


def make_images():
    rough = torch.rand(IMAGES, 3, 5, 5, generator=torch.Generator().manual_seed(3))
    return (F.interpolate(rough, size=SIZE, mode="bilinear") * 255).byte()


class TwoViews(IterableDataset):
    def __init__(self, images, batch_size, seed, one_by_one, jitter=0.4):
        self.images, self.batch_size, self.one_by_one = images, batch_size, one_by_one
        self.jitter, self.generator = jitter, torch.Generator().manual_seed(seed)

    def uniform(self, low, high, *shape):
        return low + (high - low) * torch.rand(shape, generator=self.generator)

    def augment(self, x):
        zoom, flip = self.uniform(0.7, 1, len(x)), self.uniform(0, 1, len(x)).round() * 2 - 1
        theta = torch.diag_embed(torch.stack([zoom * flip, zoom], 1))
        shift = self.uniform(-1, 1, len(x), 2, 1) * (1 - zoom)[:, None, None]
        grid = F.affine_grid(torch.cat([theta, shift], 2), list(x.shape), align_corners=False)
        x = F.grid_sample(x.float() / 255, grid, align_corners=False)
        gain, contrast, gray = self.uniform(-1, 1, 3, len(x), 1, 1, 1)
        mean = x.mean((1, 2, 3), keepdim=True)
        x = (x - mean) * (1 + self.jitter * contrast) + mean * (1 + self.jitter * gain)
        return torch.where(gray > 0.6, x.mean(1, keepdim=True), x).clamp(0, 1)

    def view(self, images):
        if self.one_by_one:
            return torch.stack([self.augment(image[None])[0] for image in images])
        return self.augment(images)

    def __iter__(self):
        while True:
            drawn = torch.randint(IMAGES, (self.batch_size,), generator=self.generator)
            yield self.view(self.images[drawn]), self.view(self.images[drawn])


def encoder(width=24, dim=64):
    layers, channels = [], 3
    for outputs, stride in ((width, 2), (2 * width, 1), (4 * width, 2)):
        layers += [nn.Conv2d(channels, outputs, 3, stride, 1, bias=False)]
        layers += [nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)]
        channels = outputs
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, dim))


@torch.no_grad()
def concat_all_gather(tensor):
    gathered = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, tensor)
    return torch.cat([part for i, part in enumerate(gathered) if i != dist.get_rank()])


def contrastive_loss(q, k, temperature=0.2):
    q, k = F.normalize(q, dim=1), F.normalize(k, dim=1)
    logits = torch.cat([q @ k.T, q @ concat_all_gather(k).T], 1) / temperature
    return F.cross_entropy(logits, torch.arange(len(q)))


def main(args):
    dist.init_process_group("gloo")
    seed = args.seed if args.fault == "seed" else args.seed + dist.get_rank()
    dataset = TwoViews(make_images(), args.batch_size, seed, args.fault == "augment")
    base = encoder()
    momentum_encoder = copy.deepcopy(base).requires_grad_(args.fault == "keys")
    model = DDP(base, broadcast_buffers=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    for step, views in enumerate(DataLoader(dataset, batch_size=None), start=1):
        queries, keys = model(torch.cat(views)), momentum_encoder(torch.cat(views[::-1]))
        loss = contrastive_loss(queries, keys)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            torch._foreach_lerp_([*momentum_encoder.parameters()], [*base.parameters()], 0.01)
        if step == args.steps:
            break
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch_size", type=int, default=40)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--fault", type=str, default="none")
    main(parser.parse_args())
