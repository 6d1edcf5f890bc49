"""The multilayer perceptron of the synthetic scaling benchmark."""

from __future__ import annotations

from torch import Tensor, nn


class MLP(nn.Module):
    """``num_layers`` hidden layers with ReLU, then a linear output layer.

    Args:
        input_dim, hidden_dim, output_dim: widths.
        num_layers: hidden layers, at least 1.

    With the benchmark's defaults (4096, 4096, 3, 2048) it has 3 × (4096 × 4096 + 4096) +
    4096 × 2048 + 2048 = 58,734,592 parameters.
    """

    def __init__(self, input_dim: int, hidden_dim: int, num_layers: int, output_dim: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        width = input_dim
        for _ in range(num_layers):
            layers += [nn.Linear(width, hidden_dim), nn.ReLU()]
            width = hidden_dim
        self.layers = nn.Sequential(*layers, nn.Linear(width, output_dim))

    def forward(self, inputs: Tensor) -> Tensor:
        """Computes outputs [batch, output_dim] from inputs [batch, input_dim]."""
        return self.layers(inputs)
