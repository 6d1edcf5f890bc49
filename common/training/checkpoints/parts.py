"""The division of a checkpoint's tensors among the ranks that write them.

Under DDP every rank has all states, and under HYBRID_SHARD every group of ranks. An asynchronous
checkpoint copies states to pinned memory of the host before they are written: all of them on every
rank of a node would be 9.3 GB for gpt2-large, times the ranks. torch.distributed.checkpoint removes
duplicates only after that copy. So each tensor is left to one of the ranks that have it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod

from torch import Tensor
from torch.distributed.tensor import DTensor

from common.runtime.group.process_group import Worker

Keys = tuple[str, ...]
"""The way to a tensor in nested states."""


def own_part(
    states: Mapping,
    worker: Worker,
    prepare: Callable[[Keys, Tensor], Tensor] = lambda keys, tensor: tensor,
) -> dict:
    """Returns the nested ``states`` without the tensors that other ranks write.

    Every rank calls this with states of the same names, shapes and order. Each part of a tensor is
    written by one rank, which is the one that has the fewest bytes so far. What is no tensor stays
    on all ranks.

    Args:
        states: nested, with tensors.
        worker: this rank.
        prepare: called on all ranks with each tensor; what it returns is written in its place.
    """
    # Bytes given to each replica so far, one list per number of replicas, so that tensors with as
    # many replicas are balanced among themselves. All ranks find the same without communication.
    assigned: dict[int, list[int]] = {}

    def is_own(tensor: Tensor) -> bool:
        replica, replicas = place_among_replicas(tensor, worker)
        so_far = assigned.setdefault(replicas, [0] * replicas)
        chosen = so_far.index(min(so_far))
        so_far[chosen] += tensor.numel() * tensor.element_size()  # a DTensor's is of the whole
        return chosen == replica

    return _filtered(states, is_own, prepare)


def place_among_replicas(tensor: Tensor, worker: Worker) -> tuple[int, int]:
    """Returns this rank's number among the ranks with its part of ``tensor``, and their count.

    A plain tensor is the same on all ranks; a DTensor along the mesh dimensions that replicate it.
    """
    if not isinstance(tensor, DTensor):
        return worker.rank, worker.world_size
    mesh = tensor.device_mesh
    dimensions = [at for at, how in enumerate(tensor.placements) if how.is_replicate()]
    # The ranks' coordinates in these dimensions, read as the digits of one number.
    replica = 0
    for dimension in dimensions:
        replica = replica * mesh.size(dimension) + mesh.get_local_rank(dimension)
    return replica, prod(mesh.size(dimension) for dimension in dimensions)


def _filtered(
    states: Mapping,
    is_own: Callable[[Tensor], bool],
    prepare: Callable[[Keys, Tensor], Tensor],
    keys: Keys = (),
) -> dict:
    kept = {}
    for name, value in states.items():
        if isinstance(value, Tensor):
            prepared = prepare((*keys, name), value)
            if is_own(prepared):
                kept[name] = prepared
        elif isinstance(value, Mapping):
            kept[name] = _filtered(value, is_own, prepare, (*keys, name))
        else:
            kept[name] = value
    return kept
