"""A generator of small images and a discriminator, trained against each other in turns.

Faults: through (the discriminator's loss also fills and exchanges gradients of the generator, which
the next turn throws away, as in SKTBrain/DiscoGAN#2), samples (a grid of samples is drawn and saved
in each step, as in Lightning-AI/pytorch-lightning#4200), tidy (garbage is collected in every third
step, as in Nerogar/OneTrainer#1459).
"""

import argparse
import gc
import itertools
import tempfile

import torch
import torch.nn.functional as F
from PIL import Image
from torch import distributed as dist
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler


def sample_data(loader):
    for epoch in itertools.count():
        loader.sampler.set_epoch(epoch)
        yield from loader


class Generator(nn.Module):
    def __init__(self, style_dim, channel=16):
        super().__init__()
        self.channel, self.input = channel, nn.Linear(style_dim, 8 * channel * 16)
        widths = [8 * channel, 4 * channel, 2 * channel, channel]
        self.convs = nn.ModuleList(nn.Conv2d(a, b, 3, 1, 1) for a, b in itertools.pairwise(widths))
        self.to_rgb = nn.Conv2d(channel, 3, 3, 1, 1)

    def forward(self, z):
        out = self.input(z).view(-1, 8 * self.channel, 4, 4)
        for conv in self.convs:
            out = F.leaky_relu(conv(F.interpolate(out, scale_factor=2)), 0.2)
        return self.to_rgb(out).tanh()


class Discriminator(nn.Sequential):
    def __init__(self, channel=16):
        layers, width = [nn.Conv2d(3, channel, 3, 1, 1), nn.LeakyReLU(0.2)], channel
        for _ in range(3):
            layers += [nn.Conv2d(width, 2 * width, 4, 2, 1), nn.LeakyReLU(0.2)]
            width *= 2
        super().__init__(*layers, nn.Flatten(), nn.Linear(16 * width, 1))


def save_image(images, path, nrow):
    rows = ((images + 1) * 127.5).byte().unflatten(0, (-1, nrow))
    Image.fromarray(rows.permute(0, 3, 1, 4, 2).flatten(2, 3).flatten(0, 1).numpy()).save(path)


def train(args, loader, generator, discriminator, g_optim, d_optim, folder):
    sample_z = torch.randn(args.n_sample, args.latent)
    for i, real_img in zip(range(args.steps), sample_data(loader), strict=False):
        discriminator.requires_grad_(True)
        draw = generator if args.fault == "through" else torch.no_grad()(generator.module)
        fake_img = draw(torch.randn(args.batch_size, args.latent))
        real_pred, fake_pred = discriminator(torch.cat([real_img, fake_img])).chunk(2)
        d_optim.zero_grad()
        (F.softplus(-real_pred) + F.softplus(fake_pred)).mean().backward()
        d_optim.step()

        discriminator.requires_grad_(False)
        fake_img = generator(torch.randn(args.batch_size, args.latent))
        g_optim.zero_grad()
        F.softplus(-discriminator.module(fake_img)).mean().backward()
        g_optim.step()
        if args.fault == "tidy" and i % 3 == 0:
            gc.collect()

        if dist.get_rank() == 0 and (i + 1) % args.sample_every == 0:
            with torch.no_grad():
                save_image(generator.module(sample_z), f"{folder}/{i:06d}.png", nrow=8)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch_size", type=int, default=16)
    parser.add_argument("--fault", type=str, default="none")
    args = parser.parse_args()
    args.latent, args.n_sample = 128, 48
    args.sample_every = 1 if args.fault == "samples" else 500
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    shapes = F.interpolate(torch.rand(2000, 3, 4, 4), size=32, mode="bilinear") * 2 - 1
    sampler = DistributedSampler(shapes)
    loader = DataLoader(shapes, args.batch_size, sampler=sampler, drop_last=True)
    generator = DistributedDataParallel(Generator(args.latent))
    discriminator = DistributedDataParallel(Discriminator())
    g_optim = optim.Adam(generator.parameters(), lr=2e-4, betas=(0.5, 0.99))
    d_optim = optim.Adam(discriminator.parameters(), lr=2e-4, betas=(0.5, 0.99))
    torch.manual_seed(dist.get_rank())
    with tempfile.TemporaryDirectory() as folder:
        train(args, loader, generator, discriminator, g_optim, d_optim, folder)
    dist.destroy_process_group()
