"""Models and samples of the checks on ranks; the ranks make them, and so does the check's twin."""

from __future__ import annotations

import time

import torch
from torch import Tensor, nn
from torch.nn import functional


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
        """Returns the mean cross-entropy of predicting each token by itself."""
        x = self.embedding(tokens) + self.frozen + self.shift
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


class Wide(nn.Module):
    """A stack of wide layers, whose weights can be told in a process's memory."""

    WIDTH, COUNT = 1024, 10

    def __init__(self) -> None:
        super().__init__()
        layer = (nn.Linear(self.WIDTH, self.WIDTH, bias=False) for _ in range(self.COUNT))
        self.blocks = nn.ModuleList(nn.Sequential(each) for each in layer)

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


def odd_model(seed: int) -> Odd:
    """Returns a model in float64 but for one parameter."""
    torch.manual_seed(seed)
    model = Odd().double()
    model.single.data = model.single.data.float()
    return model


def stacked_model(seed: int) -> Stacked:
    """Returns a model in float64."""
    torch.manual_seed(seed)
    return Stacked().double()


def layers(count: int, width: int, seed: int) -> nn.Sequential:
    """Returns so many linear layers in float64."""
    torch.manual_seed(seed)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(count))).double()


def tokens(seed: int, step: int, rank: int) -> Tensor:
    """Returns the tokens [6] of a rank in a step."""
    generator = torch.Generator().manual_seed(10_000 * seed + 100 * step + rank)
    return torch.randint(11, (6,), generator=generator)


def trained(model: nn.Module) -> list[nn.Parameter]:
    """Returns the parameters that are trained."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Returns the optimizer of the checks of DDP."""
    return torch.optim.SGD(trained(model), 0.1, momentum=0.9)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Returns the optimizer of the checks of FSDP."""
    return torch.optim.AdamW(trained(model), lr=0.01)


def groups(of: nn.Sequential) -> list[dict]:
    """Returns the parameters of the first four layers in three groups of different settings."""
    return [
        {"params": of[0].parameters(), "lr": 0.01},
        {"params": of[1].parameters(), "weight_decay": 0.5},
        {"params": [*of[2].parameters(), *of[3].parameters()]},
    ]
