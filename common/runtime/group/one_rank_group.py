"""A process group of one rank, in which DDP and FSDP do their own work but send no message."""

from __future__ import annotations

import torch.distributed as dist

from common.runtime.group.process_group import Worker


def own_group(worker: Worker) -> dist.ProcessGroup:
    """Makes the group of this rank alone, with the job's backend; all ranks must call it.

    Each rank makes one group, whatever the world size: with ``use_local_synchronization`` only
    members make a group. On NCCL with a bound device the communicator comes from one
    ``ncclCommSplit`` of the world's, in which every rank takes part with a colour of its own
    (torch/distributed/distributed_c10d.py: ``_new_process_group_helper``,
    ``_process_group_color``).
    """
    return dist.new_group([worker.rank], use_local_synchronization=True)
