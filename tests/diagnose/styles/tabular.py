"""Defaults on loans, told from a table with many categorical columns by a scikit-learn-like class.

Faults: audit (in each step the hits of all ranks are gathered as objects, one region at a time, as
in the review of NVIDIA/Model-Optimizer#1111), penalty (the L2 penalty is on the whole table of
merchants, not on the rows in use, so that its gradient is dense, as in intel/ipex-llm#3922), guard
(hooks which look for NaNs everywhere were left on).
"""

import argparse

import numpy as np
import pandas as pd
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

WIDTH, BLOCKS, BATCH = 192, 24, 256  # `guard` costs in proportion to the blocks, `audit` to regions
MERCHANTS, MERCHANT_DIM, L2 = 100_000, 16, 1e-5  # `penalty` costs in proportion to this table
COLUMNS = {"region": 40, "plan": 8, "device": 90, "channel": 12, "branch": 250, "agent": 600}


def make_loans(rng, count=30 * BATCH):
    X = pd.DataFrame(rng.normal(size=(count, 2)), columns=["age", "balance"])
    for name, size in COLUMNS.items():
        X[name] = pd.Categorical(rng.integers(size, size=count), categories=range(size))
    X["merchant"] = rng.integers(MERCHANTS, size=count)
    return X, (X["age"] * X["balance"] + rng.normal(size=count) > 0).to_numpy("float32")


class TabularResNet(nn.Module):
    def __init__(self, sparse):
        super().__init__()
        self.columns = nn.ModuleList(nn.Embedding(size, 8) for size in COLUMNS.values())
        self.merchants = nn.Embedding(MERCHANTS, MERCHANT_DIM, sparse=sparse)
        self.first = nn.Linear(8 * len(COLUMNS) + MERCHANT_DIM + 2, WIDTH)
        blocks = ([nn.BatchNorm1d(d), nn.ReLU(), nn.Linear(d, d)] for d in [WIDTH] * BLOCKS)
        self.blocks = nn.ModuleList(nn.Sequential(*block) for block in blocks)
        self.last = nn.Sequential(nn.BatchNorm1d(WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1))

    def forward(self, codes, merchants, numbers):
        columns = [table(c) for table, c in zip(self.columns, codes.unbind(1), strict=True)]
        x = self.first(torch.cat([*columns, self.merchants(merchants), numbers], dim=1))
        for block in self.blocks:
            x = x + block(x)
        return self.last(x)[:, 0]


class RegionAudit:  # are all regions served alike?
    def on_train_begin(self, net):
        self.hits, self.loans = np.zeros((2, COLUMNS["region"]), dtype=int)

    def on_batch_end(self, net, codes, hits):
        for region in range(COLUMNS["region"]):
            shares = [None] * dist.get_world_size()
            dist.all_gather_object(shares, hits[codes[:, 0] == region].tolist())
            self.hits[region] += sum(map(sum, shares))
            self.loans[region] += sum(map(len, shares))


class FiniteGuard:
    def on_train_begin(self, net):
        net.module_.apply(lambda module: module.register_forward_hook(self.check))

    @torch.no_grad()
    def check(self, module, inputs, output):
        if not torch.isfinite(output).all() or output.abs().max() > 1e6:
            raise FloatingPointError(f"{output} in {module}")
        if output.requires_grad:
            output.register_hook(lambda gradient: self.check(module, None, gradient))


class TabularClassifier:
    def __init__(self, max_steps, l2_on="rows", callbacks=()):
        self.max_steps, self.l2_on, self.callbacks = max_steps, l2_on, callbacks

    def notify(self, event, *args):
        for callback in self.callbacks:
            getattr(callback, event, lambda *args: None)(self, *args)

    def fit(self, X, y):
        self.module_ = TabularResNet(sparse=self.l2_on == "rows")
        self.ddp_ = DistributedDataParallel(self.module_, forward_sync_buffers=False)
        self.optimizer_ = torch.optim.Adagrad(self.module_.parameters(), lr=0.01)
        self.history_ = []
        self.notify("on_train_begin")
        while len(self.history_) < self.max_steps:
            self.partial_fit(X, y)
        return self

    def partial_fit(self, X, y):
        codes = X[list(COLUMNS)].apply(lambda column: column.cat.codes).to_numpy("int64")
        numbers = X[["age", "balance"]].to_numpy("float32")
        data = [torch.tensor(array) for array in (codes, X["merchant"].to_numpy(), numbers, y)]
        shuffle = torch.Generator().manual_seed(len(self.history_))
        order = torch.randperm(len(y), generator=shuffle)[dist.get_rank() :: dist.get_world_size()]
        for rows in order.split(BATCH)[: self.max_steps - len(self.history_)]:
            codes, merchants, numbers, target = (tensor[rows] for tensor in data)
            logits, table = self.ddp_(codes, merchants, numbers), self.module_.merchants
            decayed = table.weight if self.l2_on == "table" else table(merchants)
            loss = nn.functional.binary_cross_entropy_with_logits(logits, target)
            self.optimizer_.zero_grad()
            (loss + L2 * decayed.square().sum()).backward()
            self.optimizer_.step()
            self.history_.append(loss.detach())
            self.notify("on_batch_end", codes, (logits > 0) == (target > 0))
        return self


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--fault", default="none")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    l2_on = "table" if args.fault == "penalty" else "rows"
    callbacks = {"audit": [RegionAudit()], "guard": [FiniteGuard()]}.get(args.fault, [])
    net = TabularClassifier(args.steps, l2_on, callbacks)
    print("loss", net.fit(*make_loans(np.random.default_rng(7))).history_[-1].item())
    dist.destroy_process_group()
