"""FUNCTIONs to tune, right and wrong, for the tests of common/tuning."""

from __future__ import annotations

import itertools
import os

import torch
from torch import nn

NOT_A_FUNCTION = 7


class Layers(nn.Module):
    """Twelve trained tensors of different sizes, a frozen one, and running means."""

    def __init__(self, widths: tuple[int, ...] = (16, 96, 64, 200, 32)) -> None:
        super().__init__()
        self.frozen = nn.Embedding(10, widths[0])
        self.frozen.weight.requires_grad_(False)
        pairs = itertools.pairwise(widths)
        self.layers = nn.Sequential(*(nn.Linear(*pair) for pair in pairs))
        self.norm = nn.BatchNorm1d(widths[-1])
        self.head = nn.Linear(widths[-1], 3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.layers(self.frozen(tokens).mean(1))))


def loss_of(module: nn.Module, batch: dict) -> torch.Tensor:
    return nn.functional.cross_entropy(module(batch["tokens"]), batch["more"][0])


def make() -> tuple:
    """Makes the model as it should be; the batch is a nest."""
    batch = {"tokens": torch.randint(10, (8, 4)), "more": [torch.randint(3, (8,)), "a name"]}
    return Layers(), batch, loss_of


def unused() -> tuple:
    module, batch, loss = make()
    module.spare = nn.Linear(3, 3)
    return module, batch, loss


def all_frozen() -> tuple:
    module, batch, loss = make()
    return module.requires_grad_(False), batch, loss


def sparse() -> tuple:
    embedding = nn.Embedding(10, 4, sparse=True)
    return embedding, torch.arange(3), lambda module, batch: module(batch).sum()


def raises() -> tuple:
    raise ValueError("no such\nfile")


def needs_an_argument(path: str) -> tuple:
    return make()


def two_of_them() -> tuple:
    return make()[:2]


def not_a_module() -> tuple:
    return "a model", *make()[1:]


def no_loss() -> tuple:
    return with_loss(None)


def with_loss(loss: object) -> tuple:
    return *make()[:2], loss


def loss_is_a_vector() -> tuple:
    return with_loss(lambda module, batch: module(batch["tokens"]))


def loss_is_a_number() -> tuple:
    return with_loss(lambda module, batch: loss_of(module, batch).item())


def loss_has_no_graph() -> tuple:
    return with_loss(lambda module, batch: loss_of(module, batch).detach())


def loss_raises() -> tuple:
    return with_loss(lambda module, batch: module(**batch))


def bypasses_ddp() -> tuple:
    module, batch, _ = make()
    return module, batch, lambda _, batch: loss_of(module, batch)


def asks_ddp() -> tuple:
    return with_loss(lambda module, batch: loss_of(module, batch) + module.head.weight.sum())


def other_parameters() -> tuple:
    """Makes a model of another width on rank 1."""
    rank = int(os.environ.get("RANK", 0))
    _, batch, loss = make()
    return Layers((16, 96 + rank, 32)), batch, loss


def other_gradients() -> tuple:
    """Makes a model with a parameter that only rank 0 uses."""
    module, batch, _ = make()
    module.extra = nn.Parameter(torch.ones(3))

    def loss(module: nn.Module, batch: dict) -> torch.Tensor:
        extra = getattr(module, "module", module).extra
        used = extra.sum() if os.environ.get("RANK", "0") == "0" else 0.0
        return loss_of(module, batch) + used

    return module, batch, loss


def changing() -> tuple:
    """Makes a model with a parameter that is used in the first three passes."""
    module, batch, _ = make()
    module.extra, passes = nn.Parameter(torch.ones(3)), itertools.count()

    def loss(module: nn.Module, batch: dict) -> torch.Tensor:
        extra = getattr(module, "module", module).extra
        return loss_of(module, batch) + (extra.sum() if next(passes) < 3 else 0.0)

    return module, batch, loss


def lazy() -> tuple:
    module, batch, loss = make()
    module.head = nn.LazyLinear(3)
    return module, batch, loss


def raises_on_rank_1() -> tuple:
    if os.environ.get("RANK") == "1":
        raise OSError("disk is full")
    return make()
