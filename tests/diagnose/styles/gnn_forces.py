"""A graph network for the energies of a molecule's conformations and the forces on its atoms.

Faults: twice (energies and forces each have a pass of their own through the network, as in
cesmix-mit/InteratomicPotentials.jl#19), collect (garbage is collected after iterations, as in
huggingface/peft#2894), validate (validation comes after so many iterations rather than at the end,
a cost like that in isl-org/Open3D-ML#385).
"""

import argparse
import gc
from itertools import islice

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset, random_split

ATOMS, SPECIES, CUTOFF, FORCE_WEIGHT, TRAINING = 12, 4, 6.0, 10.0, 384
WIDTH, RADIAL, BLOCKS = 128, 32, 3  # the wider or deeper, the more milliseconds "twice" costs
COLLECT_EVERY = 4  # iterations; the larger, the less "collect" costs
HELD_OUT, VALIDATE_EVERY = 32, 4  # "validate" costs in proportion to their ratio


class Engine:
    def __init__(self, process, handlers):
        self.process, self.handlers, self.iteration, self.epoch = process, handlers, 0, 0

    def fire(self, event):
        for wanted, every, handler in self.handlers:
            if wanted == event and self.iteration % every == 0:
                handler(self)

    def run(self, loader, iterations):
        while self.iteration < iterations:
            self.fire("epoch_started")
            for batch in islice(loader, iterations - self.iteration):
                self.process(*batch)
                self.iteration += 1
                self.fire("iteration_completed")
            self.epoch += 1
        self.fire("completed")


def simulate(count):  # conformations about one geometry, held by springs that soften
    geometry = 1.5 * torch.randn(ATOMS, 3)
    positions = (geometry + 0.15 * torch.randn(count, ATOMS, 3)).requires_grad_()
    first, second = torch.triu_indices(ATOMS, ATOMS, 1)
    rest = (geometry[first] - geometry[second]).norm(dim=-1)
    stretch = (positions[:, first] - positions[:, second]).norm(dim=-1) - rest
    energies = (1 - torch.exp(-stretch)).square().sum(1)
    (slopes,) = torch.autograd.grad(energies.sum(), positions)
    return TensorDataset(positions.detach(), (energies - energies.mean()).detach(), -slopes)


def mlp(inputs, inner, outputs):
    return nn.Sequential(nn.Linear(inputs, inner), nn.SiLU(), nn.Linear(inner, outputs))


class Potential(nn.Module):
    def __init__(self, one_pass):
        super().__init__()
        self.one_pass, self.species = one_pass, nn.Embedding(SPECIES, WIDTH)
        self.sources = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(BLOCKS))
        self.filters = nn.ModuleList(mlp(RADIAL, WIDTH, WIDTH) for _ in range(BLOCKS))
        self.updates = nn.ModuleList(mlp(WIDTH, 4 * WIDTH, WIDTH) for _ in range(BLOCKS))
        self.head, self.kinds = mlp(WIDTH, WIDTH, 1), torch.arange(ATOMS) % SPECIES
        self.senders, self.receivers = (1 - torch.eye(ATOMS)).nonzero().T.contiguous()
        self.centres = torch.linspace(0.0, CUTOFF, RADIAL)

    def energy(self, positions):
        ends = [positions.index_select(1, i) for i in (self.senders, self.receivers)]
        lengths = torch.sub(*ends).norm(dim=-1, keepdim=True)
        radial = torch.exp(-8 * (lengths - self.centres).square())
        envelope = 0.5 * torch.cos(lengths.clamp(max=CUTOFF) * torch.pi / CUTOFF) + 0.5
        atoms = self.species(self.kinds.expand(len(positions), -1))
        for source, filters, update in zip(self.sources, self.filters, self.updates, strict=True):
            messages = source(atoms).index_select(1, self.senders) * filters(radial) * envelope
            atoms = atoms + update(torch.zeros_like(atoms).index_add(1, self.receivers, messages))
        return self.head(atoms).sum((1, 2))

    def forward(self, positions, energies, forces):
        positions = positions.detach().requires_grad_()
        energy = self.energy(positions)
        potential = (energy if self.one_pass else self.energy(positions)).sum()
        (slopes,) = torch.autograd.grad(potential, positions, create_graph=self.training)
        return F.mse_loss(energy, energies) / ATOMS + FORCE_WEIGHT * F.mse_loss(-slopes, forces)


def update(*batch):
    optimizer.zero_grad()
    model(*batch).backward()
    optimizer.step()


def validate(engine):
    if dist.get_rank() == 0:
        network = model.module.eval()
        error = sum(network(*b).item() * len(b[0]) for b in validation) / HELD_OUT
        print(f"iteration {engine.iteration}: error {error:.3f} on held-out conformations")
        network.train()


parser = argparse.ArgumentParser()
for flag, default in {"--steps": 60, "--batch-size": 8, "--fault": "none"}.items():
    parser.add_argument(flag, type=type(default), default=default)
args = parser.parse_args()
dist.init_process_group("gloo")
torch.manual_seed(8)
training, held_out = random_split(simulate(TRAINING + HELD_OUT), [TRAINING, HELD_OUT])
sampler, validation = DistributedSampler(training), DataLoader(held_out, args.batch_size)
loader = DataLoader(training, args.batch_size, sampler=sampler, drop_last=True)
model = nn.parallel.DistributedDataParallel(Potential(one_pass=args.fault != "twice"))
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, fused=True)
when = ("iteration_completed", VALIDATE_EVERY) if args.fault == "validate" else ("completed", 1)
handlers = [("epoch_started", 1, lambda e: sampler.set_epoch(e.epoch)), (*when, validate)]
if args.fault == "collect":  # lest graphs of graphs pile up
    handlers.append(("iteration_completed", COLLECT_EVERY, lambda engine: gc.collect()))
Engine(update, handlers).run(loader, args.steps)
dist.destroy_process_group()
