"""Every rank makes a group of its own, twice, and sums over it and over the world: a JSON line."""

from __future__ import annotations

import json

import torch
import torch.distributed as dist

from common.runtime.group.one_rank_group import own_group
from common.runtime.group.process_group import process_group

with process_group("cpu") as worker:
    made, new_group = [], dist.new_group
    dist.new_group = lambda *args, **kwargs: made.append(args) or new_group(*args, **kwargs)
    sums = []
    for _ in range(2):
        group = own_group(worker)
        for where in (group, None):
            value = torch.tensor([worker.rank + 1.0])
            dist.all_reduce(value, group=where)
            sums.append(value.item())
    print(json.dumps({"size": group.size(), "made": len(made), "sums": sums}))
