"""GPT-2 (Radford et al. 2019) with tied embeddings and PyTorch's fused attention.

The architecture is that of transformers' ``GPT2LMHeadModel``: the same weights give the same
logits and gradients (tests/models/test_gpt2.py). Linear layers are ``nn.Linear`` (weight of shape
[out, in]) where transformers keeps the original ``Conv1D`` ([in, out]).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.errors import UserError, unknown_name

if TYPE_CHECKING:
    from transformers import GPT2LMHeadModel


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
        """The configuration of a published size, or of ``gpt2-nano`` (6.9M parameters).

        Raises UserError, naming the nearest known size, for any other name.
        """
        key = name if name in CONFIGS else f"gpt2-{name}"
        if key not in CONFIGS:
            raise UserError(unknown_name("model", name, CONFIGS))
        return replace(CONFIGS[key], **overrides)


CONFIGS = {
    # A laptop's GPT-2: every kind of layer of the large ones, 27.7 MB of float32 gradients.
    "gpt2-nano": GPT2Config(vocab_size=8192, n_positions=256, n_layer=6, n_head=4, n_embd=256),
    "gpt2": GPT2Config(),
    "gpt2-medium": GPT2Config(n_layer=24, n_head=16, n_embd=1024),
    "gpt2-large": GPT2Config(n_layer=36, n_head=20, n_embd=1280),
    "gpt2-xl": GPT2Config(n_layer=48, n_head=25, n_embd=1600),
}


class CausalSelfAttention(nn.Module):
    """Multi-head attention in which a token sees itself and the tokens before it."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.n_head = config.n_head
        self.dropout = config.dropout
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.c_attn(x).view(batch, length, 3, self.n_head, width // self.n_head)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)  # each [batch, head, length, head width]
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, dropout_p=dropout)
        mixed = mixed.transpose(1, 2).reshape(batch, length, width)
        return F.dropout(self.c_proj(mixed), self.dropout, self.training)


class MLP(nn.Module):
    """The feed-forward half of a block: four times wider, GELU in its tanh form."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.dropout = config.dropout
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd)
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.gelu(self.c_fc(x), approximate="tanh")
        return F.dropout(self.c_proj(hidden), self.dropout, self.training)


class Block(nn.Module):
    """One pre-norm Transformer block."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd, eps=config.layer_norm_epsilon)
        self.attn = CausalSelfAttention(config)
        self.ln_2 = nn.LayerNorm(config.n_embd, eps=config.layer_norm_epsilon)
        self.mlp = MLP(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT2(nn.Module):
    """GPT-2 language model; the output projection is the token embedding (tied)."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.wpe = nn.Embedding(config.n_positions, config.n_embd)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.ln_f = nn.LayerNorm(config.n_embd, eps=config.layer_norm_epsilon)
        self.apply(self._initialise)
        for name, parameter in self.named_parameters():
            if name.endswith("c_proj.weight"):  # residual branches, scaled by depth (section 2.3)
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * config.n_layer))

    @staticmethod
    def _initialise(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear):
            nn.init.zeros_(module.bias)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Logits, or the mean cross-entropy in nats when ``targets`` are given.

        Args:
            tokens: integer tensor [batch, length], length at most ``n_positions``.
            targets: the next tokens, same shape; −100 is ignored.

        Returns:
            logits [batch, length, vocab_size], or a scalar loss computed in float32.
        """
        length = tokens.shape[1]
        if length > self.config.n_positions:
            raise UserError(
                f"sequence of {length} tokens: the model has {self.config.n_positions} positions"
            )
        positions = torch.arange(length, device=tokens.device)
        x = F.dropout(self.wte(tokens) + self.wpe(positions), self.config.dropout, self.training)
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.ln_f(x), self.wte.weight)
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    def num_parameters(self) -> int:
        """Number of parameters, the tied embedding counted once."""
        return sum(p.numel() for p in self.parameters())

    @classmethod
    def from_huggingface(cls, hf_model: GPT2LMHeadModel) -> GPT2:
        """A GPT2 with a copy of the weights of a transformers ``GPT2LMHeadModel``.

        Dropout is taken from ``resid_pdrop``. Raises UserError for variants of the architecture
        that this model does not have (another activation or width, scaled or cross attention,
        untied embeddings).
        """
        theirs = hf_model.config
        for setting, expected in {
            "activation_function": "gelu_new",
            "scale_attn_weights": True,
            "scale_attn_by_inverse_layer_idx": False,
            "tie_word_embeddings": True,
            "add_cross_attention": False,
        }.items():
            if getattr(theirs, setting, expected) != expected:
                raise UserError(
                    f"cannot convert: {setting} is {getattr(theirs, setting)!r}, not {expected!r}"
                )
        if theirs.n_inner not in (None, 4 * theirs.n_embd):
            raise UserError(f"cannot convert: n_inner is {theirs.n_inner}, not 4 × n_embd")
        config = GPT2Config(
            vocab_size=theirs.vocab_size,
            n_positions=theirs.n_positions,
            n_layer=theirs.n_layer,
            n_head=theirs.n_head,
            n_embd=theirs.n_embd,
            dropout=theirs.resid_pdrop,
            layer_norm_epsilon=theirs.layer_norm_epsilon,
        )
        model = cls(config).to(hf_model.dtype)
        source = hf_model.transformer.state_dict()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                weight = source[name.replace("blocks.", "h.")]
                is_conv1d = name.endswith(".weight") and ".c_" in name
                parameter.copy_(weight.T if is_conv1d else weight)
        return model
