"""A diffusion model of small images, a U-Net trained to denoise, with an average of its weights.

Faults: samples (rank 0 draws samples every few steps, as in huggingface/finetrainers#114), average
(it is updated tensor by tensor, each looked up anew, as in deepmodeling/deepmd-kit#5818), warps
(images are warped one by one as they are loaded, as in HuiZhang0812/DiffusionAD#34).
"""

import argparse
import copy
import itertools

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler


def collate_warped(images, scale=12):
    rows = []
    for image in images:
        fine = F.interpolate(image[None], scale_factor=scale, mode="bicubic")
        shifts = F.interpolate(0.1 * torch.randn(1, 2, 6, 6), size=fine.shape[2:], mode="bicubic")
        grid = F.affine_grid(torch.eye(2, 3)[None], fine.shape, align_corners=False)
        fine = F.grid_sample(fine, grid + shifts.permute(0, 2, 3, 1), align_corners=False)
        rows.append(F.avg_pool2d(fine, scale)[0])
    return torch.stack(rows)


def block(fan_in, width):
    widths = itertools.pairwise([fan_in, width, width, width])
    convs = [(nn.Conv2d(*pair, 3, padding=1), nn.GroupNorm(8, width), nn.SiLU()) for pair in widths]
    return nn.Sequential(*itertools.chain(*convs))


class UNet(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.down = nn.ModuleList([block(4, width), block(width, 2 * width)])
        self.middle = block(2 * width, 2 * width)
        self.up = nn.ModuleList([block(4 * width, 2 * width), block(3 * width, width)])
        self.out = nn.Conv2d(width, 3, 3, padding=1)

    def forward(self, noisy, sigma):
        x, skips = torch.cat([noisy, (sigma.log() / 4).expand_as(noisy[:, :1])], 1), []
        for down in self.down:
            skips.append(down(x))
            x = F.avg_pool2d(skips[-1], 2)
        x = self.middle(x)
        for up in self.up:
            x = up(torch.cat([F.interpolate(x, scale_factor=2), skips.pop()], 1))
        return noisy + sigma * self.out(x)


@torch.no_grad()
def update_average(average, net, fault, decay=0.995):
    if fault == "average":
        for name in net.state_dict():
            average.state_dict()[name].lerp_(net.state_dict()[name], 1 - decay)
    else:
        torch._foreach_lerp_([*average.parameters()], [*net.parameters()], 1 - decay)


@torch.no_grad()
def draw(net, count):
    sigmas = torch.logspace(1, -2, 10)
    x = torch.randn(count, 3, 16, 16) * sigmas[0]
    for sigma, following in itertools.pairwise(sigmas):
        x += (net(x, sigma.expand(count, 1, 1, 1)) - x) * (1 - following / sigma)
    return ((x.clamp(-1, 1) + 1) * 127.5).byte()


def main(steps, batch_size, fault):
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    net = nn.parallel.DistributedDataParallel(UNet(width=32))
    average = copy.deepcopy(net.module).requires_grad_(False)
    optimizer = torch.optim.Adam(net.parameters(), lr=4e-4)
    coarse = torch.randn(560, 3, 4, 4, generator=torch.Generator().manual_seed(3))
    images = F.interpolate(coarse, size=16, mode="bicubic").tanh()
    collate = collate_warped if fault == "warps" else torch.stack
    loader = DataLoader(images, batch_size, sampler=DistributedSampler(images), collate_fn=collate)
    batches = itertools.chain.from_iterable(itertools.repeat(loader))
    for step, clean in zip(itertools.count(1), batches, strict=False):
        loader.sampler.set_epoch(step)
        sigma = (torch.randn(len(clean), 1, 1, 1) * 1.2 - 1.2).exp()
        denoised = net(clean + sigma * torch.randn_like(clean), sigma)
        loss = ((denoised - clean).square() * (1 + sigma**-2)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        update_average(average, net.module, fault)
        if fault == "samples" and dist.get_rank() == 0 and step % 4 == 0:
            draw(average, batch_size)
        if step >= steps:
            break
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument("--fault", type=str, default="none")
    main(**vars(parser.parse_args()))
