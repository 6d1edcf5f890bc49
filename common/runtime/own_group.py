"""A process group in which a rank is alone: DDP's and FSDP's own work, without a message."""

from __future__ import annotations

import torch.distributed as dist

from common.runtime.process_group import Worker


def own_group(worker: Worker) -> dist.ProcessGroup:
    """Make the group of this rank alone, of the job's backend. All ranks call this.

    One call a rank, however many there are: with ``use_local_synchronization`` only members make a
    group. On NCCL with a bound device the communicator comes of one ``ncclCommSplit`` of the
    world's, in which every rank takes part with a colour of its own (torch/distributed/
    distributed_c10d.py: ``_new_process_group_helper``, ``_process_group_color``).
    """
    return dist.new_group([worker.rank], use_local_synchronization=True)
