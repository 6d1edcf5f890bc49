"""Checks that all ranks run the same graph, before DDP is made, which would hang or stop them all.

Ranks compare digests and, where these differ, look for the first difference. An error on one rank
is raised on all of them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import TypeVar

from torch import nn

from common.errors import UserError
from common.runtime.group.process_group import Worker
from common.tuning.user_model import TrainedPart, UserModel, listed, ready_order

Result = TypeVar("Result")


def together(worker: Worker, work: Callable[[], Result]) -> Result:
    """Does ``work`` on every rank; where one refuses with a UserError, all raise it.

    An error of some ranks only is named with the first of them.
    """
    result, error = None, None
    try:
        result = work()
    except UserError as refused:
        error = str(refused)
    errors = worker.gather(error)
    refusing = [rank for rank, text in enumerate(errors) if text is not None]
    if refusing:
        whose = "" if len(refusing) == worker.world_size else f"rank {refusing[0]}: "
        raise UserError(f"{whose}{errors[refusing[0]]}")
    return result


def on_main(worker: Worker, work: Callable[[], Result]) -> Result:
    """Does ``work`` on rank 0; returns its result, or raises its UserError, on every rank."""
    result = together(worker, lambda: work() if worker.is_main else None)
    return worker.broadcast(result)


def check_same_graph(user: UserModel, worker: Worker) -> None:
    """Raises UserError where parameters or gradients differ between ranks, or one gets none."""
    _compare(worker, _parameters(user.module), user.name, "parameters")
    order = together(worker, lambda: ready_order(user, worker.device))
    _compare(worker, sorted(order), user.name, "gradients")
    missing = [n for n, _ in TrainedPart(user.module).named_parameters() if n not in set(order)]
    if missing:
        raise UserError(
            f"{user.name}: no gradient reaches {len(missing)} of the module's parameters: "
            f"{listed(missing)}; use them in the loss or freeze them with requires_grad_(False)"
        )


def _parameters(module: nn.Module) -> list[str]:
    return [
        f"{name} ({' × '.join(map(str, p.shape))} {str(p.dtype).removeprefix('torch.')}"
        f"{'' if p.requires_grad else ', frozen'})"
        for name, p in module.named_parameters()
    ]


def _compare(worker: Worker, lines: Sequence[str], name: str, what: str) -> None:
    digest = hashlib.sha256(json.dumps(list(lines)).encode()).hexdigest()
    digests = worker.gather(digest)
    if len(set(digests)) == 1:
        return
    other = next(rank for rank, rank_digest in enumerate(digests) if rank_digest != digests[0])
    everywhere = worker.gather(list(lines))
    first, second = everywhere[0], everywhere[other]
    if what == "gradients":
        apart = sorted(set(first) ^ set(second))
        has, lacks, holder = (0, other, first) if apart[0] in first else (other, 0, second)
        only = [gradient for gradient in apart if gradient in holder]
        detail = f"{listed(only)} got a gradient on rank {has} and none on rank {lacks}"
    else:
        pairs = zip_longest(first, second, fillvalue="nothing")
        of_first, of_second = next(pair for pair in pairs if pair[0] != pair[1])
        detail = f"where rank 0 has {of_first}, rank {other} has {of_second}"
    raise UserError(f"{name}: ranks run different graphs: {detail}")
