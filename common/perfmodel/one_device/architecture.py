"""The sizes of a GPT-2, and its numbers of parameters without building it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from functools import cache

from common.errors import UserError, unknown_name
from common.perfmodel.architectures.architecture import Architecture, Layer, Tensor
from common.perfmodel.architectures.published_sizes import SIZES, gpt2


@dataclass(frozen=True)
class GPT2Config:
    """Sizes of a GPT-2. ``n_positions`` is the longest sequence, in tokens."""

    vocab_size: int = 50257
    n_positions: int = 1024
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    dropout: float = 0.0
    layer_norm_epsilon: float = 1e-5

    def __post_init__(self) -> None:
        if self.n_embd % self.n_head:
            raise UserError(f"n_embd {self.n_embd} is not a multiple of n_head {self.n_head}")

    @classmethod
    def named(cls, name: str, **overrides) -> GPT2Config:
        """Returns a known size. Raises UserError, naming the nearest one, for any other name."""
        key = name if name in CONFIGS else f"gpt2-{name}"
        if key not in CONFIGS:
            raise UserError(unknown_name("model", name, CONFIGS))
        return replace(CONFIGS[key], **overrides)

    def padded_vocabulary(self, multiple: int) -> GPT2Config:
        """Returns the model with its vocabulary padded to a multiple (rows no token uses)."""
        return replace(self, vocab_size=-(-self.vocab_size // multiple) * multiple)

    def matrix_parameters_per_layer(self) -> int:
        """Counts the weights of a block's four linear layers: (3 + 1 + 4 + 4) · width²."""
        return 12 * self.n_embd**2

    def architecture(self, seq_len: int) -> Architecture:
        """Returns the layers for ``seq_len`` tokens. Raises UserError where there are too many."""
        return _architecture(self, seq_len)

    def parameters_per_layer(self) -> int:
        """Counts a block's parameters: matrices, their biases (9 widths), two norms (4)."""
        (block,) = self._longest().blocks
        return block.elements

    def block_shapes(self) -> list[tuple[int, ...]]:
        """Returns the shapes of a block's parameters as ``common.models.gpt2`` registers them."""
        (block,) = self._longest().blocks
        return [tensor.shape for tensor in block.tensors]

    def root_shapes(self) -> list[tuple[int, ...]]:
        """Returns the shapes outside of blocks: both embeddings (the head is the first), a norm."""
        return [tensor.shape for tensor in self._longest().root.tensors]

    def parameter_sizes(self) -> list[int]:
        """Returns the elements of each parameter, as ``common.models.gpt2`` registers them."""
        return self._longest().parameter_sizes()

    def ready_order(self) -> list[int]:
        """Returns places in ``parameter_sizes`` in the order in which gradients become ready."""
        return self._longest().ready_order()

    def num_parameters(self) -> int:
        """Counts all parameters, the tied embedding once."""
        return self._longest().num_parameters

    def _longest(self) -> Architecture:
        return _architecture(self, self.n_positions)


@cache
def _architecture(config: GPT2Config, seq_len: int) -> Architecture:
    architecture = gpt2(asdict(config), "GPT-2").architecture(seq_len)
    return replace(architecture, layers=tuple(map(_renamed, architecture.layers)))


def _renamed(layer: Layer) -> Layer:
    """Returns a layer whose tensors have the names of ``common.models.gpt2``."""
    tensors = (
        Tensor(f"{MODULES[tensor.module]}.{tensor.name.rpartition('.')[2]}", tensor.shape)
        for tensor in layer.tensors
    )
    modules = (MODULES[module] for module in layer.forward_modules)
    return replace(layer, tensors=tuple(tensors), forward_modules=tuple(modules))


MODULES = {
    "token": "wte",
    "position": "wpe",
    "attention_norm": "ln_1",
    "attention.query_key_value": "attn.c_attn",
    "attention.output": "attn.c_proj",
    "feed_forward_norm": "ln_2",
    "feed_forward.up": "mlp.c_fc",
    "feed_forward.down": "mlp.c_proj",
    "norm": "ln_f",
}
"""Module of any transformer → its name in a GPT-2."""


def _published(name: str) -> GPT2Config:
    values = SIZES[name].values()
    return GPT2Config(**{key: size for key, size in values.items() if key != "model_type"})


CONFIGS = {name: _published(name) for name, size in SIZES.items() if size.family == "gpt2"}
TITLES = {
    "gpt2-pico": "GPT-2 Pico",
    "gpt2-nano": "GPT-2 Nano",
    "gpt2": "GPT-2 Small",
    "gpt2-medium": "GPT-2 Medium",
    "gpt2-large": "GPT-2 Large",
    "gpt2-xl": "GPT-2 XL",
}
"""The course's names, as its scripts print them."""
