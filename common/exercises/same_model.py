"""Given: the check that all ranks hold the same model, before any of them exchanges a gradient."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from common.errors import UserError

Description = list[tuple[str, tuple[int, ...], str]]
"""Name, shape and dtype of each parameter, in order."""


def check_same_model(module: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """Raises the same UserError on every rank unless all hold models of the same parameters.

    All ranks of ``group`` call it. A parameter must be floating: only such gradients have a mean.
    """
    own = describe(module)
    described: list[Description] = [own] * dist.get_world_size(group)
    dist.all_gather_object(described, own, group=group)
    for rank, description in enumerate(described):
        if problem := problem_of(description, described[0], rank):
            raise UserError(problem)


def describe(module: nn.Module) -> Description:
    """Returns what the ranks compare."""
    return [
        (name, tuple(parameter.shape), str(parameter.dtype).removeprefix("torch."))
        for name, parameter in module.named_parameters()
    ]


def problem_of(description: Description, first: Description, rank: int) -> str | None:
    """Returns what is wrong with a rank's model beside that of rank 0, or None."""
    if not description:
        return f"rank {rank}: the model has no parameters"
    for name, _, dtype in description:
        if not getattr(torch, dtype).is_floating_point:
            return f"rank {rank}: parameter {name} is {dtype}; it must be floating"
    for own, its in zip(description, first, strict=False):
        if own != its:
            return f"rank {rank}: parameter {_shown(own)}, where rank 0 has {_shown(its)}"
    if len(description) != len(first):
        longer, shorter = sorted((description, first), key=len)[::-1]
        where = rank if longer is description else 0
        return f"rank {rank}: parameter {_shown(longer[len(shorter)])} is on rank {where} only"
    return None


def _shown(parameter: tuple[str, tuple[int, ...], str]) -> str:
    name, shape, dtype = parameter
    return f"{name} ({'×'.join(map(str, shape)) or 'scalar'}, {dtype})"
