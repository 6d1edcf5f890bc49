"""Models of the checks on ranks, which the check's twin is made of, too.

A rank is told its own values and samples, and no other's, nor what they are drawn from.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional


class Odd(nn.Module):
    """A tied and a frozen weight, buffers, a scalar, two dtypes, a branch that not all use.

    One buffer is in no state dict, and one weight is used by nobody.
    """

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
        self.register_buffer("mask", torch.randn(7), persistent=False)
        self.unused = nn.Linear(3, 2, bias=False)

    def forward(self, tokens: Tensor, with_branch: bool) -> Tensor:
        """Returns the mean cross-entropy of predicting each token by itself."""
        x = (self.embedding(tokens) + self.frozen + self.shift) * self.mask
        x = self.body(x).tanh() * self.scale
        if with_branch:
            x = x + self.branch(x)
        # Apart from the rest, so that its rounding to float32 is in no other gradient.
        apart = (self.single * tokens[:5]).sum().double() / 64
        return functional.cross_entropy(self.head(x), tokens) + apart


class Block(nn.Module):
    """A norm, a matrix that no number of ranks divides, and a branch that not all ranks use."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(7)
        self.linear = nn.Linear(7, 7)
        self.branch = nn.Linear(7, 7, bias=False)

    def forward(self, x: Tensor, with_branch: bool) -> Tensor:
        """Maps [tokens, 7] to the same shape."""
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
        """Returns the mean cross-entropy of predicting each token by itself."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, with_branch)
        x = functional.linear(x * self.norm.weight.to(x.dtype), self.embedding.weight)
        return functional.cross_entropy(x.to(self.norm.weight.dtype), tokens)


class Asking(nn.Module):
    """A matrix whose product is computed when the check has answered."""

    def __init__(self, width: int, ask: Callable[[], None]) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width, bias=False)
        self.ask = ask

    def forward(self, x: Tensor) -> Tensor:
        """Returns the product."""
        self.ask()
        return self.linear(x)


class Wide(nn.Module):
    """A stack of wide blocks, whose weights can be told in a process's memory.

    Args:
        ask: called in each block, while its weight is whole.
        width: of the blocks.
    """

    COUNT = 24

    def __init__(self, ask: Callable[[], None] = lambda: None, *, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Asking(width, ask) for _ in range(self.COUNT))

    def forward(self, x: Tensor) -> Tensor:
        """Returns a mean square."""
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


class Waiting(torch.autograd.Function):
    """A product whose backward pass takes a time, whatever the machine is doing."""

    @staticmethod
    def forward(context, x: Tensor, weight: Tensor, seconds: float) -> Tensor:
        """Returns ``x`` scaled by the weight's mean."""
        context.seconds, context.shape = seconds, weight.shape
        return x * weight.mean()

    @staticmethod
    def backward(context, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        """Returns gradients; the weight's is the sum of the output's, everywhere."""
        time.sleep(context.seconds)
        return gradient, gradient.sum().expand(context.shape).contiguous(), None


class Timed(nn.Module):
    """A stack of weights whose backward pass takes ``COUNT * SECONDS``."""

    COUNT, ELEMENTS, SECONDS = 24, 2**16, 0.005

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.ones(self.ELEMENTS) for _ in range(self.COUNT))

    def forward(self, x: Tensor) -> Tensor:
        """Returns the sum of what comes out of the last."""
        for weight in self.weights:
            x = Waiting.apply(x, weight, self.SECONDS)
        return x.sum()


class Keyed(torch.autograd.Function):
    """Factors that are known only when the gradient behind them is computed."""

    @staticmethod
    def forward(context, x: Tensor, ask: Callable[[int], Tensor], number: int) -> Tensor:
        """Returns ``x``."""
        context.ask, context.number = ask, number
        return x.clone()

    @staticmethod
    def backward(context, gradient: Tensor) -> tuple[Tensor, None, None]:
        """Returns the gradient times the factors, of which each element has its own."""
        return gradient * context.ask(context.number), None, None


class Locked(nn.Module):
    """Layers, each of whose gradients needs factors that the check is asked for.

    So no gradient can be computed before the check has been asked for that layer and those behind.
    """

    def __init__(self, count: int, width: int, ask: Callable[[int], Tensor]) -> None:
        super().__init__()
        self.layers = layers(count, width)
        self.ask = ask

    def forward(self, x: Tensor) -> Tensor:
        """Returns the mean square of what comes out of the last layer."""
        for number, layer in enumerate(self.layers):
            x = (x + Keyed.apply(layer(x), self.ask, number)).tanh()
        return x.square().mean()


class Mixed(nn.Module):
    """Square matrices, in float64 and in float32 by turns, of which one is not used."""

    COUNT, WIDTH, IDLE = 8, 9, 1

    def __init__(self, count: int = COUNT, width: int = WIDTH) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(count))
        for layer in self.layers[::2]:
            layer.double()

    def forward(self, x: Tensor) -> Tensor:
        """Returns a mean square, in float64."""
        for number, layer in enumerate(self.layers):
            if number != self.IDLE:
                x = layer(x.to(layer.weight.dtype)).tanh()
        return x.double().square().mean()

    def groups(self) -> list[dict]:
        """Returns three matrices, fewer than ranks may be, in groups of different settings."""
        weights = [layer.weight for layer in self.layers]
        return [
            {"params": weights[:1], "lr": 0.01},
            {"params": weights[1:2]},
            {"params": weights[2:3], "weight_decay": 0.5},
        ]

    def late_group(self) -> dict:
        """Returns the matrices that are added after a few steps."""
        return {"params": [layer.weight for layer in self.layers[3:]], "lr": 0.03}


def odd_model() -> Odd:
    """Makes a model in float64 but for one parameter."""
    model = Odd().double()
    model.single.data = model.single.data.float()
    return model


def stacked_model() -> Stacked:
    """Makes a model in float64."""
    return Stacked().double()


def layers(count: int, width: int) -> nn.Sequential:
    """Makes so many linear layers in float64."""
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(count))).double()


def values_of(model: nn.Module) -> dict[str, Tensor]:
    """Returns copies of parameters and buffers, also of those that are in no state dict."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return {name: tensor.detach().clone() for name, tensor in tensors}


def with_values(model: nn.Module, values: dict[str, Tensor]) -> nn.Module:
    """Sets parameters and buffers; returns the model."""
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            tensor.copy_(values[name])
    return model


def trained(model: nn.Module) -> list[nn.Parameter]:
    """Returns the parameters that are trained."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def sgd(model: nn.Module, lr: float = 0.1) -> torch.optim.Optimizer:
    """Returns an optimizer that changes weights whose gradient is zero, too."""
    return torch.optim.SGD(trained(model), lr, momentum=0.9, weight_decay=0.01)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Returns the optimizer of the checks of FSDP."""
    return torch.optim.AdamW(trained(model), lr=0.01)
