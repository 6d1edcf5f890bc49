"""A Fourier neural operator which learns to solve Poisson's equation on a periodic grid.

Faults: collect (garbage is collected whenever a batch is drawn, as in NVIDIA/Megatron-Energon#66),
broadcast (rank 0 sends weights and moments to all after each update, lest the ranks drift).
"""

import argparse
import gc

import numpy as np
import torch
import torch.distributed as dist
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel

N, N_TRAIN, WIDTH, MODES, LAYERS = 48, 400, 24, 10, 4


def random_fields(rng, n, tau=3.0):
    """Sources f from a Gaussian random field, and the solutions u of -lap(u) = f."""
    k2 = np.add.outer(*[np.fft.fftfreq(N, 1 / N) ** 2] * 2)
    f_hat = np.fft.fft2(rng.standard_normal((n, N, N))) * (k2 > 0) * tau / (k2 + tau**2)
    f, u = np.fft.ifft2(f_hat).real, np.fft.ifft2(f_hat / np.maximum(k2, 1.0)).real
    return (f / f.std()).astype("float32"), (u / f.std()).astype("float32")


class SpectralConv(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH, WIDTH, 2 * MODES, MODES, 2) / WIDTH**2)

    def forward(self, x):
        m, x_hat, weight = MODES, torch.fft.rfft2(x), torch.view_as_complex(self.weight)
        low = torch.cat([x_hat[:, :, :m, :m], x_hat[:, :, -m:, :m]], dim=2)
        low, out = torch.einsum("bixy,ioxy->boxy", low, weight), torch.zeros_like(x_hat)
        out[:, :, :m, :m], out[:, :, -m:, :m] = low[:, :, :m], low[:, :, m:]
        return torch.fft.irfft2(out, s=x.shape[-2:])


class FNO(nn.Module):
    def __init__(self, width, layers):
        super().__init__()
        self.lift = nn.Conv2d(1, width, 1)
        self.spectral = nn.ModuleList(SpectralConv() for _ in range(layers))
        self.local = nn.ModuleList(nn.Conv2d(width, width, 1) for _ in range(layers))
        self.project = nn.Sequential(nn.Conv2d(width, 64, 1), nn.GELU(), nn.Conv2d(64, 1, 1))

    def forward(self, f):
        h = self.lift(f[:, None])
        for spectral, local in zip(self.spectral, self.local, strict=True):
            h = nn.functional.gelu(spectral(h) + local(h))
        return self.project(h)[:, 0]


def loss_fn(u, f, target):
    """Relative L2 error, and the residual of the equation in finite differences."""
    error = (u - target).flatten(1).norm(dim=1) / target.flatten(1).norm(dim=1)
    lap = sum(u.roll(s, d) for s in (1, -1) for d in (1, 2)) - 4 * u
    return error.mean() + 0.1 * (lap * (N / 2 / np.pi) ** 2 + f).square().mean()


def main(steps, batch_size, fault):
    dist.init_process_group("gloo")
    f, u = random_fields(np.random.default_rng(0), N_TRAIN)
    rng = np.random.default_rng(1 + dist.get_rank())
    model = DistributedDataParallel(FNO(WIDTH, LAYERS))
    optimizer = optim.Adam(model.parameters(), lr=2e-3)
    scheduler = optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        rows = rng.choice(N_TRAIN, batch_size, replace=False)
        f_batch, u_batch = torch.from_numpy(f[rows]), torch.from_numpy(u[rows])
        if fault == "collect":
            gc.collect()
        optimizer.zero_grad()
        loss_fn(model(f_batch), f_batch, u_batch).backward()
        optimizer.step()
        scheduler.step()
        if fault == "broadcast":
            for p in model.parameters():
                for tensor in (p.data, *optimizer.state[p].values()):
                    dist.broadcast(tensor, src=0)
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument("--fault", default="none")
    main(**vars(parser.parse_args()))
