"""What single collectives over gloo send and receive on this rank: one JSON line each."""

from __future__ import annotations

import json
import time

import torch
import torch.distributed as dist

from common.runtime.group.process_group import process_group
from common.runtime.group.socket_bytes import received_bytes, sent_bytes

ELEMENTS = (6, 300_000)  # float32, a multiple of 2 and 3

with process_group("cpu") as worker:
    for elements in ELEMENTS:
        whole, part = torch.ones(elements), torch.ones(elements // worker.world_size)
        for operation, collective in {
            "all_reduce": lambda whole=whole: dist.all_reduce(whole),
            "all_gather": lambda w=whole, p=part: dist.all_gather_into_tensor(w, p),
            "reduce_scatter": lambda w=whole, p=part: dist.reduce_scatter_tensor(p, w),
        }.items():
            collective()
            worker.barrier()
            time.sleep(0.02)  # a barrier's last headers may come after it
            before = sent_bytes(), received_bytes()
            collective()
            sent = sent_bytes() - before[0]
            worker.barrier()  # adds headers to what is received
            found = {"operation": operation, "size_bytes": 4 * elements, "sent_bytes": sent}
            found["received_bytes"] = received_bytes() - before[1]
            print(json.dumps(found), flush=True)
    worker.barrier()  # who leaves closes connections, whose bytes then count no more
