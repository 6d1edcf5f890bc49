"""Embeddings of a knowledge graph, whose triples a small network scores against negatives.

Faults: gathered (the rows of entities are picked from a plain parameter, so that its gradient is
dense, as in keras-team/keras#4365), all_cores (each process starts two threads for each core, as in
facebookresearch/PyTorch-BigGraph#6), rejection (negatives are drawn and checked one by one in
Python, as in maxvanspengler/hyperbolic_learning_library#59).
"""

import argparse
import os

import numpy as np
import torch
import torch.nn.functional as F
from torch import distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

ENTITIES, RELATIONS, TRIPLES = 100_000, 40, 100_000


class TripleDataset(Dataset):
    def __init__(self, n_entity, n_relation, n_triple):
        rng = torch.Generator().manual_seed(0)
        popularity = torch.rand(n_triple, 2, generator=rng) ** 2
        ends = (popularity * n_entity).long()
        self.triples = torch.stack([ends[:, 0], ends.sum(1) % n_relation, ends[:, 1]], dim=1)

    def __len__(self):
        return len(self.triples)

    def __getitem__(self, index):
        return index


class NegativeSampler:
    def __init__(self, dataset, n_negative, filtered):
        self.dataset, self.n_negative = dataset, n_negative
        self.known = set(map(tuple, dataset.triples.tolist())) if filtered else None

    def tails(self, head, relation):
        tails = []
        while len(tails) < self.n_negative:
            tail = np.random.randint(ENTITIES)
            if tail not in tails and (head, relation, tail) not in self.known:
                tails.append(tail)
        return tails

    def __call__(self, indices):
        positives = self.dataset.triples[indices]
        if self.known is None:
            return positives, torch.randint(ENTITIES, (len(positives), self.n_negative))
        return positives, torch.tensor([self.tails(h, r) for h, r, _ in positives.tolist()])


class KGEModel(nn.Module):
    def __init__(self, n_entity, n_relation, dim, hidden, sparse):
        super().__init__()
        self.entity = nn.Embedding(n_entity, dim, sparse=sparse)
        self.relation = nn.Embedding(n_relation, dim)
        self.query = nn.Sequential(nn.Linear(2 * dim, hidden), nn.ReLU(), nn.Linear(hidden, dim))
        self.score = nn.Sequential(nn.Linear(dim, hidden), nn.ReLU(), nn.Linear(hidden, 1))
        nn.init.uniform_(self.entity.weight, -0.5, 0.5)

    def lookup(self, ids):
        if self.entity.sparse:
            return self.entity(ids)
        return self.entity.weight.index_select(0, ids.flatten()).view(*ids.shape, -1)

    def forward(self, positives, negatives):
        head, relation, tail = positives.unbind(1)
        rows = self.lookup(torch.cat([head[:, None], tail[:, None], negatives], dim=1))
        query = self.query(torch.cat([rows[:, 0], self.relation(relation)], dim=1))
        return self.score(query[:, None] * rows[:, 1:])[..., 0]


def train(args):
    dataset = TripleDataset(ENTITIES, RELATIONS, TRIPLES)
    corrupt = NegativeSampler(dataset, args.negatives, filtered=args.fault == "rejection")
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, args.batch_size, sampler=sampler, collate_fn=corrupt)
    model = KGEModel(ENTITIES, RELATIONS, args.dim, 512, sparse=args.fault != "gathered")
    model = DistributedDataParallel(model)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)
    for _, (positives, corrupted) in zip(range(args.steps), loader, strict=False):
        scores = model(positives, corrupted)
        loss = F.cross_entropy(scores, torch.zeros(len(scores), dtype=torch.long))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    for name, value in {"steps": 60, "batch_size": 192, "negatives": 48, "dim": 64}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--fault", default="none")
    args = parser.parse_args()
    if args.fault == "all_cores":
        torch.set_num_threads(2 * os.cpu_count())
    dist.init_process_group("gloo")
    train(args)
    dist.destroy_process_group()
