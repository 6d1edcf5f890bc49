"""GPT-2 (Radford et al. 2019) with tied embeddings and a choice of attention and loss kernels.

The architecture is that of transformers' ``GPT2LMHeadModel``: the same weights give the same
logits and gradients (tests/models/test_gpt2.py). Linear layers are ``nn.Linear`` (weight of shape
[out, in]) where transformers keeps the original ``Conv1D`` ([in, out]).
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from common.errors import UserError
from common.models.chunked_loss import chunked_cross_entropy
from common.perfmodel.one_device.architecture import CONFIGS, GPT2Config

__all__ = ["CONFIGS", "GPT2", "GPT2Config"]


class LayerNorm(nn.LayerNorm):
    """LayerNorm in the precision of its input, also where FSDP hands it rounded weights."""

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.weight.to(x.dtype), self.bias.to(x.dtype)
        return F.layer_norm(x, self.normalized_shape, weight, bias, self.eps)


class CausalSelfAttention(nn.Module):
    """Multi-head attention in which a token sees itself and the tokens before it."""

    def __init__(self, config: GPT2Config, attention: str) -> None:
        super().__init__()
        self.attend = {"sdpa": fused_attention, "eager": written_out_attention}[attention]
        self.n_head = config.n_head
        self.dropout = config.dropout
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.c_attn(x).view(batch, length, 3, self.n_head, width // self.n_head)
        # Unbound before the transpose, so that the backward pass joins the three gradients in the
        # layout of qkv, with one copy. Each is [batch, head, length, head width].
        query, key, value = (part.transpose(1, 2) for part in qkv.unbind(2))
        dropout = self.dropout if self.training else 0.0
        mixed = self.attend(query, key, value, dropout)
        mixed = mixed.transpose(1, 2).reshape(batch, length, width)
        return F.dropout(self.c_proj(mixed), self.dropout, self.training)


def fused_attention(query: Tensor, key: Tensor, value: Tensor, dropout: float) -> Tensor:
    """Computes causal attention by PyTorch's kernels, which never write out the score matrix.

    All tensors are [batch, head, length, head width].
    """
    return F.scaled_dot_product_attention(query, key, value, is_causal=True, dropout_p=dropout)


def written_out_attention(query: Tensor, key: Tensor, value: Tensor, dropout: float) -> Tensor:
    """Computes causal attention by its formula, softmax(QKᵀ/√d)V, with all scores in memory.

    All tensors are [batch, head, length, head width]. The softmax is computed in float32 and
    rounded once, so that what is kept for the backward pass is one tensor of weights.
    """
    *heads, length, width = query.shape
    # The product adds to the mask, and scales the smaller Q, so no pass over the scores is needed.
    hidden = torch.full((length, length), float("-inf"), dtype=query.dtype, device=query.device)
    scaled = (query / math.sqrt(width)).flatten(0, 1)
    scores = torch.baddbmm(hidden.triu(1), scaled, key.flatten(0, 1).transpose(1, 2))
    weights = F.dropout(torch.softmax(scores, -1, dtype=scores.dtype), dropout)
    return (weights @ value.flatten(0, 1)).view(*heads, length, width)


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

    def __init__(self, config: GPT2Config, attention: str) -> None:
        super().__init__()
        self.ln_1 = LayerNorm(config.n_embd, eps=config.layer_norm_epsilon)
        self.attn = CausalSelfAttention(config, attention)
        self.ln_2 = LayerNorm(config.n_embd, eps=config.layer_norm_epsilon)
        self.mlp = MLP(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT2(nn.Module):
    """GPT-2 language model; the output projection is the token embedding (tied).

    Args:
        config: sizes of the model.
        attention: ``sdpa`` or ``eager``, which writes out the score matrix.
        activation_checkpointing: compute each block again in the backward pass.
        loss_chunks: pieces in which logits and loss are computed when targets are given.
    """

    def __init__(
        self,
        config: GPT2Config,
        attention: str = "sdpa",
        activation_checkpointing: bool = False,
        loss_chunks: int = 1,
    ) -> None:
        super().__init__()
        self.config = config
        self.activation_checkpointing = activation_checkpointing
        self.loss_chunks = loss_chunks
        self.loss_in_pieces = chunked_cross_entropy
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.wpe = nn.Embedding(config.n_positions, config.n_embd)
        self.blocks = nn.ModuleList(Block(config, attention) for _ in range(config.n_layer))
        self.ln_f = LayerNorm(config.n_embd, eps=config.layer_norm_epsilon)
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
        """Computes logits, or the mean cross-entropy in nats when ``targets`` are given.

        Args:
            tokens: integer tensor [batch, length], length at most ``n_positions``.
            targets: the next tokens, same shape; −100 is ignored.

        Returns:
            logits [batch, length, vocab_size], or a scalar loss, computed in
            float32 (float64 in a float64 model).

        Raises:
            UserError: sequences longer than ``n_positions``.
        """
        length = tokens.shape[1]
        if length > self.config.n_positions:
            raise UserError(
                f"sequence of {length} tokens: the model has {self.config.n_positions} positions"
            )
        positions = torch.arange(length, device=tokens.device)
        x = F.dropout(self.wte(tokens) + self.wpe(positions), self.config.dropout, self.training)
        for block in self.blocks:
            if self.activation_checkpointing and self.training:
                x = checkpoint(block, x, use_reentrant=False, preserve_rng_state=self.has_dropout())
            else:
                x = block(x)
        x = self.ln_f(x)
        if targets is None:
            return F.linear(x, self.wte.weight)
        if self.loss_chunks > 1:
            return self.loss_in_pieces(x, self.wte.weight, targets, self.loss_chunks)
        # A row per token: of [batch, vocabulary, length] some versions of PyTorch count elements in
        # 32 bits on a GPU (pytorch#190139), and batch 64 of GPT-2 has 1.5 · 2³¹ logits.
        logits = F.linear(x, self.wte.weight).flatten(0, 1)
        exact = torch.float64 if logits.dtype == torch.float64 else torch.float32
        return F.cross_entropy(logits.to(exact), targets.flatten())

    def has_dropout(self) -> bool:
        """Returns True if the model drops activations, so that a pass draws random numbers."""
        return self.config.dropout > 0

    def num_parameters(self) -> int:
        """Returns the number of parameters, the tied embedding counted once."""
        return sum(p.numel() for p in self.parameters())
