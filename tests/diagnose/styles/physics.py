"""A physics-informed DeepONet for u_t = (u_xx + u^2) / 100 + f, trained by an engine with events.

Faults: late (no_sync() is around the backward pass only, which is too late, so each micro-batch
exchanges its gradients, as in KellerJordan/modded-nanogpt#31), roots (the optimizer takes roots of
its factors anew in each step, although these rarely change, as in n-gao/pytorch-kfac#5), search
(hard points are sought among many before each epoch, as in the review of lululxvi/deepxde#260).
"""

import argparse
from contextlib import nullcontext
from itertools import islice, pairwise

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

SENSORS, MODES, WAVES, BRANCH, TRUNK, LATENT = 128, 12, 32, 576, 224, 128
CHUNKS, SOURCES = 5, 2  # micro-batches a step, of SOURCES each: `late` exchanges CHUNKS - 1 times
SIDE, REFRESH = 224, 20  # `roots` costs in proportion to the sides of matrices up to SIDE
FRESH, HARD, CANDIDATES, PERIOD = 14, 6, 12000, 50  # `search` costs in proportion to CANDIDATES


class DeepONet(nn.Module):
    def __init__(self):
        super().__init__()
        self.branch = self.mlp(SENSORS, BRANCH, BRANCH, BRANCH, LATENT)
        self.trunk = self.mlp(2 * WAVES, TRUNK, TRUNK, TRUNK, LATENT)
        self.waves = 3 * torch.randn(2, WAVES, generator=torch.Generator().manual_seed(1))

    def mlp(self, *sizes):
        layers = [layer for a, b in pairwise(sizes) for layer in (nn.Linear(a, b), nn.Tanh())]
        return nn.Sequential(*layers[:-1])

    def forward(self, sensors, points):
        angles, (x, t) = points @ self.waves, points.unbind(-1)
        trunk = self.trunk(torch.cat([angles.sin(), angles.cos()], dim=-1))
        return t * x * (1 - x) * torch.einsum("sl,spl->sp", self.branch(sensors), trunk)


def residual(model, source, points):
    modes = torch.pi * torch.arange(1, MODES + 1)
    sensors = source @ torch.sin(modes[:, None] * torch.linspace(0, 1, SENSORS))
    f = torch.einsum("sm,spm->sp", source, torch.sin(modes * points[..., :1]))
    u = model(sensors, points.requires_grad_())
    u_x, u_t = torch.autograd.grad(u.sum(), points, create_graph=True)[0].unbind(-1)
    u_xx = torch.autograd.grad(u_x.sum(), points, create_graph=True)[0][..., 0]
    return u_t - (u_xx + u.square()) / 100 - f


class KroneckerAdam(torch.optim.Adam):
    def __init__(self, params, keep_roots):
        super().__init__(params, lr=1e-3, fused=True)
        self.sides = [(p, d) for p in params for d in (0, 1) if p.ndim == 2 and p.shape[d] <= SIDE]
        self.keep_roots, self.steps, self.factors, self.roots = keep_roots, 0, {}, {}

    @torch.no_grad()
    def step(self):
        for i, (p, side) in enumerate(self.sides):
            rows = p.grad.transpose(0, side)
            if refresh := self.steps % REFRESH == 0:
                self.factors[i] = 0.5 * self.factors.get(i, 0) + rows @ rows.T
            if refresh or not self.keep_roots:
                values, vectors = torch.linalg.eigh(self.factors[i])
                self.roots[i] = vectors * values.clamp(min=1e-8) ** -0.25 @ vectors.T
            rows.copy_(self.roots[i] @ rows)
        self.steps += 1
        super().step()


class Engine:
    def __init__(self, process, **handlers):
        self.process, self.handlers = process, handlers

    def fire(self, event):
        for handler in self.handlers.get(event, ()):
            handler(self)

    def run(self, loader, max_iterations):
        for self.epoch, start in enumerate(range(0, max_iterations, len(loader))):
            self.fire("epoch_started")
            for batch in islice(loader, max_iterations - start):
                self.output = self.process(self, batch)


def main(steps, fault):
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    model = nn.parallel.DistributedDataParallel(DeepONet())
    optimizer = KroneckerAdam(list(model.parameters()), keep_roots=fault != "roots")

    def process(engine, batch):
        optimizer.zero_grad()
        for chunk, source in enumerate(batch.split(SOURCES), start=1):
            points = torch.cat([torch.rand(FRESH, 2), engine.hard]).repeat(SOURCES, 1, 1)
            with nullcontext() if fault == "late" or chunk == CHUNKS else model.no_sync():
                error = residual(model, source, points)
            with nullcontext() if chunk == CHUNKS else model.no_sync():
                (error.square().mean() / CHUNKS).backward()
        optimizer.step()
        return error.detach()

    def refine(engine):  # the points which are the hardest for one source go into all batches
        if engine.epoch % (1 if fault == "search" else PERIOD) == 0:
            points = torch.rand(1, CANDIDATES, 2)
            error = residual(model.module, sources[:1], points).abs()[0]
            engine.hard = points.detach()[0, error.topk(HARD).indices]

    trainer = Engine(process, epoch_started=[refine])
    sources = torch.randn(15 * CHUNKS * SOURCES, MODES) / torch.arange(1, MODES + 1)
    trainer.run(DataLoader(sources, CHUNKS * SOURCES, shuffle=True), steps)
    print(f"residual {trainer.output.square().mean():.4f} after {steps} steps")
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--fault", default="none")
    main(**vars(parser.parse_args()))
