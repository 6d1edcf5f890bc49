"""Adapters and float8, against modules of transformers and torch's count of operations."""

from __future__ import annotations

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from common.errors import UserError
from common.perfmodel.architectures.hugging_face import model_of
from common.perfmodel.architectures.variants import in_float8, with_adapters

SAMPLES, TOKENS, RANK = 2, 16, 4
CONFIG = transformers.LlamaConfig(
    hidden_size=32,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=48,
    vocab_size=64,
)
LLAMA = model_of(CONFIG.to_dict(), "llama").architecture(TOKENS)


class Adapted(nn.Module):
    """A frozen linear layer and its adapter."""

    def __init__(self, frozen: nn.Linear) -> None:
        super().__init__()
        self.frozen = frozen
        self.down = nn.Linear(frozen.in_features, RANK, bias=False)
        self.up = nn.Linear(RANK, frozen.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Adds what the adapter makes of x."""
        return self.frozen(x) + self.up(self.down(x))


def llama() -> nn.Module:
    with torch.device("meta"):
        return transformers.LlamaForCausalLM(CONFIG)


def linear_layers(module: nn.Module) -> list[tuple[str, nn.Linear]]:
    named = module.model.layers.named_modules()
    return [(f"model.layers.{name}", child) for name, child in named if type(child) is nn.Linear]


def both_passes(module: nn.Module) -> int:
    # The first block is counted as all others are: with the gradient of its input.
    embedded = torch.zeros(SAMPLES, TOKENS, 32, device="meta", requires_grad=True)
    counter = FlopCounterMode(display=False)
    with counter:
        module(inputs_embeds=embedded).logits.sum().backward()
    return counter.get_total_flops()


def test_adapters_have_the_parameters_and_operations_of_modules_with_adapters() -> None:
    module = llama().requires_grad_(False)
    for name, layer in linear_layers(module):
        with torch.device("meta"):
            module.set_submodule(name, Adapted(layer))
    adapted = with_adapters(LLAMA, RANK)
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    assert adapted.num_parameters == sum(parameter.numel() for parameter in trained)
    operations = both_passes(module)
    assert 3 * SAMPLES * adapted.forward_flops == pytest.approx(operations, rel=1e-12)


def test_blocks_linear_layers_take_half_of_their_time_in_float8() -> None:
    module, counter = llama(), FlopCounterMode(display=False)
    with counter, torch.no_grad():
        module(torch.zeros(SAMPLES, TOKENS, dtype=torch.long, device="meta"))
    counted = counter.get_flop_counts()
    linear = sum(
        sum(counted[f"{type(module).__name__}.{name}"].values())
        for name, _ in linear_layers(module)
    )
    saved = SAMPLES * (LLAMA.forward_flops - in_float8(LLAMA).forward_flops)
    assert saved == linear / 2
    assert in_float8(LLAMA).parameter_sizes() == LLAMA.parameter_sizes()


def test_a_rank_below_one_is_refused() -> None:
    with pytest.raises(UserError, match="adapters of rank 0: at least 1"):
        with_adapters(LLAMA, 0)
