"""The sizes of a GPT-2, and its numbers of parameters without building it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

from common.errors import UserError, unknown_name
from common.perfmodel.architectures.architecture import Architecture, Layer, Tensor


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
        """Returns the configuration of a published size, or of ``gpt2-nano`` (6.9M parameters).

        Raises UserError, naming the nearest known size, for any other name.
        """
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

    def parameters_per_layer(self) -> int:
        """Counts a block's parameters: matrices, their biases (9 widths), two norms (4)."""
        return self.matrix_parameters_per_layer() + 13 * self.n_embd

    def architecture(self, seq_len: int) -> Architecture:
        """Returns the model as it trains on sequences of ``seq_len`` tokens."""
        d = self.n_embd
        block = (
            Tensor("ln_1.weight", (d,)),
            Tensor("ln_1.bias", (d,)),
            Tensor("attn.c_attn.weight", (3 * d, d)),
            Tensor("attn.c_attn.bias", (3 * d,)),
            Tensor("attn.c_proj.weight", (d, d)),
            Tensor("attn.c_proj.bias", (d,)),
            Tensor("ln_2.weight", (d,)),
            Tensor("ln_2.bias", (d,)),
            Tensor("mlp.c_fc.weight", (4 * d, d)),
            Tensor("mlp.c_fc.bias", (4 * d,)),
            Tensor("mlp.c_proj.weight", (d, 4 * d)),
            Tensor("mlp.c_proj.bias", (d,)),
        )
        wte = Tensor("wte.weight", (self.vocab_size, d))
        wpe = Tensor("wpe.weight", (self.n_positions, d))
        norm = (Tensor("ln_f.weight", (d,)), Tensor("ln_f.bias", (d,)))
        flops = seq_len * (24 * d * d + 4 * d * seq_len)
        head = 2 * seq_len * self.vocab_size * d
        return Architecture(
            name="gpt2",
            layers=(
                Layer("embedding", (wte, wpe)),
                Layer("block", block, flops, self.n_layer, is_block=True),
                Layer("norm", norm),
                Layer("head", (), head),
            ),
            tokens_per_sample=seq_len,
            ties_head=True,
        )

    def block_shapes(self) -> list[tuple[int, ...]]:
        """Returns the shapes of a block's parameters as ``common.models.gpt2`` registers them."""
        width = self.n_embd
        attention = [(3 * width, width), (3 * width,), (width, width), (width,)]
        mlp = [(4 * width, width), (4 * width,), (width, 4 * width), (width,)]
        norm = [(width,), (width,)]
        return [*norm, *attention, *norm, *mlp]

    def root_shapes(self) -> list[tuple[int, ...]]:
        """Returns the shapes outside of blocks: both embeddings (the head is the first), a norm."""
        width = self.n_embd
        return [(self.vocab_size, width), (self.n_positions, width), (width,), (width,)]

    def parameter_sizes(self) -> list[int]:
        """Returns the elements of each parameter, as ``common.models.gpt2`` registers them."""
        tokens, positions, *last_norm = map(prod, self.root_shapes())
        block = list(map(prod, self.block_shapes()))
        return [tokens, positions, *self.n_layer * block, *last_norm]

    def num_parameters(self) -> int:
        """Counts all parameters, the tied embedding once."""
        embeddings = (self.vocab_size + self.n_positions) * self.n_embd
        return embeddings + self.n_layer * self.parameters_per_layer() + 2 * self.n_embd


CONFIGS = {
    # Small enough to learn the synthetic text to its entropy within a minute.
    "gpt2-pico": GPT2Config(vocab_size=256, n_positions=256, n_layer=2, n_head=4, n_embd=128),
    # A laptop's GPT-2: every kind of layer of the large ones, 27.7 MB of float32 gradients.
    "gpt2-nano": GPT2Config(vocab_size=8192, n_positions=256, n_layer=6, n_head=4, n_embd=256),
    "gpt2": GPT2Config(),
    "gpt2-medium": GPT2Config(n_layer=24, n_head=16, n_embd=1024),
    "gpt2-large": GPT2Config(n_layer=36, n_head=20, n_embd=1280),
    "gpt2-xl": GPT2Config(n_layer=48, n_head=25, n_embd=1600),
}
TITLES = {
    "gpt2-pico": "GPT-2 Pico",
    "gpt2-nano": "GPT-2 Nano",
    "gpt2": "GPT-2 Small",
    "gpt2-medium": "GPT-2 Medium",
    "gpt2-large": "GPT-2 Large",
    "gpt2-xl": "GPT-2 XL",
}
"""The course's names, as its scripts print them."""
