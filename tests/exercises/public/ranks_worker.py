"""Small checks on ranks: ``ranks_worker.py CHECK``; a rank that fails raises.

Each check imports the exercise that it is of, so that another one's mistake does not concern it.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from common.runtime.group.process_group import Worker, process_group

Wrap = Callable[[nn.Module], nn.Module]
Check = Callable[[Worker], None]


class Small(nn.Module):
    """Two layers in a stack."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: Tensor, with_branch: bool = True) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x.square().mean()


class Mixed(nn.Module):
    """A tied and a frozen weight, buffers, two dtypes, and a branch that not all ranks use."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.body = nn.Sequential(*(nn.Linear(4, 4) for _ in range(8)))
        self.branch = nn.Linear(4, 4)
        self.last = nn.Linear(4, 4)
        self.last.weight = self.first.weight
        self.frozen = nn.Parameter(torch.randn(4), requires_grad=False)
        self.register_buffer("shift", torch.randn(4))
        self.register_buffer("scale", torch.randn(4), persistent=False)
        self.single = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor, with_branch: bool = True) -> Tensor:
        x = self.body(self.first(x) + self.frozen + self.shift).tanh() * self.scale
        if with_branch:
            x = x + self.branch(x)
        # In float32, and apart from the rest.
        return self.last(x).square().mean() + (self.single * 0.25).sum().double() / 64


def model_of(kind: type[nn.Module], seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = kind().double()
    if kind is Mixed:
        model.single.data = model.single.data.float()
    return model


def samples(step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(3, 4, generator=generator, dtype=torch.float64)


def same(value: Tensor, expected: Tensor, words: str) -> None:
    """Raises unless two tensors are equal but for rounding; ``words`` say what they are."""
    ranks = f"{words}, on {dist.get_world_size()} ranks"
    assert value.shape == expected.shape, f"{ranks}: its shape is {tuple(value.shape)}"
    tolerance = 1e-5 if value.dtype == torch.float32 else 1e-9
    is_same = torch.allclose(value.detach(), expected.detach(), rtol=tolerance, atol=tolerance)
    assert is_same, f"{ranks}: not what one process with all samples has"


@contextmanager
def counted_all_reduces() -> Iterator[list[int]]:
    """Collects the elements of each all-reduce in the block."""
    sizes, all_reduce = [], dist.all_reduce

    def counted(tensor: Tensor, *arguments, **keywords):
        sizes.append(tensor.numel())
        return all_reduce(tensor, *arguments, **keywords)

    with mock.patch.object(dist, "all_reduce", counted):
        yield sizes


def naive(module: nn.Module) -> nn.Module:
    from common.exercises.naive_ddp import NaiveDDP

    return NaiveDDP(module)


def flat(module: nn.Module) -> nn.Module:
    from common.exercises.naive_ddp import FlatDDP

    return FlatDDP(module)


def overlapped(module: nn.Module) -> nn.Module:
    from common.exercises.overlapped_ddp import OverlappedDDP

    return OverlappedDDP(module)


def bucketed(module: nn.Module) -> nn.Module:
    from common.exercises.bucketed_ddp import BucketedDDP

    return BucketedDDP(module, bucket_cap_mb=300 / 2**20)


def fsdp(module: nn.Module) -> nn.Module:
    from common.exercises.fsdp import FSDP

    return FSDP(module)


def ring(worker: Worker) -> None:
    """Sums tensors of odd sizes in place, without a ready-made all-reduce."""
    from common.exercises.ring_all_reduce import ring_all_reduce

    refused = AssertionError("dist.all_reduce is called")
    factor = worker.world_size * (worker.world_size + 1) // 2
    for words, tensor in (
        ("10 elements", torch.arange(10.0)),
        ("fewer elements than ranks", torch.ones(worker.world_size - 1)),
        ("integers", torch.arange(7)),
        ("a transposed matrix", torch.arange(12.0).reshape(3, 4).T),
    ):
        expected = tensor * factor
        tensor *= worker.rank + 1
        with mock.patch.object(dist, "all_reduce", side_effect=refused):
            ring_all_reduce(tensor)
        same(tensor.double(), expected.double(), f"the sum of {words}")


def trains(wrap: Wrap, kind: type[nn.Module] = Mixed) -> Check:
    """Makes a check that training is that of one process with all samples and rank 0's weights."""

    def check(worker: Worker) -> None:
        twin = model_of(kind, 0)
        wrapped = wrap(model_of(kind, worker.rank))
        if kind is Mixed:
            states, expected = (
                dict(model.named_parameters()) | dict(model.named_buffers())
                for model in (wrapped.module, twin)
            )
            for name, value in states.items():
                same(value, expected[name], f"{name}, before the first step")
        optimizers = [torch.optim.SGD(model.parameters(), 0.5) for model in (wrapped, twin)]
        for step in range(3):
            uses = [rank == step % worker.world_size for rank in range(worker.world_size)]
            losses = [twin(samples(step, rank), uses[rank]) for rank in range(worker.world_size)]
            torch.stack(losses).mean().backward()
            wrapped(samples(step, worker.rank), uses[worker.rank]).backward()
            wrapped.finish_gradient_synchronization()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            weights = dict(wrapped.module.named_parameters())
            if hasattr(wrapped, "gather_full_params"):
                weights = wrapped.gather_full_params()
            for name, expected in twin.named_parameters():
                same(weights[name], expected, f"{name}, after step {step + 1}")

    return check


def accumulates(wrap: Wrap) -> Check:
    """Makes a check of two micro-batches, the first under ``no_sync``, which sends nothing."""

    def check(worker: Worker) -> None:
        wrapped, twin = wrap(model_of(Mixed, worker.rank)), model_of(Mixed, 0)
        for step in range(2):
            for part in range(2):
                for rank in range(worker.world_size):
                    (twin(samples(2 * step + part, rank)) / worker.world_size).backward()
            with counted_all_reduces() as sizes, wrapped.no_sync():
                wrapped(samples(2 * step, worker.rank)).backward()
            assert not sizes, f"{len(sizes)} all-reduces under no_sync"
            wrapped(samples(2 * step + 1, worker.rank)).backward()
            wrapped.finish_gradient_synchronization()
            for (name, parameter), expected in zip(
                wrapped.module.named_parameters(), twin.parameters(), strict=True
            ):
                if expected.requires_grad:
                    words = f"gradient of {name}, two micro-batches, step {step + 1}"
                    same(parameter.grad, expected.grad, words)
                    parameter.grad = expected.grad = None

    return check


def sends_early(wrap: Wrap) -> Check:
    """Makes a check that most all-reduces are launched before the last gradient is final."""

    def check(worker: Worker) -> None:
        torch.manual_seed(0)
        module = nn.Sequential(*(nn.Linear(16, 16) for _ in range(12)))
        launched = []
        last = next(module.parameters())  # of the first layer, whose gradients come last
        wrapped = wrap(module)
        with counted_all_reduces() as sizes:
            last.register_hook(lambda _: launched.append(sum(sizes)))
            for _ in range(2):
                wrapped(torch.ones(2, 16)).square().mean().backward()
                wrapped.finish_gradient_synchronization()
        total = sum(parameter.numel() for parameter in module.parameters())
        assert sum(sizes) == 2 * total, f"{sum(sizes)} of {2 * total} elements are reduced"
        early = launched[1] - total
        assert early >= 0.8 * total, (
            f"{early} of {total} elements are sent before the last gradient"
        )

    return check


def counts(worker: Worker) -> None:
    """Counts the all-reduces of a step: one a gradient, or one a dtype."""
    gradients = sum(parameter.requires_grad for parameter in model_of(Mixed, 0).parameters())
    for wrap, expected in ((naive, gradients), (flat, 2)):
        wrapped = wrap(model_of(Mixed, worker.rank))
        wrapped(samples(0, worker.rank)).backward()
        with counted_all_reduces() as sizes:
            wrapped.finish_gradient_synchronization()
        name = type(wrapped).__name__
        assert len(sizes) == expected, f"{name} makes {len(sizes)} all-reduces in a step"


def groups_of(model: Small) -> list[dict]:
    """Returns a group for each layer, with a learning rate of its own."""
    rates = zip(model.layers, (0.1, 0.02), strict=True)
    return [{"params": list(layer.parameters()), "lr": rate} for layer, rate in rates]


def sharded(model: nn.Module) -> torch.optim.Optimizer:
    """Makes the sharded optimizer of two groups."""
    from common.exercises.sharded_optimizer import ShardedOptimizer

    return ShardedOptimizer(groups_of(model), torch.optim.AdamW, weight_decay=0.1)


def optimizes(worker: Worker) -> None:
    """Compares some steps of the sharded optimizer with AdamW's; the learning rate changes."""
    model = model_of(Small, 0)
    twin = copy.deepcopy(model)
    optimizers = sharded(model), torch.optim.AdamW(groups_of(twin), weight_decay=0.1)
    for step in range(4):
        for trained, optimizer in zip((model, twin), optimizers, strict=True):
            if step == 2:
                optimizer.param_groups[0]["lr"] = 0.3
            optimizer.zero_grad()
            trained(samples(step, 0)).backward()
            optimizer.step()
        for (name, value), expected in zip(
            model.named_parameters(), twin.parameters(), strict=True
        ):
            same(value, expected, f"{name}, after step {step + 1}")


def shards(worker: Worker) -> None:
    """Looks at who owns what, and at the bytes of the states that a rank keeps."""
    model = model_of(Small, 0)
    optimizer = sharded(model)
    model(samples(0, 0)).backward()
    optimizer.step()
    parameters = list(model.parameters())
    owners = optimizer.owners
    are_all = {*map(id, owners)} == {*map(id, parameters)}
    assert are_all, f"{len(owners)} of {len(parameters)} parameters have an owner"
    shares = [
        sum(parameter.nbytes for parameter in parameters if owners[parameter] == rank)
        for rank in range(worker.world_size)
    ]
    largest = max(parameter.nbytes for parameter in parameters)
    assert max(shares) - min(shares) <= largest, f"shares of {shares} bytes"
    states = optimizer.own.state.values() if optimizer.own else ()
    kept = sum(state["exp_avg"].nbytes for state in states)
    words = f"rank {worker.rank} owns {shares[worker.rank]} bytes, and keeps states of {kept}"
    assert kept == shares[worker.rank], words


def keeps_a_part(worker: Worker) -> None:
    """Looks at the elements that a rank has of all weights between steps."""
    model = model_of(Small, 0)
    total = sum(parameter.numel() for parameter in model.parameters())
    wrapped = fsdp(model)
    wrapped(samples(0, worker.rank)).backward()
    wrapped.finish_gradient_synchronization()
    kept = sum(parameter.numel() for parameter in wrapped.parameters())
    most = total / worker.world_size + len(list(model.parameters()))  # with padding
    assert kept <= most, f"a rank keeps {kept} of {total} elements, on {worker.world_size} ranks"


def buckets(worker: Worker) -> None:
    """Compares the buckets with those of A2.1 over the parameters in reverse."""
    from common.exercises.bucket_assignment import assign_buckets

    module = nn.Sequential(*(nn.Linear(4, 4) for _ in range(6)))
    wrapped = bucketed(module)
    parameters = list(reversed(list(module.parameters())))
    expected = assign_buckets([parameter.nbytes for parameter in parameters], 300)
    numbers = {id(parameter): index for index, parameter in enumerate(parameters)}
    made = [[numbers[id(parameter)] for parameter in bucket] for bucket in wrapped.buckets]
    assert made == expected, f"{len(made)} buckets, which are not those of assign_buckets"
    with counted_all_reduces() as sizes:
        wrapped(torch.ones(2, 4)).square().mean().backward()
        wrapped.finish_gradient_synchronization()
    assert len(sizes) == len(expected), f"{len(sizes)} all-reduces for {len(expected)} buckets"


CHECKS = {
    "A1.1 sums": ring,
    "A1.2 naive trains": trains(naive),
    "A1.2 flat trains": trains(flat),
    "A1.2 counts": counts,
    "A1.3 trains": trains(overlapped),
    "A1.3 accumulates": accumulates(overlapped),
    "A1.3 sends early": sends_early(overlapped),
    "A1.4 optimizes": optimizes,
    "A1.4 shards": shards,
    "A1.5 trains": trains(fsdp, Small),
    "A1.5 keeps a part": keeps_a_part,
    "A2.4 trains": trains(bucketed),
    "A2.4 accumulates": accumulates(bucketed),
    "A2.4 sends early": sends_early(bucketed),
    "A2.4 buckets": buckets,
}

if __name__ == "__main__":
    with process_group("cpu") as this_worker:
        CHECKS[sys.argv[1]](this_worker)
