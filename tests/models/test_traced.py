"""Architectures of modules that were followed, against the modules themselves."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from common.errors import UserError
from common.models.traced import ModelBatchLoss, traced_architecture
from common.tuning import examples

slow = pytest.mark.slow


class Tied(nn.Module):
    """Blocks between an embedding and a head that is the embedding, and a weight nobody uses."""

    def __init__(self, blocks: int = 3, width: int = 8) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, width)
        self.scale = nn.Parameter(torch.ones(width))
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width)) for _ in range(blocks)
        )
        self.unused = nn.Linear(3, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        """Maps [samples, tokens] to logits."""
        x = self.embedding(tokens) * self.scale
        for block in self.blocks:
            x = x + block(x)
        return functional.linear(x, self.embedding.weight)


def tied() -> ModelBatchLoss:
    return Tied(), torch.randint(11, (2, 5)), loss_of


class SharesBias(nn.Module):
    """An LSTM between linear blocks that share a bias, and an optional part that is not reached."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(6))
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.lstm = nn.LSTM(6, 6, batch_first=True)
        self.parts = nn.ModuleDict({"taken": nn.Linear(6, 4), "left": nn.Linear(6, 3)})

    def forward(self, x: Tensor) -> Tensor:
        """Maps [samples, tokens, 6] to a mean."""
        for block in self.blocks:
            x = self.lstm(block(x + self.bias).relu())[0]
        return self.parts["taken"](x).square().mean()


def shares_bias() -> ModelBatchLoss:
    return SharesBias(), torch.randn(2, 5, 6), lambda module, x: module(x)


def huge() -> ModelBatchLoss:
    return Tied(blocks=2, width=200_000), torch.randint(11, (2, 5)), loss_of


def loss_of(module: nn.Module, tokens: Tensor) -> Tensor:
    return functional.cross_entropy(module(tokens).flatten(0, 1), tokens.flatten())


MADE = [
    tied,
    shares_bias,
    pytest.param(examples.encoder_decoder, marks=slow),
    pytest.param(examples.convolutions, marks=slow),
    pytest.param(examples.vision_transformer, marks=slow),
]


@pytest.mark.parametrize("make", MADE)
def test_parameters_operations_and_gradients_are_those_of_the_real_module(
    make: Callable[[], ModelBatchLoss],
) -> None:
    architecture = traced_architecture(make, "a model")
    assert architecture.name == "a model"
    module, batch, loss = make()
    trained = {name: one for name, one in module.named_parameters() if one.requires_grad}
    ready: list[int] = []
    for parameter in trained.values():
        parameter.register_post_accumulate_grad_hook(lambda one: ready.append(one.numel()))
    # Without oneDNN an LSTM is matrix products, which torch counts.
    counter, without_onednn = FlopCounterMode(display=False), torch.backends.mkldnn.flags(False)
    with without_onednn:
        with counter:
            value = loss(module, batch)
        value.backward()
    samples = len(batch if isinstance(batch, Tensor) else next(iter(batch.values())))
    assert architecture.num_parameters == sum(one.numel() for one in trained.values())
    assert architecture.forward_flops * samples == counter.get_total_flops()
    # Gradients come as they do in the real backward pass, behind those that it does not use.
    sizes = architecture.parameter_sizes()
    unused = [one.numel() for one in trained.values() if one.grad is None]
    assert [sizes[place] for place in architecture.ready_order()] == [*unused, *ready]


def test_equal_neighbours_are_blocks_and_a_tied_head_is_the_rest() -> None:
    architecture = traced_architecture(tied, "tied")
    [block] = architecture.blocks
    assert (block.count, block.elements) == (3, 8 * 8 + 8 + 2 * 8)
    assert block.forward_flops == 5 * 2 * 8 * 8
    first = [block.tensors[place].name for place in block.ready_places()[:2]]
    assert {*first} == {"1.weight", "1.bias"}
    rest = architecture.layers[-1]
    assert rest.forward_flops == 5 * 2 * 8 * 11


def test_a_model_larger_than_any_memory_is_followed() -> None:
    architecture = traced_architecture(huge, "huge")
    assert architecture.num_parameters > 2 * 200_000**2


def test_a_module_that_reads_its_values_says_what_stopped_it() -> None:
    class Reads(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * x.sum().item()

    def make() -> ModelBatchLoss:
        return Reads(3, 3), torch.ones(2, 3), lambda module, x: module(x).sum()

    with pytest.raises(UserError, match="reads cannot be followed on fake tensors: ") as refused:
        traced_architecture(make, "reads")
    assert "\n" not in str(refused.value)


def test_attention_of_a_followed_model_is_that_of_the_model_by_name() -> None:
    def make() -> ModelBatchLoss:
        config = transformers.GPT2Config(n_layer=2, n_embd=64, n_head=4, vocab_size=100)
        tokens = torch.zeros(3, 32, dtype=torch.int64)
        model = transformers.GPT2LMHeadModel(config)
        return model, tokens, lambda module, batch: module(batch, labels=batch).loss

    followed = traced_architecture(make, "followed")
    [block] = (layer for layer in followed.layers if layer.is_block)
    assert block.count == 2
    assert block.attention_flops == 2 * 2 * 32 * 32 * 64  # scores, and their product with values
