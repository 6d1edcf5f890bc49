"""A two-tower recommender, which a pipeline trains on interactions from a pandas table.

Faults: cached (batches are embedded without gradients, then anew in chunks, though they fit in
memory, as in luyug/GradCache#30), frozen (the pretrained encoder of titles is kept from nothing but
the optimizer, so its gradients are computed and exchanged, as in BINE022/EEGPT#18), counts (the
table of pairs is a buffer of the model, sent before each forward pass though it never changes, as
before jingyaogong/minimind#855).
"""

import argparse
import itertools
from collections import deque

import numpy as np
import pandas as pd
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

USERS, ITEMS, ROWS, WORDS, TOPICS = 6000, 1000, 8192, 800, 20  # `counts`: USERS * ITEMS * 8 bytes
CHUNK, TITLE_WIDTH, KEPT = 64, 512, 160  # the first two are the sizes of `cached` and `frozen`


def make_tables(rng):
    user, item = rng.integers(0, USERS, ROWS), (ITEMS * rng.random(ROWS) ** 1.5).astype("int64")
    item = np.where(rng.random(ROWS) < 0.7, item - item % TOPICS + user % TOPICS, item)
    table = {"user": user, "item": item, "age": 18 + user % 60, "hour": rng.integers(0, 24, ROWS)}
    titles = rng.integers(0, 40, (ITEMS, 8)) * TOPICS + np.arange(ITEMS)[:, None] % TOPICS
    counts = np.bincount(user * ITEMS + item, minlength=USERS * ITEMS).reshape(USERS, ITEMS)
    return pd.DataFrame(table), torch.from_numpy(titles), torch.from_numpy(counts)


class InteractionLoader:
    def __init__(self, table, titles, batch_size):
        self.columns = {name: torch.tensor(table[name].to_numpy()) for name in table}
        self.titles, self.batch_size = titles, batch_size

    def __iter__(self):
        for epoch in itertools.count():
            order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(epoch))
            for rows in order[dist.get_rank() :: dist.get_world_size()].split(self.batch_size):
                batch = {name: column[rows] for name, column in self.columns.items()}
                title = self.titles[batch["item"]]
                yield {**batch, "title": title.masked_fill(torch.rand(title.shape) < 0.1, WORDS)}


class TwoTower(nn.Module):
    def __init__(self, counts, dim=64):
        super().__init__()
        self.users, self.items = nn.Embedding(USERS, dim), nn.Embedding(ITEMS, dim)
        self.titles = nn.Sequential(nn.Embedding(WORDS + 1, 128), self.mlp(128, TITLE_WIDTH, 128))
        self.user_tower, self.item_tower = (self.mlp(n, 384, 384, dim) for n in (dim + 2, 3 * dim))
        self.register_buffer("counts", counts, persistent=False)

    def mlp(self, *widths):
        layers = [(nn.Linear(*pair), nn.ReLU()) for pair in itertools.pairwise(widths)]
        return nn.Sequential(*itertools.chain(*layers))[:-1]

    def forward(self, batch):
        context = torch.stack([batch["age"] / 40 - 1, batch["hour"] / 12 - 1], 1)
        user = torch.cat([self.users(batch["user"]), context], 1)
        item = torch.cat([self.items(batch["item"]), self.titles(batch["title"]).mean(1)], 1)
        return F.normalize(self.user_tower(user)), F.normalize(self.item_tower(item))


class Pipeline:
    def __init__(self, args):
        self.args, self.total, self.past = args, 0.0, deque(maxlen=2)
        table, titles, counts = make_tables(np.random.default_rng(11))
        self.loader = InteractionLoader(table, titles, args.batch_size)
        model = TwoTower(counts)
        model.titles.requires_grad_(args.fault == "frozen")
        trained = [p for name, p in model.named_parameters() if not name.startswith("titles.")]
        self.optimizer = torch.optim.Adam(trained, args.lr, fused=True)
        sync = args.fault == "counts"
        self.model = nn.parallel.DistributedDataParallel(model, forward_sync_buffers=sync)

    def loss(self, users, items, batch):  # items which a user had are no negatives
        ids = batch["item"]
        candidates, all_ids = map(torch.cat, zip((items, ids), *self.past, strict=True))
        had = self.model.module.counts[batch["user"][:, None], all_ids] > 0
        self.past.append((items.detach()[:KEPT], ids[:KEPT]))
        logits = (10 * users @ candidates.T).masked_fill(had.fill_diagonal_(False), -torch.inf)
        return F.cross_entropy(logits, torch.arange(len(ids)))

    def cached_backward(self, batch):
        columns = zip(*(column.split(CHUNK) for column in batch.values()), strict=True)
        parts = [dict(zip(batch, part, strict=True)) for part in columns]
        with torch.no_grad():
            users, items = map(torch.cat, zip(*map(self.model.module, parts), strict=True))
        loss = self.loss(users.requires_grad_(), items.requires_grad_(), batch)
        loss.backward()
        for part, *grad in zip(parts, *(x.grad.split(CHUNK) for x in (users, items)), strict=True):
            self.model.require_backward_grad_sync = part is parts[-1]
            torch.autograd.backward(self.model(part), grad)
        return loss

    def run(self):
        for step, batch in zip(range(self.args.steps), self.loader, strict=False):
            self.optimizer.zero_grad()
            if self.args.fault == "cached":
                loss = self.cached_backward(batch)
            else:
                loss = self.loss(*self.model(batch), batch)
                loss.backward()
            self.optimizer.step()
            self.total += loss.detach()
            if dist.get_rank() == 0 and step % 20 == 19:
                print(f"step {step + 1}: loss {self.total.item() / (step + 1):.3f}")


parser = argparse.ArgumentParser()
for flag, default in {"steps": 60, "batch_size": 256, "lr": 1e-3, "fault": "none"}.items():
    parser.add_argument(f"--{flag}", type=type(default), default=default)
dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
Pipeline(parser.parse_args()).run()
dist.destroy_process_group()
