"""FUNCTIONs to plan, and a rank that runs plans of one: as printed Python and as PlannedStep.

As a script on several ranks it runs each plan that its arguments name and exits with 0 if weights
and gradients are those of one rank that computes the whole global batch.
"""

from __future__ import annotations

import ast
import copy
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

RATE, MICRO_BATCH = 1e-5, 2


class Block(nn.Module):
    """A residual block of two products."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.down(functional.gelu(self.up(self.norm(hidden))))


class Blocks(nn.Module):
    """An embedding, three blocks and a head."""

    def __init__(self, blocks: int = 3, width: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = nn.Linear(width, 50, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


def loss_of(module: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(module(tokens).flatten(0, 1), tokens.flatten())


def make(batch_size: int = 4) -> tuple:
    return Blocks(), torch.randint(50, (batch_size, 8)), loss_of


def no_common_dimension() -> tuple:
    """Makes a batch of which nobody can tell how many samples it has."""
    batch = torch.randint(50, (4, 8)), torch.ones(3)
    return Blocks(), batch, lambda module, b: loss_of(module, b[0]) * b[1].mean()


def sequence_first(batch_size: int = 4) -> tuple:
    """Makes a batch whose samples stand in its second dimension."""
    return Blocks(), torch.randint(50, (8, batch_size)), loss_of


class Adapted(nn.Module):
    """A frozen product and an adapter beside it."""

    def __init__(self, frozen: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.frozen = frozen
        self.down = nn.Linear(frozen.in_features, rank, bias=False)
        self.up = nn.Linear(rank, frozen.out_features, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.frozen(hidden) + self.up(self.down(hidden))


def frozen_embedding(*sizes: int) -> Blocks:
    module = Blocks(*sizes)
    module.embedding.requires_grad_(False)
    return module


def probed(*sizes: int) -> Blocks:
    """Makes blocks of which the head alone is trained."""
    module = Blocks(*sizes).requires_grad_(False)
    module.head.requires_grad_(True)
    return module


def last_block(*sizes: int) -> Blocks:
    """Makes blocks of which the last one and the head are trained."""
    module = probed(*sizes)
    module.blocks[-1].requires_grad_(True)
    return module


def adapted(*sizes: int) -> Blocks:
    """Makes blocks of which adapters alone are trained."""
    module = Blocks(*sizes).requires_grad_(False)
    for block in module.blocks:
        block.up, block.down = Adapted(block.up), Adapted(block.down)
    return module


PARTLY_FROZEN = (frozen_embedding, probed, last_block, adapted)


def adapters(batch_size: int = 4) -> tuple:
    return adapted(), torch.randint(50, (batch_size, 8)), loss_of


def all_frozen(batch_size: int = 4) -> tuple:
    return Blocks().requires_grad_(False), torch.randint(50, (batch_size, 8)), loss_of


def frozen_in_half(batch_size: int = 4) -> tuple:
    """Makes a model whose frozen head is bfloat16."""
    module = Blocks()
    module.head.requires_grad_(False).bfloat16()
    return module, torch.randint(50, (batch_size, 8)), loss_of


class Tied(Blocks):
    """Blocks whose first and last share a product, and whose head is the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embedding.weight
        self.blocks[2].up = self.blocks[0].up


def tied() -> tuple:
    return Tied(), torch.randint(50, (4, 8)), loss_of


class Counting(Blocks):
    """Blocks that count their calls in a buffer and in a list, and normalise by a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.seen: list[int] = []
        self.running = nn.BatchNorm1d(1)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.seen.append(len(tokens))
        return super().forward(tokens) + self.running(tokens.float()[:, None])[:, 0, :, None]


class Pooled(Blocks):
    """Blocks whose head normalises a value a sample and channel, which takes two samples."""

    def __init__(self) -> None:
        super().__init__()
        self.normal = nn.BatchNorm1d(50)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.normal(super().forward(tokens).mean(1))


def pooled(batch_size: int = 4) -> tuple:
    tokens = torch.randint(50, (batch_size, 8))
    return Pooled(), tokens, lambda module, b: functional.cross_entropy(module(b), b[:, 0])


class Doubled(torch.autograd.Function):
    """Doubles, with a backward pass of its own."""

    @staticmethod
    def forward(context: object, value: torch.Tensor) -> torch.Tensor:
        context.save_for_backward(value)
        return value * 2

    @staticmethod
    def backward(context: object, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 2


def unusual() -> tuple:
    """Makes blocks with buffers, a compiled one, and a backward pass of its own in the loss."""
    module = Counting()
    module.blocks[1] = torch.compile(module.blocks[1], backend="eager")
    return (
        module,
        torch.randint(50, (4, 8)),
        lambda model, tokens: functional.cross_entropy(
            Doubled.apply(model(tokens)).flatten(0, 1), tokens.flatten()
        ),
    )


def large() -> tuple:
    """Makes blocks whose activations are larger than what gloo and Python take beside them."""
    return Blocks(4, 128), torch.randint(50, (8, 64)), loss_of


def _expected(make_module: Callable, parts: list[torch.Tensor]) -> tuple[dict, dict]:
    """Returns weights and gradients after a step of all micro-batches on one rank."""
    torch.manual_seed(0)
    module = make_module()
    optimizer = torch.optim.AdamW(module.parameters(), lr=RATE)
    loss_of(module, torch.cat(parts)).backward()
    trained = ((name, p) for name, p in module.named_parameters() if p.requires_grad)
    gradients = {name: p.grad.clone() for name, p in trained}
    optimizer.step()
    return {name: p.detach() for name, p in module.named_parameters()}, gradients


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def _check(
    make_module: Callable, module: nn.Module, optimizer: object, parts: list, within: float
) -> None:
    """Compares weights, and the first moments, which are a tenth of the gradients."""
    weights, gradients = _expected(make_module, parts)
    optimizer = getattr(optimizer, "optim", optimizer)  # of ZeroRedundancyOptimizer
    held = 0
    for long_name, parameter in module.named_parameters():
        name = long_name.removeprefix("module.")
        if name not in gradients:
            assert torch.equal(_whole(parameter.detach()), weights[name]), name
            continue
        largest = gradients[name].abs().max()
        moved = (_whole(parameter.detach()) - weights[name]).abs()
        # AdamW moves a weight by RATE in the direction of its gradient, however small.
        told = gradients[name].abs() > 2 * within * largest
        assert moved[told].max() <= 0.01 * RATE + 1e-7, (name, moved[told].max())
        state = optimizer.state.get(parameter)
        if state:
            held += 1
            error = (_whole(state["exp_avg"]) * 10 - gradients[name]).abs().max()
            assert error <= within * largest, (name, error, largest)
    assert held > 0
    number = torch.tensor(held)
    dist.all_reduce(number)
    assert number >= len(gradients)


def main() -> None:
    """Runs every plan that the arguments name, as reprs, of what the first one makes."""
    from common.models.traced import traced_architecture
    from common.planning.code import python_lines
    from common.planning.space import Plan, Question
    from common.runtime.group.process_group import process_group
    from common.tuning.plans.planned_step import PlannedStep
    from common.tuning.user_model import UserModel

    with process_group("cpu", "gloo") as worker:
        ranks, rank = worker.world_size, worker.rank
        make_module = globals()[sys.argv[1]]
        architecture = traced_architecture(
            lambda: (make_module(), torch.randint(50, (4, 8)), loss_of), "made", "cpu"
        )
        for text in sys.argv[2:]:
            plan = eval(text, {"Plan": Plan})
            question = Question(architecture, ranks, 2, ranks * MICRO_BATCH * 2, 1e9, device="cpu")
            generator = torch.Generator().manual_seed(1)
            parts = [
                torch.randint(50, (plan.micro_batch, 8), generator=generator)
                for _ in range(ranks * plan.accumulation)
            ]
            mine = parts if plan.strategy == "single" else parts[rank::ranks]
            mine = mine[: plan.accumulation]
            counted = mine if plan.strategy == "single" else parts
            within = 1e-4 if plan.precision == "float32" else 0.05
            torch.manual_seed(0)
            names = {
                "torch": torch,
                "model": make_module(),
                "lr": RATE,
                "loss_of": loss_of,
                "micro_batches": mine,
                "batch": mine[0],
            }
            module = names["model"]
            lines = "\n".join(python_lines(question, plan))
            ast.parse(lines)
            exec(lines, names)
            _check(make_module, module, names["optimizer"], counted, within)
            torch.manual_seed(0)
            # Every micro-batch of a PlannedStep is the same one.
            user = UserModel(make_module(), copy.deepcopy(mine[0]), loss_of, "made")
            step = PlannedStep(user, plan, worker, ranks_per_node=2)
            step.run()
            if not step.idle:
                same = mine[:1] if plan.strategy == "single" else parts[:ranks]
                _check(make_module, user.module, step.optimizer, same, within)
            else:
                dist.all_reduce(torch.tensor(0))


if __name__ == "__main__":
    main()
