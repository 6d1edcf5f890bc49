"""Rank 1 is late for an all-reduce that rank 0 waits in; both dump their flight recorder then.

hanging_ranks.py FOLDER, with TORCH_FR_BUFFER_SIZE in the environment.
"""

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _dump_fr_trace

folder = Path(sys.argv[1])
dist.init_process_group("gloo")
rank = dist.get_rank()
for _ in range(3):
    dist.all_reduce(torch.ones(16))


def reduce_the_loss() -> dist.Work:
    return dist.all_reduce(torch.ones(7, 11), async_op=True)


waiting = reduce_the_loss() if rank == 0 else None
time.sleep(0.5)
(folder / f"trace_rank_{rank}").write_bytes(_dump_fr_trace(backend="gloo"))
time.sleep(0.5)
if waiting is None:
    waiting = reduce_the_loss()
waiting.wait()
dist.destroy_process_group()
