"""A1.5: fully sharded data parallelism, which gathers a weight only while it is used.

Each rank keeps one part of every weight, of its gradient and of its optimizer states. A unit's
weights are gathered before its forward pass and freed after it, and so again around its backward
pass, whose gradients are averaged and divided among the ranks (Rajbhandari et al. 2020, ZeRO stage
3; Zhao et al., "PyTorch FSDP", VLDB 2023).
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from common.exercises.naive_ddp import broadcast_state
from common.exercises.same_model import check_same_model

GATHERED_AHEAD = 2
"""Units that are gathered before they are needed, at most."""


class FSDP(nn.Module):
    """A model whose weights lie on all ranks in parts.

    Units are the elements of the model's ``nn.ModuleList``s; all else is the root, which stays
    gathered from the forward pass to the end of the backward pass. A module that owns a parameter
    of two or more dimensions is sharded, with all that it owns; other parameters, such as those of
    norms, are replicated. A shard is a flat part, padded with zeros where the ranks do not divide
    it. The parameters of ``module`` are the shards, under the names that they had; an optimizer is
    made of them. All ranks use the units in the same order.

    Args:
        module: the model, the same on all ranks but for its values; those of rank 0 are taken.
        compute_dtype: dtype of gathered weights, such as bfloat16; None leaves them as they are.
            Shards, gradients and the exchange of gradients keep the parameters' own dtype.
        group: the ranks that share the weights; None for all.

    Raises:
        UserError: on all ranks, where models differ, a parameter is not floating, or there is none.
    """

    def __init__(
        self,
        module: nn.Module,
        compute_dtype: torch.dtype | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        check_same_model(module, group)
        broadcast_state(module, group)
        self.module = module
        self.compute_dtype = compute_dtype
        self.group = group
        # BEGIN SOLUTION A1.5
        weights = weights_of(module, dist.get_rank(group), dist.get_world_size(group))
        self.weight_of = {weight.kept: weight for weight in weights}
        self.root, *self.blocks = [
            Unit([weight for weight in weights if weight.unit is owner], group)
            for owner in (None, *blocks_of(module))
        ]
        self.in_backward = [*reversed(self.blocks), self.root]
        """All units, in the order in which their gradients are exchanged on every rank."""
        self.exchanged = 0
        """Units of this order whose gradients are on their way."""
        for weight in weights:
            weight.make_full(compute_dtype)
        for index, block in enumerate(blocks_of(module)):
            block.register_forward_pre_hook(functools.partial(self.before_forward, index))
            # Activation checkpointing ends a block that it computes again by an exception.
            block.register_forward_hook(
                functools.partial(self.after_forward, index), always_call=True
            )
        # END SOLUTION

    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        """Calls the model; floating inputs are cast to the compute dtype."""
        # BEGIN SOLUTION A1.5
        self.root.gather()
        self.root.lend()
        try:
            return self.module(*(cast(each, self.compute_dtype) for each in inputs), **keywords)
        finally:
            self.root.take_back()
            if not torch.is_grad_enabled():
                self.root.free()
        # END SOLUTION

    def finish_gradient_synchronization(self) -> None:
        """Adds the mean over ranks to every gradient; all ranks call it after each backward pass.

        Then each parameter has a gradient of its own shape and dtype. Those of several backward
        passes add up.
        """
        # BEGIN SOLUTION A1.5
        self.exchange_until(len(self.in_backward))  # what this rank has not used: zeros
        for unit in self.in_backward:
            unit.take_gradients()
        self.exchanged = 0
        # END SOLUTION

    def gather_full_params(self) -> dict[str, Tensor]:
        """Returns all parameters by name, whole, in their own dtype; all ranks call it."""
        # BEGIN SOLUTION A1.5
        named = self.module.named_parameters(remove_duplicate=False)
        return {name: self.whole(parameter, parameter.detach()) for name, parameter in named}
        # END SOLUTION

    def is_sharded(self, parameter: nn.Parameter) -> bool:
        """Returns True if this rank has a part of a parameter of ``module`` only."""
        # BEGIN SOLUTION A1.5
        return self.weight_of[parameter].is_sharded
        # END SOLUTION

    @torch.no_grad()
    def whole(self, parameter: nn.Parameter, part: Tensor) -> Tensor:
        """Gathers a tensor that the ranks have in parts, as they have a parameter; a copy.

        All ranks call it.

        Args:
            parameter: one of ``module``'s.
            part: this rank's, such as of the parameter itself or of an optimizer's state for it.

        Returns:
            a tensor of the whole parameter's shape.
        """
        # BEGIN SOLUTION A1.5
        weight, parts = self.weight_of[parameter], part.detach()
        if weight.is_sharded:
            parts = torch.cat(all_parts(parts, self.group))
        return parts.flatten()[: weight.shape.numel()].view(weight.shape).clone()
        # END SOLUTION

    def part(self, parameter: nn.Parameter, whole: Tensor) -> Tensor:
        """Returns this rank's part of a tensor of a parameter's whole shape: ``whole`` undone."""
        # BEGIN SOLUTION A1.5
        if not self.is_sharded(parameter):
            return whole
        return part_of(whole, dist.get_rank(self.group), dist.get_world_size(self.group))
        # END SOLUTION

    @torch.no_grad()
    def gradient_norm(self) -> Tensor:
        """Returns the joint L2 norm of all whole gradients, a scalar; all ranks call it."""
        # BEGIN SOLUTION A1.5
        # What is replicated counts once. In float64, as a sum of 10⁷ float32 squares is off.
        device = next(iter(self.weight_of)).device
        squares = {
            is_sharded: torch.zeros((), dtype=torch.float64, device=device)
            for is_sharded in (True, False)
        }
        for parameter, weight in self.weight_of.items():
            if parameter.grad is not None:
                squares[weight.is_sharded] += parameter.grad.double().square().sum()
        dist.all_reduce(squares[True], group=self.group)
        return (squares[True] + squares[False]).sqrt()
        # END SOLUTION

    # BEGIN SOLUTION A1.5
    def before_forward(self, index: int, *_: Any) -> None:
        """Makes a block's weights whole, and begins to gather those of the blocks that follow."""
        self.blocks[index].gather()
        self.blocks[index].lend()
        if self.blocks[index].in_backward:  # computed again: those that follow are through
            return
        for ahead in self.blocks[index + 1 : index + 1 + GATHERED_AHEAD]:
            ahead.start_gathering()

    def after_forward(self, index: int, _module: nn.Module, _inputs: Any, output: Any) -> None:
        """Frees a block, which is gathered again when its output's gradient is there."""
        self.blocks[index].take_back()
        if self.blocks[index].in_backward:  # computed again, for its gradients
            return
        self.blocks[index].free()
        for tensor in output if isinstance(output, tuple) else (output,):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(functools.partial(self.before_backward, index))

    def before_backward(self, index: int, _gradient: Tensor) -> None:
        """Makes a block's weights whole again, and begins with those that come after it.

        The blocks behind it are through with their backward pass, whatever this rank has used of
        them. So gathers and exchanges have one order on all ranks.
        """
        self.exchange_until(len(self.blocks) - 1 - index)
        self.blocks[index].in_backward = True
        self.blocks[index].gather()
        for ahead in self.blocks[max(0, index - GATHERED_AHEAD) : index][::-1]:
            ahead.start_gathering()

    def exchange_until(self, end: int) -> None:
        """Launches the exchange of gradients that has not been, of the units before ``end``."""
        for unit in self.in_backward[self.exchanged : end]:
            unit.send_gradients()
            unit.free()
            self.exchanged += 1

    # END SOLUTION


# BEGIN SOLUTION A1.5
@dataclass(eq=False)
class Weight:
    """A parameter of the model.

    Attributes:
        kept: what this rank keeps and updates: a flat part, or all of it if it is replicated.
        shape: of the whole.
        unit: the block that it is gathered with; None for the root.
        places: the modules that have it, each with its name there.
        is_sharded: False if every rank keeps all of it.
        full: what the modules compute with. Its storage is empty while it is not needed.
    """

    kept: nn.Parameter
    shape: torch.Size
    unit: nn.Module | None
    places: list[tuple[nn.Module, str]]
    is_sharded: bool
    full: nn.Parameter = field(init=False)

    def make_full(self, dtype: torch.dtype | None) -> None:
        """Makes the whole weight: without memory, or sharing that of a replicated one."""
        whole = self.kept.detach()
        if self.is_sharded:
            whole = torch.empty(self.shape, dtype=dtype or self.kept.dtype, device=whole.device)
        self.full = nn.Parameter(whole, requires_grad=self.kept.requires_grad)
        self.free()

    def fill(self, parts: Tensor) -> None:
        """Fills the whole weight from the parts of all ranks, [ranks, elements of a part]."""
        self.full.untyped_storage().resize_(self.shape.numel() * self.full.element_size())
        # By way of .data: autograd would refuse a saved tensor that has changed.
        self.full.data.copy_(parts.flatten()[: self.shape.numel()].view(self.shape))

    def free(self) -> None:
        """Gives back the memory of the whole weight; autograd keeps the tensor itself."""
        if self.is_sharded:
            self.full.untyped_storage().resize_(0)

    def be_used(self, parameter: nn.Parameter) -> None:
        """Lets all modules that have the weight use ``parameter``."""
        for module, name in self.places:
            module._parameters[name] = parameter


class Unit:
    """Weights that are gathered, used and freed together."""

    def __init__(self, weights: Sequence[Weight], group: dist.ProcessGroup | None) -> None:
        self.weights, self.group = weights, group
        self.trained = [weight for weight in weights if weight.kept.requires_grad]
        self.is_whole = False
        self.in_backward = False
        """True from the moment that its output's gradient is there until its own are sent."""
        self.coming: list[tuple[list[Weight], Tensor, dist.Work]] = []
        """Gathers under way: weights of one dtype, the parts of all ranks."""
        self.sent: list[tuple[list[Weight], Tensor, dist.Work]] = []
        """Exchanges of gradients under way: weights of one dtype, the sums of this rank's parts."""

    @torch.no_grad()
    def start_gathering(self) -> None:
        """Launches the gathers, unless the weights are whole or coming."""
        if self.is_whole or self.coming:
            return
        for weights in by_dtype(weight for weight in self.weights if weight.is_sharded):
            own = torch.cat([weight.kept.to(weight.full.dtype) for weight in weights])
            parts = own.new_empty(dist.get_world_size(self.group) * own.numel())
            work = dist.all_gather_into_tensor(parts, own, group=self.group, async_op=True)
            self.coming.append((weights, parts, work))

    def gather(self) -> None:
        """Makes the weights whole."""
        self.start_gathering()
        for weights, parts, work in self.coming:
            work.wait()
            columns = parts.view(dist.get_world_size(self.group), -1)
            sizes = [weight.kept.numel() for weight in weights]
            for weight, column in zip(weights, columns.split(sizes, dim=1), strict=True):
                weight.fill(column)
        self.coming.clear()
        self.is_whole = True

    def lend(self) -> None:
        """Lets the modules use the whole weights."""
        for weight in self.weights:
            weight.be_used(weight.full)

    def take_back(self) -> None:
        """Lets the modules have what this rank keeps, as an optimizer and a state dict want it."""
        for weight in self.weights:
            weight.be_used(weight.kept)

    def free(self) -> None:
        """Gives back the memory of the whole weights."""
        for weight in self.weights:
            weight.free()
        self.is_whole = False

    @torch.no_grad()
    def send_gradients(self) -> None:
        """Launches the sums over ranks of the unit's gradients, in the parameters' own dtype."""
        self.in_backward = False
        world = dist.get_world_size(self.group)
        for weights in by_dtype(weight for weight in self.trained if weight.is_sharded):
            rows = []
            for weight in weights:
                # Zeros pad the last parts, and stand for what this rank has not used.
                padded = weight.kept.new_zeros(world * weight.kept.numel())
                if weight.full.grad is not None:
                    padded[: weight.shape.numel()] = weight.full.grad.flatten()
                rows.append(padded.view(world, -1))
                weight.full.grad = None
            all_rows = torch.cat(rows, dim=1).view(-1)
            own = all_rows.new_empty(all_rows.numel() // world)
            # SUM: the reduce-scatter of some versions of gloo does not divide.
            work = dist.reduce_scatter_tensor(own, all_rows, group=self.group, async_op=True)
            self.sent.append((weights, own, work))
        for weights in by_dtype(weight for weight in self.trained if not weight.is_sharded):
            parts = []
            for weight in weights:
                gradient = weight.full.grad
                parts.append(torch.zeros_like(weight.kept) if gradient is None else gradient)
                weight.full.grad = None
            own = torch.cat([part.flatten() for part in parts])
            work = dist.all_reduce(own, group=self.group, async_op=True)
            self.sent.append((weights, own, work))

    @torch.no_grad()
    def take_gradients(self) -> None:
        """Waits for the sums and adds the means to the gradients of what this rank keeps."""
        for _, _, work in self.coming:  # gathered ahead and not used
            work.wait()
        self.coming.clear()
        for weights, own, work in self.sent:
            work.wait()
            own /= dist.get_world_size(self.group)
            for weight, mean in zip(
                weights, own.split([weight.kept.numel() for weight in weights]), strict=True
            ):
                mean = mean.view_as(weight.kept)
                before = weight.kept.grad
                weight.kept.grad = mean.clone() if before is None else before + mean
        self.sent.clear()


def weights_of(module: nn.Module, rank: int, world: int) -> list[Weight]:
    """Shards a model's parameters in place; returns its weights, each once.

    A weight that several modules have belongs to the root if one of them does.
    """
    unit_of = {inside: block for block in blocks_of(module) for inside in block.modules()}
    weights: dict[nn.Parameter, Weight] = {}
    for each in module.modules():
        own = {name: p for name, p in each._parameters.items() if p is not None}
        is_sharded = any(parameter.dim() >= 2 for parameter in own.values())
        for name, parameter in own.items():
            if parameter not in weights:
                kept = parameter
                if is_sharded:
                    part = part_of(parameter.detach(), rank, world)
                    kept = nn.Parameter(part, requires_grad=parameter.requires_grad)
                unit = unit_of.get(each)
                weights[parameter] = Weight(kept, parameter.shape, unit, [], is_sharded)
            weight = weights[parameter]
            weight.places.append((each, name))
            if unit_of.get(each) is not weight.unit:
                weight.unit = None
    for weight in weights.values():
        weight.be_used(weight.kept)
    return list(weights.values())


def blocks_of(module: nn.Module) -> list[nn.Module]:
    """Returns the elements of the outermost module lists."""
    blocks: list[nn.Module] = []
    inside: set[nn.Module] = set()
    for each in module.modules():
        if isinstance(each, nn.ModuleList) and each not in inside:
            blocks += each
            inside.update(each.modules())
    return blocks


def part_of(whole: Tensor, rank: int, world: int) -> Tensor:
    """Returns a rank's part of a tensor, flat; the last ones end with zeros."""
    size = -(-whole.numel() // world)
    padded = whole.new_zeros(world * size)
    padded[: whole.numel()] = whole.flatten()
    return padded[rank * size : (rank + 1) * size].clone()


def by_dtype(weights: Iterable[Weight]) -> list[list[Weight]]:
    """Returns weights in groups that a collective can take together."""
    groups: dict[torch.dtype, list[Weight]] = {}
    for weight in weights:
        groups.setdefault(weight.kept.dtype, []).append(weight)
    return list(groups.values())


def all_parts(own: Tensor, group: dist.ProcessGroup | None) -> list[Tensor]:
    """Gathers the parts of all ranks."""
    parts = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, own, group=group)
    return parts


def cast(value: Any, dtype: torch.dtype | None) -> Any:
    """Returns a floating tensor in another dtype; anything else, or without a dtype, as it is."""
    is_floating = isinstance(value, Tensor) and value.is_floating_point()
    return value.to(dtype) if is_floating and dtype is not None else value


# END SOLUTION
