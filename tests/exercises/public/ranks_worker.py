"""Small checks on two ranks: ``ranks_worker.py CHECK``; a rank that fails raises."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

from common.exercises.bucketed_ddp import BucketedDDP
from common.exercises.fsdp import FSDP
from common.exercises.naive_ddp import FlatDDP, NaiveDDP
from common.exercises.overlapped_ddp import OverlappedDDP
from common.exercises.ring_all_reduce import ring_all_reduce
from common.exercises.sharded_optimizer import ShardedOptimizer
from common.runtime.group.process_group import Worker, process_group


class Small(nn.Module):
    """Two layers in a stack."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x.square().mean()


def model_of(rank: int) -> Small:
    torch.manual_seed(rank)
    return Small().double()


def samples(step: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(3, 4, generator=generator, dtype=torch.float64)


def ring(worker: Worker) -> None:
    tensor = torch.arange(10.0) * (worker.rank + 1)
    ring_all_reduce(tensor)
    factor = worker.world_size * (worker.world_size + 1) / 2
    assert torch.equal(tensor, torch.arange(10.0) * factor), tensor


def trains(wrap: Callable[[nn.Module], nn.Module]) -> Callable[[Worker], None]:
    """Makes a check that training is that of one process with all samples."""

    def check(worker: Worker) -> None:
        wrapped, twin = wrap(model_of(worker.rank)), model_of(0)
        optimizers = [torch.optim.SGD(model.parameters(), 0.5) for model in (wrapped, twin)]
        for step in range(3):
            losses = [twin(samples(step, rank)) for rank in range(worker.world_size)]
            torch.stack(losses).mean().backward()
            wrapped(samples(step, worker.rank)).backward()
            wrapped.finish_gradient_synchronization()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        found = dict(wrapped.module.named_parameters())
        if isinstance(wrapped, FSDP):
            found = wrapped.gather_full_params()
        for name, expected in twin.named_parameters():
            torch.testing.assert_close(found[name].detach(), expected.detach())

    return check


def sharded(worker: Worker) -> None:
    model = model_of(0)
    twin = copy.deepcopy(model)
    own = ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=0.1)
    theirs = torch.optim.AdamW(twin.parameters(), lr=0.1)
    for step in range(3):
        for each, optimizer in ((model, own), (twin, theirs)):
            optimizer.zero_grad()
            each(samples(step, 0)).backward()
            optimizer.step()
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(one, other)
    assert len(own.state) < len(theirs.state)
    counts = torch.tensor(len(own.state))
    dist.all_reduce(counts)
    assert counts == len(theirs.state)


CHECKS = {
    "A1.1": ring,
    "A1.2 naive": trains(NaiveDDP),
    "A1.2 flat": trains(FlatDDP),
    "A1.3": trains(OverlappedDDP),
    "A1.4": sharded,
    "A1.5": trains(FSDP),
    "A2.4": trains(BucketedDDP),
}

if __name__ == "__main__":
    with process_group("cpu") as this_worker:
        CHECKS[sys.argv[1]](this_worker)
