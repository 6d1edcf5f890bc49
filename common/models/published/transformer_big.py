"""The big Transformer of Vaswani et al. 2017 (arXiv 1706.03762, table 3), which translates.

Its embeddings and its head share one weight of 33,712 words of both languages, as in
NVIDIA/DeepLearningExamples, PyTorch/Translation/Transformer (WMT 2014, English to German).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from common.models.published.gnmt import loss_of
from common.models.traced import ModelBatchLoss

WIDTH, HEADS, LAYERS, WIDE, WORDS = 1024, 16, 6, 4096, 33_712
SENTENCES, TOKENS = 8, 32
"""Batches are published in tokens; a sentence of the corpus is assumed to have 32."""


class Transformer(nn.Module):
    """An encoder and a decoder with the norms behind the additions, and a tied head."""

    def __init__(self) -> None:
        super().__init__()
        sizes = {"d_model": WIDTH, "nhead": HEADS, "dim_feedforward": WIDE, "batch_first": True}
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.encoder = nn.ModuleList(nn.TransformerEncoderLayer(**sizes) for _ in range(LAYERS))
        self.decoder = nn.ModuleList(nn.TransformerDecoderLayer(**sizes) for _ in range(LAYERS))

    def forward(self, sources: Tensor, targets: Tensor) -> Tensor:
        """Maps two [samples, tokens] to logits [samples, target tokens, words]."""
        read, x = self._embedded(sources), self._embedded(targets)
        for layer in self.encoder:
            read = layer(read)
        causal = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device)
        for layer in self.decoder:
            x = layer(x, read, tgt_mask=causal)
        return functional.linear(x, self.embedding.weight)

    def _embedded(self, tokens: Tensor) -> Tensor:
        """Returns scaled embeddings and the waves of their positions (the paper's section 3.5)."""
        places = torch.arange(tokens.shape[1], device=tokens.device)[:, None]
        steps = torch.arange(0, WIDTH, 2, device=tokens.device)
        angles = places / 10_000 ** (steps / WIDTH)
        return WIDTH**0.5 * self.embedding(tokens) + torch.cat((angles.sin(), angles.cos()), dim=1)


def transformer_big(tokens: int = TOKENS) -> ModelBatchLoss:
    """Makes the big Transformer on sentences that have ``tokens`` in each language."""
    sentences = torch.zeros(SENTENCES, tokens, dtype=torch.long)
    return Transformer(), {"from": sentences, "to": sentences}, loss_of
