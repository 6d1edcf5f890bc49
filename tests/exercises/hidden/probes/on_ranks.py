"""Scenes on ranks: each trains or exchanges with a student's code and returns what came of it."""

from __future__ import annotations

import copy
import datetime
import functools
import operator
import resource
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from common.exercises.bucketed_ddp import BucketedDDP
from common.exercises.fsdp import FSDP
from common.exercises.naive_ddp import FlatDDP, NaiveDDP
from common.exercises.overlapped_ddp import OverlappedDDP
from common.exercises.ring_all_reduce import ring_all_reduce
from common.exercises.sharded_optimizer import ShardedOptimizer
from probes.models import (
    Timed,
    Wide,
    adamw,
    groups,
    layers,
    odd_model,
    sgd,
    stacked_model,
    tokens,
    trained,
)

WRAPPERS = {
    "naive": NaiveDDP,
    "flat": FlatDDP,
    "overlapped": OverlappedDDP,
    "bucketed": functools.partial(BucketedDDP, bucket_cap_mb=0.0005),
    "bucketed by default": BucketedDDP,
    "FSDP": FSDP,
    "bucketed to 1 MiB": functools.partial(BucketedDDP, bucket_cap_mb=1),
}
LOOK_S = 0.05
GROUP_TIMEOUT = datetime.timedelta(seconds=20)
PEER_TIMEOUT = datetime.timedelta(seconds=10)

torch.set_num_threads(1)


def begin() -> None:
    """Joins the group of all ranks."""
    dist.init_process_group("gloo", timeout=GROUP_TIMEOUT)


def state_of(model: nn.Module) -> dict[str, Tensor]:
    """Returns a copy of parameters and buffers."""
    return {name: value.clone() for name, value in model.state_dict().items()}


@contextmanager
def counted_all_reduces() -> Iterator[list]:
    """Counts all-reduces inside the block, whatever name they are called by.

    ``torch.distributed.all_reduce`` ends in this method of the group
    (torch/distributed/distributed_c10d.py, from 2.9 to 2.15).
    """
    # As the class holds it: what the class returns would not be bound to a group again.
    original, calls = vars(dist.ProcessGroup)["allreduce"], []

    def call(group: dist.ProcessGroup, *arguments, **keywords) -> dist.Work:
        calls.append(arguments)
        return original.__get__(group)(*arguments, **keywords)

    dist.ProcessGroup.allreduce = call
    try:
        yield calls
    finally:
        dist.ProcessGroup.allreduce = original


@contextmanager
def messages_in_order() -> Iterator[None]:
    """Makes sends and receives inside the block wait for their peers as over NCCL.

    NCCL runs a group's operations one after another, and a send of more than its buffers hold ends
    when the peer receives. Those of a batch are one operation. gloo's sends end when the peer
    receives, too, but the next operation does not wait for them, unless it is made to.
    """
    batch = dist.batch_isend_irecv.__code__

    def waiting(original: Callable, name: str) -> Callable:
        def call(group: dist.ProcessGroup, *arguments, **keywords) -> object:
            work, frame = original.__get__(group)(*arguments, **keywords), sys._getframe(1)
            while frame is not None and frame.f_code is not batch:
                frame = frame.f_back
            if frame is not None:
                return work
            try:
                work.wait(PEER_TIMEOUT)
            except RuntimeError:
                raise RuntimeError(f"deadlock over NCCL: a {name} waits for its peer") from None
            return SimpleNamespace(wait=lambda *_: True, is_completed=lambda: True)

        return call

    # As the class holds them: see ``counted_all_reduces``.
    originals = {name: vars(dist.ProcessGroup)[name] for name in ("send", "recv")}
    for name, original in originals.items():
        setattr(dist.ProcessGroup, name, waiting(original, name))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(dist.ProcessGroup, name, original)


def train(name: str, seed: int, steps: int) -> dict:
    """Trains with a wrapper; in each step another rank is the only one that uses the branch."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = odd_model(seed + rank)
    parameters = list(model.parameters())
    wrapped = WRAPPERS[name](model)
    kept = all(map(operator.is_, wrapped.module.parameters(), parameters))
    first, optimizer = state_of(wrapped.module), sgd(wrapped)
    for step in range(steps):
        wrapped(tokens(seed, step, rank), rank == step % ranks).backward()
        wrapped.finish_gradient_synchronization()
        optimizer.step()
        optimizer.zero_grad()
    return {"kept": kept, "first": first, "last": state_of(wrapped.module)}


def accumulate(name: str, seed: int, steps: int) -> dict:
    """Trains with two micro-batches a step, of which only the second may exchange anything."""
    rank = dist.get_rank()
    wrapped = WRAPPERS[name](odd_model(seed + rank))
    optimizer, early = sgd(wrapped), 0
    for step in range(steps):
        with wrapped.no_sync(), counted_all_reduces() as calls:
            (wrapped(tokens(seed, step, rank), True) / 2).backward()
        early += len(calls)
        (wrapped(tokens(seed, step + 10, rank), True) / 2).backward()
        wrapped.finish_gradient_synchronization()
        optimizer.step()
        optimizer.zero_grad()
    return {"calls": early, "last": state_of(wrapped.module)}


def overlap(name: str, read: Callable[[], None]) -> dict:
    """Returns what was launched when the last gradient was final, and in the end.

    The check reads what was sent when it is told to: before the backward pass, then, and in the
    end. It does not say what it read.
    """
    model, launched = layers(20, 128, 1).float(), []
    with counted_all_reduces() as calls:

        def look(_: nn.Parameter) -> None:
            launched.append(len(calls))
            if len(launched) == len(list(model.parameters())):
                read()

        for parameter in model.parameters():  # before the wrapper's own hooks
            parameter.register_post_accumulate_grad_hook(look)
        wrapped = WRAPPERS[name](model)
        loss = wrapped(torch.randn(3, 128)).sum()
        dist.barrier()
        read()
        loss.backward()
        wrapped.finish_gradient_synchronization()
    read()
    return {"launched": launched[-1], "calls": len(calls)}


def timed_steps(name: str, steps: int) -> list[float]:
    """Makes steps of a fixed time; returns each weight's mean gradient."""
    wrapped = made(name, Timed)
    for _ in range(steps):
        for parameter in wrapped.parameters():
            parameter.grad = None
        (wrapped(torch.ones(1)) * (1 + dist.get_rank())).backward()
        wrapped.finish_gradient_synchronization()
    return [parameter.grad.mean().item() for parameter in wrapped.parameters()]


@functools.cache
def made(name: str, model: type[nn.Module]) -> nn.Module:
    """Returns a wrapped model, which is made once and used in several calls."""
    return WRAPPERS[name](model())


def all_reduces(name: str, seed: int) -> int:
    """Returns the number of all-reduces of a step."""
    rank = dist.get_rank()
    wrapped = WRAPPERS[name](odd_model(seed + rank))
    with counted_all_reduces() as calls:
        wrapped(tokens(seed, 0, rank), True).backward()
        wrapped.finish_gradient_synchronization()
    return len(calls)


def buckets(cap_mb: float | None) -> list[list[int]]:
    """Returns the buckets of twenty layers; parameters are numbered in reverse."""
    wrapped = BucketedDDP(layers(20, 16, 1).float(), bucket_cap_mb=cap_mb)
    place = {id(p): index for index, p in enumerate(reversed(list(wrapped.module.parameters())))}
    return [[place[id(parameter)] for parameter in bucket] for bucket in wrapped.buckets]


def ring(tensors: list[list[Tensor]]) -> dict:
    """Sums this rank's tensors; one of them is not contiguous."""
    own = tensors[dist.get_rank()]
    own[-1] = own[-1].T
    with counted_all_reduces() as calls:
        for tensor in own:
            ring_all_reduce(tensor)
    return {"calls": len(calls), "sums": [tensor.contiguous() for tensor in own]}


def ring_in_order(count: int) -> Tensor:
    """Sums elements with messages in order; returns the sums."""
    tensor = torch.ones(count)
    dist.barrier()
    with messages_in_order():
        ring_all_reduce(tensor)
    return tensor


def ring_once(count: int) -> None:
    """Sums so many elements, and waits for all ranks."""
    ring_all_reduce(torch.ones(count))


def sharded(seed: int, steps: int, inputs: Tensor) -> dict:
    """Trains with ZeRO-1: groups, a late one, a schedule, a closure; then with its saved states."""
    rank = dist.get_rank()
    model = layers(5, 9, seed)
    own = ShardedOptimizer(groups(model), torch.optim.AdamW, lr=0.02)

    def closure(optimizer: torch.optim.Optimizer) -> Tensor:
        optimizer.zero_grad()
        loss = model(inputs).square().mean()
        loss.backward()
        return loss

    losses, states = [], []
    for step in range(steps):
        if step == 2:
            own.add_param_group({"params": model[4].parameters(), "lr": 0.03})
        if step == 4:
            own.param_groups[0]["lr"] = 0.1
        losses.append(own.step(functools.partial(closure, own)).item())
        states.append(state_of(model))
    owners = [[parameter.nbytes, owner] for parameter, owner in own.owners.items()]
    kept = sum(
        value.nbytes
        for state in (own.own.state.values() if own.own else ())
        for name, value in state.items()
        if name.startswith("exp_avg")
    )
    # A new one that takes over the states of this rank goes on in the same way.
    saved = own.state_dict()
    again = ShardedOptimizer(
        [{**group, "params": group["params"]} for group in own.param_groups], torch.optim.AdamW
    )
    again.load_state_dict(saved)
    for _ in range(2):
        again.step(functools.partial(closure, again))
        states.append(state_of(model))
    return {"rank": rank, "losses": losses, "states": states, "owners": owners, "kept": kept}


def refused(case: str, name: str) -> str:
    """Returns what a wrapper says of a model that cannot be trained together with the others'."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    whole = nn.Linear(4, 4)
    if rank == 0:
        whole.weight = nn.Parameter(torch.ones(4, 4, dtype=torch.int64), requires_grad=False)
    models = {
        "other shape": nn.Linear(4, 3 if rank == last else 4),
        "integers": whole,
        "fewer": nn.Linear(4, 4, bias=rank != 1),
        "none": nn.ReLU(),
    }
    try:
        WRAPPERS[name](models[case])
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def fsdp(seed: int, steps: int) -> dict:
    """Trains with two backward passes a step."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    wrapped = FSDP(stacked_model(seed + rank))
    names = list(wrapped.module.state_dict())
    optimizer, found = adamw(wrapped), []
    for step in range(steps):
        for part in range(2):
            batch = tokens(seed, step + 10 * part, rank)
            (wrapped(batch, rank == step % ranks) / 2).backward()
            wrapped.finish_gradient_synchronization()
        shapes = all(p.grad.shape == p.shape for p in trained(wrapped))
        norm = wrapped.gradient_norm()
        optimizer.step()
        optimizer.zero_grad()
        whole = {name: value.clone() for name, value in wrapped.gather_full_params().items()}
        found.append({"shapes": shapes, "norm": norm, "whole": whole})
    moments, round_trip = {}, True
    for name, parameter in wrapped.module.named_parameters():
        for kind in ("exp_avg", "exp_avg_sq") if parameter in optimizer.state else ():
            own = optimizer.state[parameter][kind]
            gathered = wrapped.whole(parameter, own)
            round_trip &= torch.equal(wrapped.part(parameter, gathered), own)
            moments[f"{name} {kind}"] = gathered.clone()
    kept = sum(parameter.numel() for parameter in wrapped.parameters())
    facts = {"names": names, "steps": found, "moments": moments}
    return facts | {"kept": kept, "round_trip": round_trip}


def resident_bytes() -> int:
    """Returns the memory of this process that is not shared with others."""
    _, resident, shared, *_ = Path("/proc/self/statm").read_text().split()
    return (int(resident) - int(shared)) * resource.getpagesize()


def settled_bytes() -> int:
    """Returns it once all ranks are here, and what they sent each other has arrived."""
    dist.barrier()
    time.sleep(4 * LOOK_S)
    return resident_bytes()


def fsdp_memory(with_gradients: bool) -> dict:
    """Returns the memory beyond the shards inside of blocks and between passes, in bytes."""
    torch.manual_seed(0)
    wrapped = FSDP(Wide())
    inputs = torch.randn(2, Wide.WIDTH)
    inside, between = [], []

    def look(*_: object) -> None:
        time.sleep(LOOK_S)  # for what was begun to arrive
        inside.append(resident_bytes() - start)

    for _ in range(2):  # the first time, PyTorch makes its own things
        start = resident_bytes()
        inside, between = [], []
        hooks = [block[0].register_forward_hook(look) for block in wrapped.module.blocks]
        with torch.set_grad_enabled(with_gradients):
            loss = wrapped(inputs)
        for hook in hooks:
            hook.remove()
        between.append(settled_bytes() - start)
        if with_gradients:
            loss.backward()
            wrapped.finish_gradient_synchronization()
            own = sum(parameter.grad.nbytes for parameter in trained(wrapped))
            between.append(settled_bytes() - start - own)
            for parameter in trained(wrapped):
                parameter.grad = None
        del loss
    return {"inside": inside, "between": between}


def fsdp_step() -> None:
    """Makes one step of a wide model."""
    wrapped = made("FSDP", Wide)
    wrapped(torch.ones(2, Wide.WIDTH)).backward()
    wrapped.finish_gradient_synchronization()


def fsdp_in_16_bits(seed: int) -> dict:
    """Returns the dtype of whole weights, and the norm of the gradients, which are in float32."""
    wrapped = FSDP(copy.deepcopy(stacked_model(seed).float()), compute_dtype=torch.bfloat16)
    dtypes = set()
    for block in wrapped.module.blocks:
        block.linear.register_forward_hook(
            lambda module, *_: dtypes.add(str(module.weight.dtype)), prepend=True
        )
    wrapped(tokens(seed, 0, 0), True).backward()
    wrapped.finish_gradient_synchronization()
    own = torch.cat([parameter.grad.flatten() for parameter in trained(wrapped)])
    replicated = [p.grad.flatten() for n, p in wrapped.named_parameters() if "norm" in n]
    return {
        "whole": sorted(dtypes),
        "gradients": str(own.dtype),
        "squares": own.square().sum().item(),
        "replicated": torch.cat(replicated).square().sum().item(),
    }


def fsdp_bits(seed: int, steps: int) -> list[dict[str, Tensor]]:
    """Trains in float32; returns the whole parameters after each step."""
    rank = dist.get_rank()
    wrapped = FSDP(stacked_model(seed).float())
    optimizer, found = sgd(wrapped), []
    for step in range(steps):
        wrapped(tokens(seed, step, rank), True).backward()
        wrapped.finish_gradient_synchronization()
        optimizer.step()
        optimizer.zero_grad()
        whole = wrapped.gather_full_params()
        found.append({name: value.clone() for name, value in whole.items()})
    return found
