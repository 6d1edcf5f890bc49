"""A message-passing network on random molecules, which are joined into one large graph per batch.

Faults: alike (a batch holds molecules of like size, so the ranks get unequal work in each step, as
in facebookresearch/fairchem#267), unsharded (each rank goes through all batches of an epoch, as in
clovaai/voxceleb_trainer#98), buckets (gradients are exchanged one by one, in many small
buckets, as before facebookresearch/fairscale#327).
"""

import argparse
from itertools import islice

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Sampler


def make_molecules(count, rng):
    molecules = []
    for size in torch.randint(8, 72, (count,), generator=rng).tolist():
        atoms = torch.randint(20, (size,), generator=rng)
        bonds = torch.randint(size, (2, 4 * size), generator=rng)
        molecules.append((atoms, bonds, atoms.float().mean() / 10 - 1))
    return molecules


def join(molecules):
    atoms, bonds, energies = zip(*molecules, strict=True)
    sizes = torch.tensor([len(each) for each in atoms])
    owner = torch.arange(len(sizes)).repeat_interleave(sizes)
    bonds = torch.cat([b + s for b, s in zip(bonds, sizes.cumsum(0) - sizes, strict=True)], 1)
    return torch.cat(atoms), bonds, owner, torch.stack(energies)


class BatchSampler(Sampler):
    def __init__(self, molecules, batch_size, share, alike):
        self.order = torch.tensor([len(atoms) for atoms, *_ in molecules]).argsort()
        self.batch_size, self.share, self.alike, self.epoch = batch_size, share, alike, 0

    def __iter__(self):
        rng = torch.Generator().manual_seed(self.epoch)
        if self.alike:
            batches = self.order.view(-1, self.batch_size)
        else:
            classes = self.order.view(self.batch_size, -1)
            batches = torch.stack([c[torch.randperm(len(c), generator=rng)] for c in classes], 1)
        batches = batches[torch.randperm(len(batches), generator=rng)]
        yield from batches[self.share].tolist()


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.message = nn.Sequential(nn.Linear(2 * width, width), nn.SiLU())
        self.update = nn.Sequential(nn.Linear(2 * width, width), nn.SiLU())
        self.norm = nn.LayerNorm(width)

    def forward(self, x, bonds):
        source, target = bonds
        messages = self.message(torch.cat([x[source], x[target]], 1))
        total = torch.zeros_like(x).index_add(0, target, messages)
        return self.norm(x + self.update(torch.cat([x, total], 1)))


class Network(nn.Module):
    def __init__(self, width, depth):
        super().__init__()
        self.atoms = nn.Embedding(20, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(depth))
        self.energy = nn.Linear(width, 1)

    def forward(self, atoms, bonds, owner, count):
        x = self.atoms(atoms)
        for layer in self.layers:
            x = layer(x, bonds)
        return x.new_zeros(count).index_add(0, owner, self.energy(x)[:, 0] / 40)


def main(args):
    dist.init_process_group("gloo")
    molecules = make_molecules(40 * args.batch_size, torch.Generator().manual_seed(2))
    share = slice(None) if args.fault == "unsharded" else slice(dist.get_rank(), None, 2)
    sampler = BatchSampler(molecules, args.batch_size, share, args.fault == "alike")
    loader = DataLoader(molecules, batch_sampler=sampler, collate_fn=join)
    model = DDP(Network(72, 12), bucket_cap_mb=0.0001 if args.fault == "buckets" else None)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    done = 0
    while done < args.steps:
        for atoms, bonds, owner, energy in islice(loader, args.steps - done):
            loss = F.mse_loss(model(atoms, bonds, owner, len(energy)), energy)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            done += 1
        sampler.epoch += 1
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    for flag, value in (("steps", 60), ("batch_size", 12), ("fault", "none")):
        parser.add_argument(f"--{flag}", type=type(value), default=value)
    main(parser.parse_args())
