"""Scenes on ranks: each trains or exchanges with a student's code and returns what came of it.

They run in the student's process, and nothing that they return is believed by itself: states depend
on what other ranks have, and can only be exchanged by way of the check.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from common.course.sandbox import judged_group
from common.exercises.bucketed_ddp import BucketedDDP
from common.exercises.fsdp import FSDP
from common.exercises.naive_ddp import FlatDDP, NaiveDDP
from common.exercises.overlapped_ddp import OverlappedDDP
from common.exercises.ring_all_reduce import ring_all_reduce
from common.exercises.sharded_optimizer import ShardedOptimizer
from probes.models import (
    Locked,
    Mixed,
    Timed,
    Wide,
    adamw,
    layers,
    odd_model,
    sgd,
    stacked_model,
    trained,
    values_of,
    with_values,
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
IN_16_BITS: list[FSDP] = []
GROUP_TIMEOUT = datetime.timedelta(seconds=20)

torch.set_num_threads(1)


def begin(exchange: dict[str, Callable] | None = None) -> None:
    """Joins the group of all ranks, by way of the check or over gloo."""
    if exchange is None:
        dist.init_process_group("gloo", timeout=GROUP_TIMEOUT)
    else:
        judged_group.join(exchange, timeout=GROUP_TIMEOUT)


def group_of(members: Sequence[int] | None) -> dist.ProcessGroup | None:
    """Returns the group of these ranks, of all if None; all ranks call it."""
    return None if members is None else dist.new_group(list(members))


def train(
    name: str,
    values: dict[str, Tensor],
    batches: Sequence[Sequence[Tensor]],
    with_branch: Sequence[bool],
    members: Sequence[int] | None = None,
) -> dict:
    """Trains with a wrapper, of which only the last micro-batch of a step exchanges anything.

    The optimizer is made before the wrapper, which has to keep the parameters that it updates.

    Args:
        name: of the wrapper.
        values: this rank's first parameters and buffers.
        batches: step → micro-batch → tokens.
        with_branch: step → whether this rank uses the branch.
        members: the ranks that train together; None for all.
    """
    group = group_of(members)
    if members is not None and dist.get_rank() not in members:
        return {}
    model = with_values(odd_model(), values)
    optimizer = sgd(model)
    wrapped = WRAPPERS[name](model, group=group)
    first = values_of(wrapped.module)
    for parts, uses_it in zip(batches, with_branch, strict=True):
        *without, last = parts
        for tokens in without:
            with wrapped.no_sync():
                (wrapped(tokens, uses_it) / len(parts)).backward()
        (wrapped(last, uses_it) / len(parts)).backward()
        wrapped.finish_gradient_synchronization()
        optimizer.step()
        optimizer.zero_grad()
    return {"first": first, "last": values_of(wrapped.module)}


def two_passes(name: str, values: dict[str, Tensor], tokens: Sequence[Tensor]) -> dict | str:
    """Makes two backward passes before one exchange; returns the gradients, or what is raised."""
    wrapped = WRAPPERS[name](with_values(odd_model(), values))
    try:
        for each in tokens:
            wrapped(each, True).backward()
    except RuntimeError as error:
        return f"RuntimeError: {error}"
    wrapped.finish_gradient_synchronization()
    return {name: p.grad for name, p in wrapped.module.named_parameters() if p.requires_grad}


def overlap(
    name: str, values: dict[str, Tensor], inputs: Tensor, ask: Callable, after_an_error: bool
) -> None:
    """Makes a step of which each layer's gradient needs what the check is asked for.

    Args:
        name: of the wrapper.
        values: this rank's first parameters.
        inputs: its samples.
        ask: tells the factors of a layer's gradient.
        after_an_error: whether an exception has left ``no_sync`` before.
    """
    model = with_values(Locked(20, 16, ask), values)
    wrapped = WRAPPERS[name](model)
    if after_an_error:
        with contextlib.suppress(ArithmeticError), wrapped.no_sync():
            raise ArithmeticError
    wrapped(inputs).backward()
    wrapped.finish_gradient_synchronization()


def timed_steps(name: str, steps: int, factor: float) -> list[float]:
    """Makes steps of a fixed time; returns each weight's mean gradient, of ranks' own factors."""
    wrapped = made(name, Timed)
    for _ in range(steps):
        for parameter in wrapped.parameters():
            parameter.grad = None
        (wrapped(torch.ones(1)) * factor).backward()
        wrapped.finish_gradient_synchronization()
    return [parameter.grad.mean().item() for parameter in wrapped.parameters()]


@functools.cache
def made(name: str, model: type[nn.Module], **sizes: int) -> nn.Module:
    """Returns a wrapped model, which is made once and used in several calls."""
    return WRAPPERS[name](model(**sizes))


def buckets(cap_mb: float | None, count: int, width: int) -> list[list[int]]:
    """Returns the buckets of so many layers; parameters are numbered in reverse."""
    wrapped = BucketedDDP(layers(count, width).float(), bucket_cap_mb=cap_mb)
    place = {id(p): index for index, p in enumerate(reversed(list(wrapped.module.parameters())))}
    return [[place[id(parameter)] for parameter in bucket] for bucket in wrapped.buckets]


def bucketed_step(cap_mb: float | None, count: int, width: int) -> None:
    """Makes a step of so many layers, whose buckets are seen by their sizes."""
    wrapped = BucketedDDP(layers(count, width).float(), bucket_cap_mb=cap_mb)
    wrapped(torch.ones(1, width)).sum().backward()
    wrapped.finish_gradient_synchronization()


def ring(tensors: Sequence[Tensor], members: Sequence[int] | None = None) -> list[Tensor]:
    """Sums this rank's tensors; the last one is not contiguous."""
    group = group_of(members)
    if members is not None and dist.get_rank() not in members:
        return []
    own = [*tensors[:-1], tensors[-1].T]
    for tensor in own:
        ring_all_reduce(tensor, group)
    return [tensor.contiguous() for tensor in own]


def ring_in_order(count: int) -> Tensor:
    """Sums elements with messages that wait for their peers as over NCCL; returns the sums.

    NCCL runs a group's operations one after another, and a send of more than its buffers hold ends
    when the peer receives. Those of a batch are one operation.
    """
    tensor = torch.ones(count)
    judged_group.JudgedGroup.in_order = True
    ring_all_reduce(tensor)
    return tensor


def sharded(
    values: dict[str, Tensor],
    inputs: Tensor,
    steps: int,
    merge: Callable[[dict], dict],
    members: Sequence[int] | None = None,
) -> dict:
    """Trains with ZeRO-1: groups, a late one, a schedule, a closure; then with its saved states.

    Args:
        values: the first parameters.
        inputs: samples, the same on all ranks.
        steps: number of steps before the states are saved.
        merge: takes this rank's saved states by parameter, returns those of all ranks.
        members: the ranks that share the states; None for all.
    """
    group = group_of(members)
    if members is not None and dist.get_rank() not in members:
        return {}
    model = with_values(Mixed(), values)
    own = ShardedOptimizer(model.groups(), torch.optim.AdamW, group=group, lr=0.02)

    def closure(optimizer: torch.optim.Optimizer) -> Tensor:
        optimizer.zero_grad()
        loss = model(inputs)
        loss.backward()
        return loss

    losses, states = [], []
    for step in range(steps):
        if step == 2:
            own.add_param_group(model.late_group())
        if step == 4:
            own.param_groups[0]["lr"] = 0.1
        losses.append(own.step(functools.partial(closure, own)).item())
        states.append(values_of(model))
    owners = [own.owners.get(parameter, -1) for parameter in model.parameters()]
    # One that begins with other settings goes on in the same way when it has taken these over.
    saved = own.state_dict()
    saved["state"] = merge(dict(saved["state"]))
    parts = [{"params": group["params"]} for group in own.param_groups]
    again = ShardedOptimizer(parts, torch.optim.AdamW, group=group, lr=0.5, weight_decay=0.3)
    again.load_state_dict(saved)
    kept = [parameter in again.state for parameter in model.parameters()]
    for step in range(3):
        if step == 1:
            again.param_groups[2]["lr"] = 0.05
        again.step(functools.partial(closure, again))
        states.append(values_of(model))
    return {"losses": losses, "states": states, "owners": owners, "kept": kept}


def sharded_memory(meet: Callable[[], None], count: int, width: int) -> None:
    """Makes two steps with large states; all ranks meet before and after."""
    model = Mixed(count, width).float()
    own = ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    meet()
    for _ in range(2):
        own.step()
    meet()


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


def fsdp(
    values: dict[str, Tensor],
    batches: Sequence[Sequence[Tensor]],
    with_branch: Sequence[bool],
    members: Sequence[int] | None = None,
) -> dict:
    """Trains with two backward passes a step; arguments as of ``train``."""
    group = group_of(members)
    if members is not None and dist.get_rank() not in members:
        return {}
    wrapped = FSDP(with_values(stacked_model(), values), group=group)
    names = list(wrapped.module.state_dict())
    optimizer, steps = adamw(wrapped), []
    for parts, uses_it in zip(batches, with_branch, strict=True):
        for tokens in parts:
            (wrapped(tokens, uses_it) / len(parts)).backward()
            wrapped.finish_gradient_synchronization()
        shapes = all(p.grad.shape == p.shape for p in trained(wrapped))
        norm = wrapped.gradient_norm()
        optimizer.step()
        optimizer.zero_grad()
        whole = {name: value.clone() for name, value in wrapped.gather_full_params().items()}
        steps.append({"shapes": shapes, "norm": norm, "whole": whole})
    moments, round_trip = {}, True
    for name, parameter in wrapped.module.named_parameters():
        for kind in ("exp_avg", "exp_avg_sq") if parameter in optimizer.state else ():
            own = optimizer.state[parameter][kind]
            gathered = wrapped.whole(parameter, own)
            round_trip &= torch.equal(wrapped.part(parameter, gathered), own)
            moments[f"{name} {kind}"] = gathered.clone()
    kept = sum(parameter.numel() for parameter in wrapped.parameters())
    facts = {"names": names, "steps": steps, "moments": moments}
    return facts | {"kept": kept, "round_trip": round_trip}


def fsdp_memory(ask: Callable, meet: Callable[[], None], with_gradients: bool, width: int) -> None:
    """Makes two passes of a wide model, of which the check sees the second.

    Args:
        ask: called in each block of the second pass.
        meet: waits for all ranks: before the model is made, before the second pass, after its
            forward part, and after the rest of it.
        with_gradients: whether the passes have a backward part.
        width: of the model's blocks.
    """
    meet()
    asks = [lambda: None]
    wrapped = FSDP(Wide(lambda: asks[-1](), width=width))
    inputs = torch.ones(2, width)
    for is_seen in (False, True):  # the first time, PyTorch makes its own things
        if is_seen:
            asks.append(ask)
            meet()
        with torch.set_grad_enabled(with_gradients):
            loss = wrapped(inputs)
        if is_seen:
            meet()
        if with_gradients:
            loss.backward()
            wrapped.finish_gradient_synchronization()
            for parameter in trained(wrapped):
                parameter.grad = None
        del loss
    meet()


def fsdp_step(width: int) -> None:
    """Makes one step of a model of many blocks, which is made once."""
    wrapped = made("FSDP", Wide, width=width)
    wrapped(torch.ones(2, width)).backward()
    wrapped.finish_gradient_synchronization()


def fsdp_in_16_bits(values: dict[str, Tensor], tokens: Tensor) -> dict:
    """Returns the dtype of whole weights, and the norm of the gradients, which are in float32."""
    model = with_values(stacked_model().float(), values)
    wrapped = FSDP(model, compute_dtype=torch.bfloat16)
    IN_16_BITS[:] = [wrapped]
    dtypes = set()
    for block in wrapped.module.blocks:
        block.linear.register_forward_hook(
            lambda module, *_: dtypes.add(str(module.weight.dtype)), prepend=True
        )
    wrapped(tokens, True).backward()
    wrapped.finish_gradient_synchronization()
    own = torch.cat([parameter.grad.flatten() for parameter in trained(wrapped)])
    replicated = [p.grad.flatten() for n, p in wrapped.named_parameters() if "norm" in n]
    return {
        "whole": sorted(dtypes),
        "gradients": str(own.dtype),
        "squares": own.square().sum().item(),
        "replicated": torch.cat(replicated).square().sum().item(),
    }


def gathered_of_16_bits() -> dict[str, Tensor]:
    """Returns the whole parameters of that model."""
    return dict(IN_16_BITS[0].gather_full_params())


def fsdp_bits(values: dict[str, Tensor], batches: Sequence[Tensor]) -> list[dict[str, Tensor]]:
    """Trains in float32; returns the whole parameters after each step."""
    wrapped = FSDP(with_values(stacked_model().float(), values))
    optimizer, states = sgd(wrapped, lr=0.01), []  # at 0.1 one draw of 300 ends in no number
    for tokens in batches:
        wrapped(tokens, True).backward()
        wrapped.finish_gradient_synchronization()
        optimizer.step()
        optimizer.zero_grad()
        whole = wrapped.gather_full_params()
        states.append({name: value.clone() for name, value in whole.items()})
    return states
