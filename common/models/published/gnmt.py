"""GNMT (Wu et al. 2016, arXiv 1609.08144) with four layers, which translates by LSTMs.

Sizes are those of NVIDIA/DeepLearningExamples, PyTorch/Translation/GNMT: 1,024 units, 32,320 words
that both languages share, normalised Bahdanau attention from the decoder's first layer, whose
result every later layer gets.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from common.models.traced import ModelBatchLoss

UNITS, WORDS, LAYERS = 1024, 32_320, 4
SENTENCES, TOKENS = 8, 50
"""A sentence has 50 tokens at most. Half of it is assumed as the mean of either language."""


class Attention(nn.Module):
    """Normalised additive attention (Bahdanau et al. 2014; Salimans and Kingma 2016)."""

    def __init__(self, units: int) -> None:
        super().__init__()
        self.query = nn.Linear(units, units, bias=False)
        self.key = nn.Linear(units, units, bias=False)
        self.direction = nn.Parameter(torch.full((units,), 0.1))
        self.length = nn.Parameter(torch.ones(1))
        self.bias = nn.Parameter(torch.zeros(units))

    def forward(self, targets: Tensor, sources: Tensor) -> Tensor:
        """Returns what each target token takes from the sources, both [samples, tokens, units]."""
        pairs = self.query(targets)[:, :, None] + self.key(sources)[:, None] + self.bias
        direction = self.length * self.direction / self.direction.norm()
        scores = torch.tanh(pairs) @ direction
        return scores.softmax(dim=-1) @ sources


class Gnmt(nn.Module):
    """An encoder whose first layer reads both ways, and a decoder that attends to it."""

    def __init__(self, units: int = UNITS, words: int = WORDS) -> None:
        super().__init__()

        def lstm(inputs: int, bidirectional: bool = False) -> nn.LSTM:
            return nn.LSTM(inputs, units, batch_first=True, bidirectional=bidirectional)

        self.embedding = nn.Embedding(words, units)
        self.both_ways = lstm(units, bidirectional=True)
        self.joined = lstm(2 * units)
        self.encoder = nn.ModuleList(lstm(units) for _ in range(LAYERS - 2))
        self.first = lstm(units)
        self.attention = Attention(units)
        self.decoder = nn.ModuleList(lstm(2 * units) for _ in range(LAYERS - 1))
        self.head = nn.Linear(units, words)

    def forward(self, sources: Tensor, targets: Tensor) -> Tensor:
        """Maps two [samples, tokens] to logits [samples, target tokens, words]."""
        read = self.joined(self.both_ways(self.embedding(sources))[0])[0]
        for layer in self.encoder:
            read = read + layer(read)[0]
        x = self.first(self.embedding(targets))[0]
        taken = self.attention(x, read)
        for number, layer in enumerate(self.decoder):
            out = layer(torch.cat((x, taken), dim=-1))[0]
            x = x + out if number else out
        return self.head(x)


def gnmt(tokens: int = TOKENS) -> ModelBatchLoss:
    """Makes GNMT on sentences that have ``tokens`` in both languages: 160,671,297 parameters."""
    sentences = torch.zeros(SENTENCES, tokens // 2, dtype=torch.long)
    return Gnmt(), {"from": sentences, "to": sentences}, loss_of


def loss_of(module: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Returns the mean cross-entropy of the target's tokens."""
    logits = module(batch["from"], batch["to"])
    return functional.cross_entropy(logits.flatten(0, 1), batch["to"].flatten())
