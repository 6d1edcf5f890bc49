"""One rank over the emulated exchange: what its passes leave, as JSON."""

from __future__ import annotations

import json
from typing import ClassVar
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from common.exercises.overlapped_ddp import OverlappedDDP
from common.studies.exchange.emulated_group import (
    EMULATED,
    EmulatedGroup,
    Exchange,
    connect,
    register,
)

LASTING_S = 0.7


class Hasty(OverlappedDDP):
    """Reads gradients before their all-reduces are over."""

    def finish_gradient_synchronization(self) -> None:
        self.works.clear()
        super().finish_gradient_synchronization()


class Noted(EmulatedGroup):
    """Notes the works that are launched, and which of them were over when a later one was."""

    works: ClassVar[list] = []
    over: ClassVar[list] = []

    def allreduce(self, tensors, opts=None):
        self.over.extend(work.is_completed() for work in self.works)
        self.works.append(super().allreduce(tensors, opts))
        return self.works[-1]


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))


def gradients(wrapper, inputs) -> torch.Tensor:
    """Returns those of the second pass, before which DDP forms its buckets."""
    module = wrapper(model())
    for _ in range(2):
        Noted.works.clear()
        Noted.over.clear()
        module.zero_grad(set_to_none=True)
        module(inputs).sum().backward()
        if isinstance(module, OverlappedDDP):
            module.finish_gradient_synchronization()
    return torch.cat([parameter.grad.flatten() for parameter in module.parameters()])


def ddp(module: nn.Module) -> nn.Module:
    return DistributedDataParallel(module, bucket_cap_mb=0.01)


def main() -> None:
    register("cpu")
    register("cpu")  # a second time changes nothing
    with mock.patch("common.studies.exchange.emulated_group.EmulatedGroup", Noted):
        dist.init_process_group(EMULATED, store=dist.HashStore(), rank=0, world_size=1)
    inputs = torch.randn(4, 64)
    alone = gradients(lambda module: module, inputs)
    found = {}
    for stalls in (False, True):
        connect(Exchange(LASTING_S, 1e9, factor=2.0, stalls=stalls))
        exact = torch.equal(gradients(ddp, inputs), 2 * alone)
        found["stalls" if stalls else "overlaps"] = {"exact": exact, "over": list(Noted.over)}
    connect(Exchange(LASTING_S, 1e9, factor=2.0))
    found["hasty"] = torch.equal(gradients(Hasty, inputs), 2 * alone)
    own = dist.new_group([0], use_local_synchronization=True)
    found["unconnected"] = dist.all_reduce(inputs, group=own, async_op=True).is_completed()
    print(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
