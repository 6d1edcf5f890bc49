"""Sends gradients through a group that compares its exchanges first, and as if it did not.

    unchecked.py FOLDER DETAIL|OFF

DDP is left out: torch 2.15's ends by a signal when it is made over such a group of gloo's.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from ddplab_watch.exchanging import Exchange
from ddplab_watch.lean import LeanPasses
from ddplab_watch.marks import HostClock
from ddplab_watch.record import Record
from ddplab_watch.team import Team
from torch import nn

folder, level = Path(sys.argv[1]), sys.argv[2]
dist.set_debug_level(getattr(dist.DebugLevel, level))
dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3))
parameters = list(model.parameters())[::-1]
values = torch.full((4, 6), 1.0 + rank)
exchange = Exchange([4 * (3 + 15), 4 * (5 + 30)], parameters, dist.group.WORLD)


class Rows(Record):
    """Keeps the rows of passes."""

    def add(self, table: str, **row: object) -> None:
        if table == "lean-passes":
            rows.append(row)


def one_pass(only: object = None, exchange: Exchange | None = None) -> tuple[dict, list]:
    if exchange is None:
        return {}, []
    exchange.begin()
    handles = [parameter.register_hook(exchange.ready) for parameter in parameters]
    gradients = torch.autograd.grad(model(values).sum(), parameters)
    exchange.finish()
    for handle in handles:
        handle.remove()
    sums.append([gradient.double().sum().item() for gradient in gradients])
    return {"exchange_time_ms": 0.0}, []


rows: list[dict] = []
sums: list[list[float]] = []
team = Team(dist.group.WORLD, torch.device("cpu"), HostClock())
record = Rows(folder / f"rank{rank}.jsonl")
kept = SimpleNamespace(inner=model, gradient_bytes=4 * 53)
LeanPasses(team, record, one_pass, kept, exchange, lambda _: True).run()
expected = [g.double().sum().item() for g in torch.autograd.grad(model(values).sum(), parameters)]
gathered = [None] * ranks
dist.all_gather_object(gathered, expected)
mean = [sum(of_ranks) / ranks for of_ranks in zip(*gathered, strict=True)]
(folder / f"out-{rank}.json").write_text(json.dumps({"mean": mean, "sums": sums, "rows": rows}))
dist.destroy_process_group()
