"""The training step of any module on one fixed batch, for the same benchmarks as a GPT-2's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from types import MappingProxyType

import torch
from torch import Tensor, nn

from common.runtime.process_group import Worker


class ModuleStep:
    """Forward, backward and optimizer step of a module, each callable on its own.

    Args:
        model: what is trained; it is moved to the worker's device.
        loss_of: the loss of the batch, a scalar, under the module it is called with (the model,
            or DDP around it).
        lr: of SGD. At 0 every step computes the same.
    """

    note = ""
    recorded_settings: Mapping[str, object] = MappingProxyType({})

    def __init__(
        self,
        model: nn.Module,
        loss_of: Callable[[nn.Module], Tensor],
        worker: Worker,
        lr: float = 0.0,
    ) -> None:
        self.device = worker.device
        self.model = model.to(worker.device)
        self.forward_model: nn.Module = self.model
        self.loss_of = loss_of
        self.lr = lr

    def forward(self, model: nn.Module | None = None) -> Tensor:
        """The loss under ``model`` (by default the step's own), ready for backward."""
        return self.loss_of(model or self.forward_model)

    @cached_property
    def optimizer(self) -> torch.optim.Optimizer:
        """Made when first needed: torch's optimizers take seconds to import."""
        return torch.optim.SGD(self.model.parameters(), lr=self.lr)

    def optimize(self) -> None:
        """Update the parameters; gradients stay until ``zero_grad``."""
        self.optimizer.step()

    def zero_grad(self) -> None:
        """Forget the gradients, as the optimizers do by default (set to None)."""
        self.model.zero_grad(set_to_none=True)
