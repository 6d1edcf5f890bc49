"""A1.1: an all-reduce on a ring, made of send and receive.

The tensor is cut into as many chunks as there are ranks. In n − 1 steps each rank sends a chunk to
its right neighbour and adds the one that comes from its left: then each rank has one chunk's sum.
In n − 1 more steps the sums go round. A rank sends 2(n − 1)/n of the tensor, whatever the number of
ranks (Patarasuk and Yuan, Journal of Parallel and Distributed Computing 69, 2009).
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


def ring_all_reduce(tensor: Tensor, group: dist.ProcessGroup | None = None) -> None:
    """Replaces ``tensor`` by its sum over all ranks, in place.

    All ranks call it with tensors of the same shape and dtype. Any number of elements will do, also
    fewer than there are ranks. Messages of any size must not deadlock: a rank that sends and then
    receives would wait for one that does the same. Over NCCL that holds for ``isend``, too, as a
    group's operations run one after another.

    Args:
        tensor: any shape, contiguous or not.
        group: the ranks that take part; None for all.
    """
    # BEGIN SOLUTION A1.1
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    if world == 1:
        return
    work = tensor.contiguous()
    chunks = work.view(-1).tensor_split(world)  # the first ones may have an element more
    buffer = torch.empty_like(chunks[0])
    for step in range(world - 1):  # reduce-scatter
        received = chunks[(rank - step - 1) % world]
        incoming = buffer[: received.numel()]
        pass_on(chunks[(rank - step) % world], incoming, group)
        received += incoming
    for step in range(world - 1):  # all-gather
        pass_on(chunks[(rank + 1 - step) % world], chunks[(rank - step) % world], group)
    if work is not tensor:
        tensor.copy_(work)
    # END SOLUTION


# BEGIN SOLUTION A1.1
def pass_on(sent: Tensor, received: Tensor, group: dist.ProcessGroup | None) -> None:
    """Sends a chunk to the right neighbour while one comes from the left; either may be empty."""
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    right, left = ((rank + way) % world for way in (1, -1))
    messages = []
    if sent.numel():
        messages.append(dist.P2POp(dist.isend, sent, group=group, group_peer=right))
    if received.numel():
        messages.append(dist.P2POp(dist.irecv, received, group=group, group_peer=left))
    # In one batch: over NCCL a send that is launched alone holds up the receive behind it, on all
    # ranks, so that none receives.
    for request in dist.batch_isend_irecv(messages) if messages else ():
        request.wait()


# END SOLUTION
