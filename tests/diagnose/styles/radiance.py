"""A radiance field of a scene of spheres, fitted to random rays which each rank draws for itself.

Faults: anomaly (autograd's anomaly detection was left on, as in yenchenlin/nerf-pytorch#42), render
(rank 0 renders a test view every five steps, for which the other rank waits), depth (rank 0 alone
adds the rays of the scene's key points to its batch, and always takes longer).
"""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=60, help="number of iterations")
parser.add_argument("--batch_size", type=int, default=320, help="random rays per rank and step")
parser.add_argument("--fault", type=str, default="none")


class NeRF(nn.Module):
    def __init__(self, depth=4, width=128, freqs=6):
        super().__init__()
        self.freqs = freqs
        sizes = [3 + 6 * freqs] + [width] * depth
        self.pts_linears = nn.ModuleList(map(nn.Linear, sizes[:-1], sizes[1:]))
        self.output_linear = nn.Linear(width, 4)

    def forward(self, pts):
        waves = (pts[..., None] * 2.0 ** torch.arange(self.freqs)).flatten(-2)
        h = torch.cat([pts, waves.sin(), waves.cos()], -1)
        for linear in self.pts_linears:
            h = F.relu(linear(h))
        rgb, sigma = self.output_linear(h).split([3, 1], -1)
        return rgb.sigmoid(), sigma.squeeze(-1)


def train(args):
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    near, far, n_samples, H, W, focal, n_views = 2.0, 6.0, 32, 40, 40, 44.0, 24
    i_img = 5 if args.fault == "render" else 5000
    torch.autograd.set_detect_anomaly(args.fault == "anomaly")
    centers, radii, colors = torch.rand(6, 3) * 2 - 1, torch.rand(6) * 0.3 + 0.3, torch.rand(6, 3)

    def get_rays(theta):
        j, i = torch.meshgrid(torch.arange(H), torch.arange(W), indexing="ij")
        dirs = torch.stack([(i - W / 2) / focal, (H / 2 - j) / focal, -torch.ones(H, W)], -1)
        c, s = theta.cos(), theta.sin()
        pose = torch.stack([c, 0 * c, s, 0 * c, 1 + 0 * c, 0 * c, -s, 0 * c, c]).view(3, 3)
        rays_d = F.normalize(dirs.view(-1, 3) @ pose.T, dim=-1)
        return (pose @ torch.tensor([0.0, 0.0, 4.0])).expand_as(rays_d), rays_d

    def shoot(rays_o, rays_d):
        offset = rays_o[:, None] - centers
        b = (offset * rays_d[:, None]).sum(-1)
        square = b**2 - offset.square().sum(-1) + radii**2
        depth = torch.where(square > 0, -b - square.clamp(min=0).sqrt(), far)
        first = depth.min(-1)
        return torch.where(first.values[:, None] < far, colors[first.indices], 1.0), first.values

    def render_rays(network, rays_o, rays_d):
        bins = torch.arange(n_samples) + torch.rand(len(rays_o), n_samples)
        z = near + (far - near) * bins / n_samples
        rgb, sigma = network(rays_o[:, None] + z[..., None] * rays_d[:, None])
        gaps = torch.cat([z.diff(dim=-1), torch.full_like(z[:, :1], 1e3)], -1)
        alpha = 1 - torch.exp(-F.relu(sigma) * gaps)
        clear = torch.cumprod(torch.cat([torch.ones_like(z[:, :1]), 1 - alpha + 1e-10], -1), -1)
        weights = alpha * clear[:, :-1]
        return (weights[..., None] * rgb).sum(-2) + 1 - weights.sum(-1, keepdim=True)

    @torch.no_grad()
    def render_view(network, theta):
        ro, rd = (r.split(args.batch_size) for r in get_rays(theta))
        rgb = torch.cat([render_rays(network, o, d) for o, d in zip(ro, rd, strict=True)])
        return (255 * rgb.view(H, W, 3)).byte()

    views = [get_rays(theta) for theta in torch.linspace(0, 6.0, n_views)]
    rays_o, rays_d = (torch.cat(part) for part in zip(*views, strict=True))
    target, depth = shoot(rays_o, rays_d)
    key_points = (depth < far).nonzero()[:, 0]
    model = DistributedDataParallel(NeRF())
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-4)
    torch.manual_seed(1 + rank)
    for i in range(1, args.steps + 1):
        select = torch.randint(len(rays_o), (args.batch_size,))
        if args.fault == "depth" and rank == 0:
            drawn = torch.randint(len(key_points), (args.batch_size // 2,))
            select = torch.cat([select, key_points[drawn]])
        loss = F.mse_loss(render_rays(model, rays_o[select], rays_d[select]), target[select])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0 and i % 50 == 0:
            print(f"iter {i} psnr {-10 * loss.log10():.2f}")
        if rank == 0 and i % i_img == 0:
            torch.save(render_view(model.module, torch.tensor(6.1)), os.devnull)
    dist.destroy_process_group()


if __name__ == "__main__":
    train(parser.parse_args())
