"""Transformer-XL (Dai et al. 2019, arXiv 1901.02860), trained on WikiText-103.

A segment attends to itself and to the hidden states of the segment before it. Frequent words have
wide embeddings and are told apart first, rare ones in clusters with narrower embeddings (adaptive
input and softmax: Grave et al. 2016, Baevski and Auli 2018). Sizes are those of
NVIDIA/DeepLearningExamples, PyTorch/LanguageModeling/Transformer-XL, wt103_base and wt103_large.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from common.models.traced import ModelBatchLoss

SEGMENTS = 8
Places = list[Tensor]
"""Places among all tokens of those that each cluster of words has."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of a Transformer-XL.

    Attributes:
        layers, width, heads, head_width, wide: sizes of a block; ``wide`` is between the two
            linear layers of a feed-forward part.
        segment: tokens of a sample, and of the hidden states that it remembers.
        narrower: factor by which a cluster's embeddings are narrower than the last cluster's.
        ends: first word behind each cluster, the most frequent words first.
    """

    layers: int
    width: int
    heads: int
    head_width: int
    wide: int
    segment: int
    narrower: int = 1
    ends: tuple[int, ...] = (19_997, 39_997, 199_997, 267_735)

    @property
    def clusters(self) -> list[tuple[int, int]]:
        """Returns the words and the embedding's width of each cluster."""
        firsts = (0, *self.ends[:-1])
        return [
            (end - first, self.width // self.narrower**number)
            for number, (first, end) in enumerate(zip(firsts, self.ends, strict=True))
        ]


BASE = Sizes(layers=16, width=512, heads=8, head_width=64, wide=2048, segment=192)
LARGE = Sizes(layers=18, width=1024, heads=16, head_width=64, wide=4096, segment=384, narrower=4)


def waves(tokens: int, width: int) -> Tensor:
    """Returns sines and cosines of distances, the largest first: [tokens, width]."""
    distances = torch.arange(tokens - 1, -1, -1)[:, None]
    angles = distances / 10_000 ** (torch.arange(0, width, 2) / width)
    return torch.cat((angles.sin(), angles.cos()), dim=1)


class Block(nn.Module):
    """Attention by relative positions, and a feed-forward part, with the norms behind each."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        inner = sizes.heads * sizes.head_width
        self.heads = (sizes.heads, sizes.head_width)
        self.query_key_value = nn.Linear(sizes.width, 3 * inner, bias=False)
        self.position = nn.Linear(sizes.width, inner, bias=False)
        self.output = nn.Linear(inner, sizes.width, bias=False)
        self.attention_norm = nn.LayerNorm(sizes.width)
        self.up = nn.Linear(sizes.width, sizes.wide)
        self.down = nn.Linear(sizes.wide, sizes.width)
        self.feed_forward_norm = nn.LayerNorm(sizes.width)

    def forward(
        self, x: Tensor, memory: Tensor, positions: Tensor, content_bias: Tensor, place_bias: Tensor
    ) -> Tensor:
        """Maps [samples, tokens, width] to the same, beside a memory of that shape.

        Args:
            x: hidden states of the segment.
            memory: hidden states of the segment before it.
            positions: [tokens of both, width], waves from the most distant token to none.
            content_bias, place_bias: [heads, head width], the paper's u and v, shared by blocks.
        """
        tokens = x.shape[1]
        mapped = self.query_key_value(torch.cat((memory, x), dim=1)).unflatten(-1, (3, *self.heads))
        queries, keys, values = mapped.unbind(dim=2)
        queries = queries[:, -tokens:]
        places = self.position(positions).unflatten(-1, self.heads)
        by_content = torch.einsum("bihd,bjhd->bhij", queries + content_bias, keys)
        by_place = torch.einsum("bihd,jhd->bhij", queries + place_bias, places)
        scores = by_content + _shifted(by_place)
        future = torch.ones_like(scores[0, 0], dtype=torch.bool).triu(1 + memory.shape[1])
        scores = (scores / self.heads[1] ** 0.5).masked_fill(future, float("-inf"))
        mixed = torch.einsum("bhij,bjhd->bihd", scores.softmax(dim=-1), values)
        x = self.attention_norm(x + self.output(mixed.flatten(2)))
        return self.feed_forward_norm(x + self.down(self.up(x).relu()))


def _shifted(scores: Tensor) -> Tensor:
    """Moves row i of [..., rows, columns] to the left by rows - 1 - i (the paper's appendix B)."""
    *outer, rows, columns = scores.shape
    padded = functional.pad(scores, (1, 0)).reshape(*outer, columns + 1, rows)
    return padded[..., 1:, :].reshape(*outer, rows, columns)


class TransformerXl(nn.Module):
    """Embeddings by clusters of words, blocks, and a loss by the same clusters."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes
        clusters, width = sizes.clusters, sizes.width
        one_width = sizes.narrower == 1  # then one embedding has the words of all clusters
        words = [(sizes.ends[-1], width)] if one_width else clusters
        self.embeddings = nn.ParameterList(torch.randn(shape) * 0.01 for shape in words)
        projected = [] if one_width else clusters
        self.projections = nn.ParameterList(
            torch.randn(width, narrow) * 0.01 for _, narrow in projected
        )
        self.content_bias, self.place_bias = (
            nn.Parameter(torch.zeros(sizes.heads, sizes.head_width)) for _ in range(2)
        )
        self.blocks = nn.ModuleList(Block(sizes) for _ in range(sizes.layers))
        # The first cluster's projection of the softmax is the only one that is not the embedding's.
        self.head = nn.ParameterList(torch.randn(width, width) * 0.01 for _ in projected[:1])
        self.biases = nn.ParameterList(torch.zeros(count) for count, _ in clusters)
        self.cluster_words = nn.Linear(width, len(clusters) - 1)

    def forward(
        self, tokens: Tensor, targets: Tensor, memory: Tensor, inside: Places, predicted: Places
    ) -> Tensor:
        """Returns the mean loss of [samples, tokens].

        Args:
            tokens, targets: words, and the words that follow them.
            memory: [samples, blocks, tokens, width], hidden states of the segment before.
            inside, predicted: places of the tokens and of the targets, as ``places_of`` has them.
        """
        x = self._embedded(tokens.flatten(), inside).reshape(*tokens.shape, -1)
        positions = waves(memory.shape[2] + x.shape[1], self.sizes.width).to(x.device)
        for number, block in enumerate(self.blocks):
            x = block(x, memory[:, number], positions, self.content_bias, self.place_bias)
        return self.loss(x.flatten(0, 1), targets.flatten(), predicted)

    def _embedded(self, words: Tensor, inside: Places) -> Tensor:
        scale = self.sizes.width**0.5
        if not self.projections:
            return scale * functional.embedding(words, self.embeddings[0])
        x = self.embeddings[0].new_zeros(len(words), self.sizes.width)
        for number, places in enumerate(inside):
            narrow = functional.embedding(
                self._in_cluster(words, places, number), self.embeddings[number]
            )
            x = x.index_copy(0, places, functional.linear(narrow, self.projections[number]))
        return scale * x

    def _in_cluster(self, words: Tensor, places: Tensor, number: int) -> Tensor:
        return words[places] - (0, *self.sizes.ends)[number]

    def loss(self, x: Tensor, targets: Tensor, predicted: Places) -> Tensor:
        """Returns the mean cross-entropy of hidden states [tokens, width] and targets [tokens]."""
        logits = torch.cat((self.logits(x, 0), self.cluster_words(x)), dim=1)
        first = self.sizes.clusters[0][0]
        loss = x.new_zeros(())
        for number, places in enumerate(predicted):
            inside = self._in_cluster(targets, places, number)
            # In the first cluster's softmax the last words are the other clusters.
            word = inside if number == 0 else torch.full_like(inside, first - 1 + number)
            loss = loss + functional.cross_entropy(logits[places], word, reduction="sum")
            if number:
                rare = self.logits(x[places], number)
                loss = loss + functional.cross_entropy(rare, inside, reduction="sum")
        return loss / len(targets)

    def logits(self, x: Tensor, number: int) -> Tensor:
        """Maps hidden states [tokens, width] to logits [tokens, words] of a cluster's words."""
        if not self.projections:
            first, end = (0, *self.sizes.ends)[number : number + 2]
            return functional.linear(x, self.embeddings[0][first:end], self.biases[number])
        projection = self.projections[number] if number else self.head[0]
        return functional.linear(x @ projection, self.embeddings[number], self.biases[number])


def places_of(words: np.ndarray, ends: tuple[int, ...]) -> Places:
    """Returns the places of the words of each cluster."""
    clusters = np.searchsorted(ends, words.ravel(), side="right")
    return [torch.tensor(np.flatnonzero(clusters == number)) for number in range(len(ends))]


def transformer_xl(sizes: Sizes) -> ModelBatchLoss:
    """Makes a Transformer-XL on words drawn by Zipf's law, which decides on the clusters' work."""
    ranks = np.arange(1, sizes.ends[-1] + 1)
    frequencies = 1 / ranks / (1 / ranks).sum()
    shape = (2, SEGMENTS, sizes.segment)
    words, following = np.random.default_rng(0).choice(len(ranks), shape, p=frequencies)
    memory = torch.zeros(SEGMENTS, sizes.layers, sizes.segment, sizes.width)
    batch = {
        "tokens": torch.tensor(words),
        "targets": torch.tensor(following),
        "memory": memory,
        "inside": places_of(words, sizes.ends),
        "predicted": places_of(following, sizes.ends),
    }
    return TransformerXl(sizes), batch, lambda module, batch: module(**batch)


def transformer_xl_base(tokens: int = BASE.segment) -> ModelBatchLoss:
    """Makes NVIDIA's base Transformer-XL on segments of ``tokens``: 192 million parameters."""
    return transformer_xl(replace(BASE, segment=tokens))


def transformer_xl_large(tokens: int = LARGE.segment) -> ModelBatchLoss:
    """Makes NVIDIA's large Transformer-XL on segments of ``tokens``: 285 million parameters."""
    return transformer_xl(replace(LARGE, segment=tokens))
