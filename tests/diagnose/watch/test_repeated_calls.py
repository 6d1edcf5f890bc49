"""Calls of layers with the same input: which they are, and passes that compute them once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from ddplab_watch.repeated_calls import RepeatedCalls
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Energy(nn.Module):
    """Calls its network once for energies and once for forces."""

    def __init__(self, changed: float, checkpointed: bool = False) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        self.changed, self.checkpointed = changed, checkpointed
        self.computed = 0
        for layer in (self.network[0], self.network[2]):
            layer.forward = self.counting(layer.forward)

    def counting(self, forward: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        def counted(values: Tensor) -> Tensor:
            self.computed += 1
            return forward(values)

        return counted

    def energy(self, values: Tensor) -> Tensor:
        if self.checkpointed:
            return checkpoint(self.network, values, use_reentrant=False)
        return self.network(values)

    def forward(self, values: Tensor) -> Tensor:
        return self.energy(values).sum() + 2 * self.energy(values + self.changed).sum()


def gradients_of(model: Energy) -> list[Tensor]:
    """Returns the gradients of a pass."""
    model.computed = 0
    batch = torch.arange(12.0).reshape(3, 4).requires_grad_()
    return [*torch.autograd.grad(model(batch), [*model.parameters(), batch])]


@pytest.mark.parametrize(
    ("changed", "checkpointed", "repeated"), [(0.0, False, 2), (1e-3, False, 0), (0.0, True, 0)]
)
def test_a_network_that_is_run_twice_is_computed_once(
    changed: float, checkpointed: bool, repeated: int
) -> None:
    torch.manual_seed(0)
    model = Energy(changed, checkpointed)
    own = [vars(layer)["forward"] for layer in (model.network[0], model.network[2])]
    repeats = RepeatedCalls(model)
    with repeats.looked_for():
        expected = gradients_of(model)
    # Checkpointing computes in the backward pass again what the forward pass did.
    calls = 4 + 4 * checkpointed
    assert (repeats.calls, repeats.repeated) == (calls, repeated)
    for _ in range(2):
        with repeats.once():
            found = gradients_of(model)
        assert model.computed == calls - repeated
        torch.testing.assert_close(found, expected)
    assert own == [vars(layer)["forward"] for layer in (model.network[0], model.network[2])]
    gradients_of(model)
    assert model.computed == calls


def test_arguments_by_name_and_other_values_tell_calls_apart() -> None:
    class Scaled(nn.Linear):
        def forward(self, values: Tensor, scale: float = 1.0) -> Tensor:
            return super().forward(values) * scale

    layer, values = Scaled(2, 2), torch.ones(1, 2)
    repeats = RepeatedCalls(nn.Sequential(layer))
    with repeats.looked_for():
        for scale in (2.0, 3.0, 2.0):
            layer(values, scale=scale)
    assert repeats.earlier == {layer: {2: 0}}
