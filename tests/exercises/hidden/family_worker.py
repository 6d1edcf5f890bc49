"""Checks of the exercises on real ranks: ``family_worker.py CHECK``; a rank that fails raises.

The oracle is a twin: the same model in one process, in float64, which sees the samples of all ranks
and takes the mean of their losses. Every rank draws its own weights, so that a wrapper that does
not hand out rank 0's is seen.
"""

from __future__ import annotations

import copy
import functools
import importlib.util
import operator
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from common.errors import UserError

if "WRONG_SOLUTION" in os.environ:  # a file that takes the place of an exercise
    wrong = Path(os.environ["WRONG_SOLUTION"])
    for name in [name for name in sys.modules if name.startswith("common.exercises.")]:
        del sys.modules[name]  # they have taken the right one
    spec = importlib.util.spec_from_file_location(f"common.exercises.{wrong.stem}", wrong)
    sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[spec.name])

from common.exercises.bucketed_ddp import BucketedDDP
from common.exercises.fsdp import FSDP
from common.exercises.naive_ddp import FlatDDP, NaiveDDP
from common.exercises.overlapped_ddp import OverlappedDDP
from common.exercises.ring_all_reduce import ring_all_reduce
from common.exercises.sharded_optimizer import ShardedOptimizer
from common.runtime.process_group import Worker, process_group
from common.runtime.socket_bytes import sent_bytes

WRAPPERS = {
    "naive": NaiveDDP,
    "flat": FlatDDP,
    "overlapped": OverlappedDDP,
    "bucketed": functools.partial(BucketedDDP, bucket_cap_mb=0.0005),
    "bucketed by default": BucketedDDP,
}


class Odd(nn.Module):
    """A tied and a frozen weight, a buffer, a scalar, two dtypes, and a branch that not all use."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 7)
        self.body = nn.Sequential(*(nn.Linear(7, 7) for _ in range(4)))
        self.branch = nn.Linear(7, 7)
        self.frozen = nn.Parameter(torch.randn(7), requires_grad=False)
        self.scale = nn.Parameter(torch.randn(()))
        self.single = nn.Parameter(torch.randn(5, dtype=torch.float32))
        self.head = nn.Linear(7, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("shift", torch.randn(7))

    def forward(self, tokens: Tensor, with_branch: bool) -> Tensor:
        """Return the mean cross-entropy of predicting each token by itself."""
        x = self.embedding(tokens) + self.frozen + self.shift
        x = self.body(x).tanh() * self.scale
        if with_branch:
            x = x + self.branch(x)
        # Apart from the rest, so that its rounding to float32 is in no other gradient.
        apart = (self.single * tokens[:5]).sum().double() / 64
        return functional.cross_entropy(self.head(x), tokens) + apart


def odd_model(rank: int) -> Odd:
    """Return a model with weights of this rank's own, in float64 but for one parameter."""
    torch.manual_seed(1000 + rank)
    model = Odd().double()
    model.single.data = model.single.data.float()
    return model


def samples(step: int, rank: int) -> Tensor:
    """Return the tokens of a rank in a step."""
    return torch.randint(11, (6,), generator=torch.Generator().manual_seed(100 * step + rank))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1, momentum=0.9)


def check_equal(model: nn.Module, twin: nn.Module) -> None:
    """Raise unless every parameter and buffer is the twin's."""
    expected = twin.state_dict()
    assert list(model.state_dict()) == list(expected)
    for name, value in model.state_dict().items():
        tolerance = 1e-6 if value.dtype == torch.float32 else 1e-12
        torch.testing.assert_close(value, expected[name], rtol=tolerance, atol=tolerance)


def twin_of(name: str, worker: Worker) -> None:
    """Check that training is the twin's, and the first exchange rank 0's weights and buffers."""
    model, twin = odd_model(worker.rank), odd_model(0)
    parameters = list(model.parameters())
    wrapped = WRAPPERS[name](model)
    assert all(map(operator.is_, wrapped.module.parameters(), parameters))
    check_equal(wrapped.module, twin)
    optimizer, twins = sgd(wrapped), sgd(twin)
    for step in range(4):
        used = [rank == step % worker.world_size for rank in range(worker.world_size)]
        losses = [twin(samples(step, rank), used[rank]) for rank in range(worker.world_size)]
        torch.stack(losses).mean().backward()
        twins.step()
        twins.zero_grad()
        wrapped(samples(step, worker.rank), used[worker.rank]).backward()
        wrapped.finish_gradient_synchronization()
        optimizer.step()
        optimizer.zero_grad()
    check_equal(wrapped.module, twin)


def accumulation(name: str, worker: Worker) -> None:
    """Check two micro-batches a step, of which only the second exchanges anything."""
    wrapped, twin = WRAPPERS[name](odd_model(worker.rank)), odd_model(0)
    optimizer, twins = sgd(wrapped), sgd(twin)
    for step in range(3):
        losses = [
            twin(samples(step + 10 * part, rank), True) / 2
            for part in range(2)
            for rank in range(worker.world_size)
        ]
        (torch.stack(losses).sum() / worker.world_size).backward()
        twins.step()
        twins.zero_grad()
        with wrapped.no_sync(), counted("all_reduce") as calls:
            (wrapped(samples(step, worker.rank), True) / 2).backward()
        assert not calls
        (wrapped(samples(step + 10, worker.rank), True) / 2).backward()
        wrapped.finish_gradient_synchronization()
        optimizer.step()
        optimizer.zero_grad()
    check_equal(wrapped.module, twin)


class counted:
    """Count the calls of one of torch.distributed's functions inside the block."""

    def __init__(self, name: str) -> None:
        self.name, self.calls = name, []

    def __enter__(self) -> list:
        self.original = getattr(dist, self.name)

        def call(*arguments, **keywords):
            self.calls.append(arguments)
            return self.original(*arguments, **keywords)

        setattr(dist, self.name, call)
        return self.calls

    def __exit__(self, *_: object) -> None:
        setattr(dist, self.name, self.original)


def deep_model() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(16, 16) for _ in range(20)))


def launched_early(name: str, worker: Worker) -> None:
    """Check that at least 90 % of the all-reduces begin before the last gradient is final."""
    model, early = deep_model(), []
    with counted("all_reduce") as calls:
        for parameter in model.parameters():  # before the wrapper's own hooks
            parameter.register_post_accumulate_grad_hook(lambda _: early.append(len(calls)))
        wrapped = WRAPPERS[name](model)
        wrapped(torch.randn(3, 16)).sum().backward()
        wrapped.finish_gradient_synchronization()
    assert len(calls) > 10
    assert early[-1] >= 0.9 * len(calls), f"{early[-1]} of {len(calls)}"


def all_reduces(worker: Worker) -> None:
    """Check the number of all-reduces: one a gradient, one a dtype, one a bucket."""
    expected = {"naive": 13, "flat": 2, "bucketed by default": 2}
    for name, count in expected.items():
        wrapped = WRAPPERS[name](odd_model(worker.rank))
        with counted("all_reduce") as calls:
            wrapped(samples(0, worker.rank), True).backward()
            wrapped.finish_gradient_synchronization()
        assert len(calls) == count, (name, len(calls))


def buckets(worker: Worker) -> None:
    """Check that buckets are those that PyTorch's C++ makes of the parameters in reverse."""
    assign = dist._compute_bucket_assignment_by_size
    for cap_mb in (1e-6, 0.0005, 0.001, 0.003, 1, None):
        wrapped = BucketedDDP(deep_model(), bucket_cap_mb=cap_mb)
        parameters = list(reversed(list(wrapped.module.parameters())))
        limits = [2**20, 25 * 2**20] if cap_mb is None else [int(cap_mb * 2**20)]
        expected, _ = assign(parameters, limits, [False] * len(parameters))
        place = {id(parameter): index for index, parameter in enumerate(parameters)}
        assert [[place[id(p)] for p in bucket] for bucket in wrapped.buckets] == expected


def ring(worker: Worker) -> None:
    """Check sums of any size, and what is sent for them."""
    generator = torch.Generator().manual_seed(worker.rank)
    for shape in ((1,), (2,), (3, 5), (7,), (1000,), (4 * 2**20 + 1,)):
        tensor = torch.randn(shape, generator=generator)
        expected = tensor.double()
        dist.all_reduce(expected)
        with counted("all_reduce") as calls:
            ring_all_reduce(tensor)
        assert not calls
        torch.testing.assert_close(tensor.double(), expected, rtol=1e-5, atol=1e-5)
    crossed = torch.arange(12.0).view(3, 4).T * (worker.rank + 1)
    ring_all_reduce(crossed)
    factor = worker.world_size * (worker.world_size + 1) / 2
    assert torch.equal(crossed, torch.arange(12.0).view(3, 4).T * factor)
    whole = torch.full((10,), worker.rank, dtype=torch.int64)
    ring_all_reduce(whole)
    assert whole.tolist() == [worker.world_size * (worker.world_size - 1) // 2] * 10

    tensor = torch.randn(2**20, generator=generator)
    ring_all_reduce(tensor)  # connections are there from now on
    before = sent_bytes()
    ring_all_reduce(tensor)
    share = (sent_bytes() - before) / tensor.nbytes
    promised = 2 * (worker.world_size - 1) / worker.world_size
    assert abs(share / promised - 1) < 0.01, (share, promised)


def sharded(worker: Worker) -> None:
    """Check ZeRO-1 against the unsharded optimizer: groups, a late one, a schedule, a closure."""
    torch.manual_seed(5)
    model = nn.Sequential(*(nn.Linear(9, 9) for _ in range(5))).double()
    twin = copy.deepcopy(model)

    def groups(of: nn.Module) -> list[dict]:
        layers = list(of)
        return [
            {"params": layers[0].parameters(), "lr": 0.01},
            {"params": layers[1].parameters(), "weight_decay": 0.5},
            {"params": [*layers[2].parameters(), *layers[3].parameters()]},
        ]

    own = ShardedOptimizer(groups(model), torch.optim.AdamW, lr=0.02)
    theirs = torch.optim.AdamW(groups(twin), lr=0.02)
    inputs = torch.randn(4, 9, dtype=torch.float64)

    def closure(of: nn.Module, optimizer: torch.optim.Optimizer) -> Tensor:
        optimizer.zero_grad()
        loss = of(inputs).square().mean()
        loss.backward()
        return loss

    for step in range(6):
        if step == 2:
            for optimizer, of in ((own, model), (theirs, twin)):
                optimizer.add_param_group({"params": list(of)[4].parameters(), "lr": 0.03})
        if step == 4:
            for optimizer in (own, theirs):
                optimizer.param_groups[0]["lr"] = 0.1
        found = own.step(functools.partial(closure, model, own))
        expected = theirs.step(functools.partial(closure, twin, theirs))
        assert found.item() == expected.item()
        check_equal(model, twin)
    shares = [0] * worker.world_size
    for parameter, owner in own.owners.items():
        shares[owner] += parameter.nbytes
    assert max(shares) - min(shares) <= max(p.nbytes for p in model.parameters())
    kept = sum(
        value.nbytes
        for state in (own.own.state.values() if own.own else ())
        for name, value in state.items()
        if name.startswith("exp_avg")
    )
    assert kept == 2 * shares[worker.rank]

    # A new one that takes over the states of this rank goes on in the same way.
    saved = own.state_dict()
    again = ShardedOptimizer(
        [{**group, "params": group["params"]} for group in own.param_groups], torch.optim.AdamW
    )
    again.load_state_dict(saved)
    for _ in range(2):
        again.step(functools.partial(closure, model, again))
        theirs.step(functools.partial(closure, twin, theirs))
        check_equal(model, twin)


def refused(worker: Worker) -> None:
    """Check that models that cannot be trained together are refused on all ranks alike."""
    other = nn.Linear(4, 3 if worker.rank == worker.world_size - 1 else 4)
    whole = nn.Linear(4, 4)
    if worker.rank == 0:
        whole.weight = nn.Parameter(torch.ones(4, 4, dtype=torch.int64), requires_grad=False)
    fewer = nn.Linear(4, 4, bias=worker.rank != 1)
    cases = (
        (other, f"rank {worker.world_size - 1}: parameter weight (3×4, float32)"),
        (whole, "rank 0: parameter weight is int64"),
        (fewer, "parameter bias (4, float32)"),
        (nn.ReLU(), "rank 0: the model has no parameters"),
    )
    for model, words in cases:
        for wrapper in WRAPPERS.values():
            said = "nothing"
            try:
                wrapper(model)
            except UserError as error:
                said = str(error)
            assert words in said, said


class Block(nn.Module):
    """A norm, a matrix that no number of ranks divides, and a branch that not all ranks use."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(7)
        self.linear = nn.Linear(7, 7)
        self.branch = nn.Linear(7, 7, bias=False)

    def forward(self, x: Tensor, with_branch: bool) -> Tensor:
        weight, bias = self.norm.weight.to(x.dtype), self.norm.bias.to(x.dtype)
        x = x + self.linear(functional.layer_norm(x, (7,), weight, bias)).tanh()
        return x + self.branch(x) if with_branch else x


class Stacked(nn.Module):
    """A stack of blocks whose head is the embedding, used outside its own module."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 7)
        self.blocks = nn.ModuleList(Block() for _ in range(6))
        self.blocks[2].linear.weight.requires_grad = False
        self.norm = nn.LayerNorm(7)

    def forward(self, tokens: Tensor, with_branch: bool) -> Tensor:
        """Return the mean cross-entropy of predicting each token by itself."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, with_branch)
        x = functional.linear(x * self.norm.weight.to(x.dtype), self.embedding.weight)
        return functional.cross_entropy(x.to(self.norm.weight.dtype), tokens)


def stacked_model(seed: int) -> Stacked:
    torch.manual_seed(seed)
    return Stacked().double()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)


def whole_bytes(wrapped: FSDP) -> list[int]:
    """Return the bytes of each block's whole weights that are in memory, or on their way."""
    found = []
    for unit in wrapped.blocks:
        own = sum(w.full.untyped_storage().nbytes() for w in unit.weights if w.is_sharded)
        found.append(own + sum(parts.nbytes for _, parts, _ in unit.coming))
    return found


def fsdp(worker: Worker) -> None:
    """Check FSDP against the twin, with two backward passes a step, and what it keeps."""
    wrapped, twin = FSDP(stacked_model(100 + worker.rank)), stacked_model(100)
    assert list(wrapped.module.state_dict()) == list(twin.state_dict())
    optimizer, twins = adamw(wrapped), adamw(twin)
    block_bytes = 2 * 49 * 8 + 7 * 8
    at_most = 3 * (block_bytes + 3 * worker.world_size * 8)  # with padding
    most = []

    def look(*_: object) -> None:
        most.append(sum(whole_bytes(wrapped)))

    for block in wrapped.module.blocks:
        block.linear.register_forward_hook(look)
        block.linear.register_full_backward_hook(look)
    for step in range(4):
        for part in range(2):
            used = [rank == step % worker.world_size for rank in range(worker.world_size)]
            losses = [
                twin(samples(step + 10 * part, rank), used[rank])
                for rank in range(worker.world_size)
            ]
            (torch.stack(losses).mean() / 2).backward()
            loss = wrapped(samples(step + 10 * part, worker.rank), used[worker.rank]) / 2
            assert sum(whole_bytes(wrapped)) == 0
            loss.backward()
            wrapped.finish_gradient_synchronization()
            assert sum(whole_bytes(wrapped)) == 0
        for parameter in wrapped.parameters():
            if parameter.requires_grad:
                assert parameter.grad.shape == parameter.shape
        gradients = [p.grad.flatten() for p in twin.parameters() if p.grad is not None]
        torch.testing.assert_close(wrapped.gradient_norm(), torch.cat(gradients).norm())
        for each in (twins, optimizer):
            each.step()
            each.zero_grad()
        whole = wrapped.gather_full_params()
        for name, expected in twin.named_parameters():
            torch.testing.assert_close(whole[name], expected.detach(), rtol=1e-11, atol=1e-12)
    named = dict(wrapped.module.named_parameters())
    for name, expected in twin.named_parameters():
        for kind, of_twin in twins.state.get(expected, {}).items():
            if kind != "step":
                moments = optimizer.state[named[name]][kind]
                gathered = wrapped.whole(named[name], moments)
                torch.testing.assert_close(gathered, of_twin, rtol=1e-11, atol=1e-12)
                assert torch.equal(wrapped.part(named[name], gathered), moments)
    assert max(most) <= at_most, (max(most), at_most)
    assert max(most) > block_bytes, "nothing was gathered ahead"
    kept = sum(parameter.numel() for parameter in wrapped.parameters())
    all_of_it = sum(parameter.numel() for parameter in twin.parameters())
    assert kept < 1.4 * all_of_it / worker.world_size + 6 * 7 * 2 + 14
    with torch.no_grad():
        wrapped(samples(0, worker.rank), False)
    assert sum(whole_bytes(wrapped)) == 0


def fsdp_in_16_bits(worker: Worker) -> None:
    """Check that gathered weights are in the compute dtype, and gradients in float32."""
    model = stacked_model(3).float()
    wrapped = FSDP(copy.deepcopy(model), compute_dtype=torch.bfloat16)
    wrapped(samples(0, 0), True).backward()
    wrapped.finish_gradient_synchronization()
    model(samples(0, 0), True).backward()
    for unit in wrapped.blocks:
        assert all(w.full.dtype == torch.bfloat16 for w in unit.weights if w.is_sharded)
    own = torch.cat([p.grad.flatten() for p in wrapped.parameters() if p.requires_grad])
    assert own.dtype == torch.float32
    squares = own.square().sum()
    dist.all_reduce(squares)
    replicated = [p.grad.square().sum() for n, p in wrapped.named_parameters() if "norm" in n]
    norm = (squares - (worker.world_size - 1) * torch.stack(replicated).sum()).sqrt()
    expected = torch.stack(
        [p.grad.square().sum() for p in model.parameters() if p.grad is not None]
    )
    assert abs(norm / expected.sum().sqrt() - 1) < 0.03


def fsdp_bits(worker: Worker) -> None:
    """Check that two ranks are the mean of two halves in one process, to the last bit."""
    if worker.world_size != 2:  # of more, the order of sums is the ring's
        return
    wrapped, twin = FSDP(stacked_model(7).float()), stacked_model(7).float()
    optimizers = [sgd(model) for model in (wrapped, twin)]
    for step in range(4):
        wrapped(samples(step, worker.rank), True).backward()
        wrapped.finish_gradient_synchronization()
        trained = [p for p in twin.parameters() if p.requires_grad]
        halves = [
            torch.autograd.grad(twin(samples(step, rank), True), trained, materialize_grads=True)
            for rank in range(2)
        ]
        for parameter, one, other in zip(trained, *halves, strict=True):
            parameter.grad = (one + other) / 2
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        whole = wrapped.gather_full_params()
        for name, expected in twin.named_parameters():
            assert torch.equal(whole[name], expected.detach()), (step, name)


CHECKS = {"fsdp": fsdp, "fsdp_in_16_bits": fsdp_in_16_bits, "fsdp_bits": fsdp_bits}
CHECKS |= {
    "buckets": buckets,
    "all_reduces": all_reduces,
    "ring": ring,
    "sharded": sharded,
    "refused": refused,
}
CHECKS |= {f"twin of {name}": functools.partial(twin_of, name) for name in WRAPPERS}
CHECKS |= {
    f"{kind} {name}": functools.partial(check, name)
    for kind, check in (("accumulation", accumulation), ("early", launched_early))
    for name in ("overlapped", "bucketed")
}

if __name__ == "__main__":
    with process_group("cpu") as this_worker:
        for check in sys.argv[1:]:
            CHECKS[check](this_worker)
