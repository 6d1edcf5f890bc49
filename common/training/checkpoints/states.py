"""The states that a checkpoint holds, under every strategy: names and shapes of one device.

torch.distributed.checkpoint knows the tensors of DDP and FSDP2. The exercises spread theirs in ways
of their own. MY_FSDP has flat parts: they are put together one tensor after another, and each whole
one stays on the rank that writes it. MY_ZERO1 has the optimizer's states of a parameter on one rank
only, which writes them.

Under DDP every rank has all states, and under HYBRID_SHARD every group of ranks. An asynchronous
checkpoint copies states to pinned memory of the host before they are written: all of them on every
rank of a node would be 9.3 GB for gpt2-large, times the ranks. torch.distributed.checkpoint removes
duplicates only after that copy. So each tensor is left to one of the ranks that have it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import groupby
from math import prod
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor

from common.exercises.fsdp import FSDP
from common.exercises.sharded_optimizer import ShardedOptimizer
from common.runtime.group.process_group import Worker
from common.training.parallel import without_wrapper

MODEL, OPTIMIZER, STATE = "model", "optimizer", "state"
"""Keys of states: model → name → tensor, and optimizer → state → name → kind → tensor."""
SETTINGS = "param_groups"
"""Key of an optimizer's own settings, beside its states: learning rate, weight decay and others."""
Keys = tuple[str, ...]
"""The way to a tensor in nested states."""


def states_to_write(model: nn.Module, optimizer: torch.optim.Optimizer, worker: Worker) -> dict:
    """Returns what this rank writes of a checkpoint; all ranks call it."""
    states = _states(model, optimizer)
    if isinstance(optimizer, ShardedOptimizer):
        return own_part({MODEL: states[MODEL]}, worker) | {OPTIMIZER: states[OPTIMIZER]}
    parts = _parts(states, model)
    return own_part(
        states, worker, lambda keys, part: model.whole(parts[keys], part) if keys in parts else part
    )


def load_states(
    path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, group: dist.ProcessGroup
) -> None:
    """Reads a checkpoint into model and optimizer; all ranks of the group call it.

    Any strategy reads what any other wrote.
    """
    states = _states(model, optimizer)
    parts = _parts(states, model)
    sizes = dcp.FileSystemReader(path).read_metadata().state_dict_metadata if parts else {}
    for _, of_parameter in groupby(parts, key=lambda keys: id(parts[keys])):
        together = list(of_parameter)
        wholes = {
            keys: _at(states, keys).new_empty(sizes[".".join(keys)].size) for keys in together
        }
        read: dict = {}
        for keys, tensor in wholes.items():
            _put(read, keys, tensor)
        dcp.load(read, checkpoint_id=path, process_group=group)
        for keys, tensor in wholes.items():
            _at(states, keys).copy_(model.part(parts[keys], tensor))
    plain = _without(states, parts)
    # Of the optimizer only its states: settings are this run's, which may differ from those saved.
    settings = plain[OPTIMIZER].pop(SETTINGS)
    dcp.load(plain, checkpoint_id=path, process_group=group)
    plain[OPTIMIZER][SETTINGS] = settings
    for keys in parts:
        _put(plain, keys, _at(states, keys))
    if isinstance(optimizer, ShardedOptimizer):
        # A rank of MY_ZERO1 has not the states of all parameters. Up to torch 2.9 each has to be
        # there, also where it is not required to.
        plain[OPTIMIZER][STATE] = {name: {} for name in plain[MODEL]} | plain[OPTIMIZER][STATE]
    set_state_dict(
        without_wrapper(model),
        optimizer,
        model_state_dict=plain[MODEL],
        optim_state_dict=plain[OPTIMIZER],
        options=StateDictOptions(strict=not isinstance(optimizer, ShardedOptimizer)),
    )


def _states(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict:
    has_states = bool(optimizer.state)
    model_state, optimizer_state = get_state_dict(without_wrapper(model), optimizer)
    if not has_states:  # PyTorch has made them by a step of its own, which counts
        for state in optimizer.state.values():
            if "step" in state:  # SGD counts none
                state["step"].zero_()
    return {MODEL: model_state, OPTIMIZER: optimizer_state}


def _parts(states: dict, model: nn.Module) -> dict[Keys, nn.Parameter]:
    """Returns where tensors of MY_FSDP lie that are in parts, and the parameter each belongs to."""
    parts: dict[Keys, nn.Parameter] = {}
    for name, parameter in model.module.named_parameters() if isinstance(model, FSDP) else ():
        if model.is_sharded(parameter):
            parts[MODEL, name] = parameter
            for kind, value in states[OPTIMIZER][STATE].get(name, {}).items():
                if isinstance(value, Tensor) and value.shape == parameter.shape:
                    parts[OPTIMIZER, STATE, name, kind] = parameter
    return parts


def _at(states: dict, keys: Keys) -> Tensor:
    for key in keys:
        states = states[key]
    return states


def _put(states: dict, keys: Keys, tensor: Tensor) -> None:
    *outer, last = keys
    for key in outer:
        states = states.setdefault(key, {})
    states[last] = tensor


def _without(states: dict, left_out: dict[Keys, nn.Parameter], keys: Keys = ()) -> dict:
    kept = {}
    for name, value in states.items():
        nested = (*keys, name)
        if nested not in left_out:
            kept[name] = _without(value, left_out, nested) if isinstance(value, dict) else value
    return kept


def own_part(
    states: Mapping,
    worker: Worker,
    prepare: Callable[[Keys, Tensor], Tensor] = lambda keys, tensor: tensor,
) -> dict:
    """Returns the nested ``states`` without the tensors that other ranks write.

    Every rank calls this with states of the same names, shapes and order. Each part of a tensor is
    written by one rank, which is the one that has the fewest bytes so far. What is no tensor stays
    on all ranks.

    ``prepare`` is called on all ranks with each tensor; what it returns is written in its place.
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

    def kept(states: Mapping, keys: Keys = ()) -> dict:
        part = {}
        for name, value in states.items():
            nested = (*keys, name)
            if isinstance(value, Tensor):
                prepared = prepare(nested, value)
                if is_own(prepared):
                    part[name] = prepared
            else:
                part[name] = kept(value, nested) if isinstance(value, Mapping) else value
        return part

    return kept(states)


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
