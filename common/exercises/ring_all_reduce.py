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
    receives would wait for one that does the same.

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
    right, left = (neighbour_rank((rank + way) % world, group) for way in (1, -1))
    requests = []
    if sent.numel():
        requests.append(dist.isend(sent, right, group=group))
    if received.numel():
        requests.append(dist.irecv(received, left, group=group))
    for request in requests:
        request.wait()


def neighbour_rank(rank: int, group: dist.ProcessGroup | None) -> int:
    """Returns the number among all ranks of a rank of the group."""
    return rank if group is None else dist.get_global_rank(group, rank)


# END SOLUTION
