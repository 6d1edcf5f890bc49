"""The states that a checkpoint holds, under every strategy: names and shapes of one device.

torch.distributed.checkpoint knows the tensors of DDP and FSDP2. The exercises spread theirs in ways
of their own. MY_FSDP has flat parts: they are put together one tensor after another, and each whole
one stays on the rank that writes it. MY_ZERO1 has the optimizer's states of a parameter on one rank
only, which writes them.
"""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)

from common.exercises.fsdp import FSDP
from common.exercises.sharded_optimizer import ShardedOptimizer
from common.runtime.group.process_group import Worker
from common.training.checkpoints.parts import Keys, own_part
from common.training.parallel import without_wrapper

MODEL, OPTIMIZER, STATE = "model", "optimizer", "state"
"""Keys of states: model → name → tensor, and optimizer → state → name → kind → tensor."""
SETTINGS = "param_groups"
"""Key of an optimizer's own settings, beside its states: learning rate, weight decay and others."""


def states_to_write(model: nn.Module, optimizer: torch.optim.Optimizer, worker: Worker) -> dict:
    """Returns what this rank writes of a checkpoint; all ranks call it."""
    states = _states(model, optimizer)
    if isinstance(optimizer, ShardedOptimizer):
        return own_part({MODEL: states[MODEL]}, worker) | {OPTIMIZER: states[OPTIMIZER]}
    parts = _parts(states, model)
    return own_part(
        states,
        worker,
        lambda keys, part: model.whole(parts[keys], part) if keys in parts else part,
    )


def load_states(
    path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, group: dist.ProcessGroup
) -> None:
    """Reads a checkpoint into model and optimizer; all ranks call it.

    Args:
        path: folder of the checkpoint.
        model, optimizer: model and optimizer of any strategy, whichever wrote the checkpoint.
        group: the ranks that read together.
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
    model_state, optimizer_state = get_state_dict(without_wrapper(model), optimizer)
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
