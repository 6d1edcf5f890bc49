"""A1.4: an optimizer whose states are divided among the ranks (ZeRO, stage 1).

AdamW keeps two numbers for each weight, and every rank of data parallelism the same ones. Here each
rank updates only the parameters that it owns, and sends them to the others (Rajbhandari et al.
2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", section 5.1).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn


class ShardedOptimizer(torch.optim.Optimizer):
    """An optimizer of which each rank has the states of its own parameters only.

    Gradients are the same on all ranks (data parallelism averages them), and so are the parameters
    after a step: those of the unsharded optimizer. The ranks' shares, in bytes, differ by no more
    than the largest tensor. ``state`` has the states of this rank's parameters, and so has
    ``state_dict``, with the settings of all groups.

    Args:
        params: parameters, or groups of them with settings of their own, the same on all ranks.
        optimizer_class: such as ``torch.optim.AdamW``; one that treats each parameter by itself.
        group: the ranks that share the states; None for all.
        settings: the optimizer's, such as ``lr``. A group's settings may be changed at any time.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter] | Iterable[dict[str, Any]],
        optimizer_class: type[torch.optim.Optimizer],
        group: dist.ProcessGroup | None = None,
        **settings: Any,
    ) -> None:
        self.optimizer_class = optimizer_class
        self.settings = settings
        self.group = group
        self.own: torch.optim.Optimizer | None = None
        """The optimizer of this rank's parameters; None as long as it has none."""
        self.owners: dict[nn.Parameter, int] = {}
        """Parameter → the rank in the group that updates it."""
        # BEGIN SOLUTION A1.4
        self.shares_bytes = [0] * dist.get_world_size(group)
        self.groups_of_own: list[int] = []
        # END SOLUTION
        # Parameter groups have all settings of the optimizer, those left at their defaults, too.
        defaults = optimizer_class([nn.Parameter(torch.empty(0))], **settings).defaults
        super().__init__(params, defaults)  # calls add_param_group for each group

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds parameters, at any time; each goes to the rank that has least."""
        super().add_param_group(param_group)
        # BEGIN SOLUTION A1.4
        group = self.param_groups[-1]
        mine = []
        for parameter in group["params"]:
            owner = min(range(len(self.shares_bytes)), key=self.shares_bytes.__getitem__)
            self.shares_bytes[owner] += parameter.numel() * parameter.element_size()
            self.owners[parameter] = owner
            if owner == dist.get_rank(self.group):
                mine.append(parameter)
        if not mine:
            return
        own_group = {name: value for name, value in group.items() if name != "params"}
        own_group |= {"params": mine}
        if self.own is None:
            self.own = self.optimizer_class([own_group], **self.settings)
        else:
            self.own.add_param_group(own_group)
        self.groups_of_own.append(len(self.param_groups) - 1)
        # END SOLUTION

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates this rank's parameters and takes the others'; returns the closure's loss."""
        # BEGIN SOLUTION A1.4
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self.own is not None:
            for own_group, index in zip(self.own.param_groups, self.groups_of_own, strict=True):
                changed = {k: v for k, v in self.param_groups[index].items() if k != "params"}
                own_group.update(changed)  # a schedule may have changed the learning rate
            self.own.step()
            self.state = self.own.state
        self.send_parameters()
        return loss
        # END SOLUTION

    @torch.no_grad()
    def send_parameters(self) -> None:
        """Gives every rank each parameter as its owner has it; all ranks call it."""
        # BEGIN SOLUTION A1.4
        works = []
        for parameter, owner in self.owners.items():
            root = owner if self.group is None else dist.get_global_rank(self.group, owner)
            own = parameter.detach()
            works.append(dist.broadcast(own, root, group=self.group, async_op=True))
        for work in works:
            work.wait()
        # END SOLUTION

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over settings and the states of this rank's parameters, as ``state_dict`` has them.

        Settings of the groups may be changed afterwards, too. States of other parameters may be
        missing, or there; they are not kept.
        """
        super().load_state_dict(state_dict)
        # BEGIN SOLUTION A1.4
        if self.own is not None:
            for group in self.own.param_groups:
                for parameter in group["params"]:
                    if parameter in self.state:
                        self.own.state[parameter] = self.state[parameter]
        self.state = self.own.state if self.own is not None else {}
        # END SOLUTION
