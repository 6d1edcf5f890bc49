"""A transformer of one stack of blocks, an encoder or a decoder, as an architecture.

Tensors are listed as the transformers library registers them; each family of models has an order
of its own (``Transformer.registration``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Annotated

from common.errors import UserError
from common.perfmodel.architectures.activations import (
    Activations,
    computed,
    dropout,
    norm_input,
    streamed,
)
from common.perfmodel.architectures.architecture import Architecture, Layer, Tensor
from common.perfmodel.architectures.block_activations import (
    Style,
    block_layer,
    head_activations,
    head_layer,
    tied,
)
from common.perfmodel.architectures.parts import (
    Attention,
    Count,
    Experts,
    FeedForward,
    LatentAttention,
    NormKind,
    Whole,
    linear,
    linear_flops,
    norm,
)
from common.settings import OneOf, Settings

HEADS = ("tied", "own", "none", "masked", "pretraining", "span")
"""Heads behind the blocks: scores over the vocabulary by the token embedding's weight or another;
none; BERT's scores for masked tokens, with the next sentence or not; the ends of a span."""
POSITIONS = ("learned", "rotary", "alibi", "none")


@dataclass(frozen=True, kw_only=True)
class Transformer(Settings):
    """The sizes of a transformer.

    Attributes:
        feed_forward: sizes of a block's feed-forward part; None if all blocks have experts.
        experts: experts in place of ``feed_forward`` in all blocks but ``dense_layers``.
        dense_layers: blocks, counted from 0, whose feed-forward part is no choice of experts.
        norm: ``layer`` (weight and bias), ``layer_no_bias`` or ``rms`` (weight).
        post_norm: whether norms come after the parts, as in BERT, and not before them.
        final_norm: whether a norm follows the last block.
        positions: kind of positions; learned ones are parameters.
        position_rows, position_offset: rows of their table, and how many of these no token uses.
        segments: rows of the table of segments; 0: there is none.
        pooler: whether a linear layer follows at the first token.
        head: one of ``HEADS``.
        transposed: whether weights of linear layers in blocks are [in, out], as in transformers'
            GPT-2.
        registration: modules of a block, or what their names begin with, in the order in which
            they are registered; empty where that is the order of the forward pass.
        embedding_registration: modules of the embeddings in the order of registration.
        dropout: whether there is dropout behind the embeddings and all parts.
        attention_dropout, one_input: as for ``Style``.
    """

    name: str
    layers: Annotated[int, Whole]
    width: Annotated[int, Whole]
    vocabulary: Annotated[int, Whole]
    attention: Attention | LatentAttention
    feed_forward: FeedForward | None
    experts: Experts | None = None
    dense_layers: tuple[int, ...] = ()
    norm: NormKind = "rms"
    post_norm: bool = False
    final_norm: bool = True
    positions: Annotated[str, OneOf(POSITIONS)] = "rotary"
    position_rows: Annotated[int, Count] = 0
    position_offset: Annotated[int, Count] = 0
    segments: Annotated[int, Count] = 0
    embedding_norm: bool = False
    pooler: bool = False
    head: Annotated[str, OneOf(HEADS)] = "own"
    transposed: bool = False
    registration: tuple[str, ...] = ()
    embedding_registration: tuple[str, ...] = ("token", "position")
    dropout: bool = False
    attention_dropout: bool = False
    one_input: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        all_have_experts = self.experts is not None and not self.dense_layers
        if self.feed_forward is None and not all_have_experts:
            raise UserError("blocks without experts need a feed-forward part")

    def architecture(self, seq_len: int) -> Architecture:
        """Returns the model's layers for samples of ``seq_len`` tokens.

        Raises UserError for a sequence that is not positive, or longer than the learned positions.
        """
        Whole.check("sequence length", seq_len)
        if seq_len > self.longest:
            raise UserError(
                f"{self.name} has {self.longest} learned positions, fewer than {seq_len}"
            )
        layers = [self._embedding(seq_len), *self._blocks(seq_len)]
        if self.final_norm:
            norms = tuple(norm("norm", self.width, self.norm))
            kept = Activations(tuple(norm_input(seq_len, self.width, self.norm)))
            layers.append(Layer("final_norm", norms, activations=kept))
        if self.pooler:
            pooler = linear("pooler", self.width, self.width, bias=True)
            layers.append(Layer("pooler", tuple(pooler), linear_flops(pooler, 1)))
        if self.head != "none":
            layers.append(self._head(seq_len))
        tied = self.head in ("tied", "masked", "pretraining")
        return Architecture(self.name, tuple(layers), seq_len, tied, sample_bytes=16 * seq_len)

    @property
    def longest(self) -> float:
        """Returns the most tokens of a sample; infinite unless positions are learned."""
        has_rows = self.positions == "learned"
        return self.position_rows - self.position_offset if has_rows else math.inf

    def _embedding(self, seq_len: int) -> Layer:
        tensors = [Tensor("token.weight", (self.vocabulary, self.width))]
        if self.segments:
            tensors.append(Tensor("segment.weight", (self.segments, self.width)))
        if self.positions == "learned":
            tensors.append(Tensor("position.weight", (self.position_rows, self.width)))
        if self.embedding_norm:
            tensors += norm("norm", self.width, self.norm)
        kept = norm_input(seq_len, self.width, self.norm) if self.embedding_norm else []
        kept += dropout(seq_len * self.width, in_stream=True) if self.dropout else []
        gradient = streamed("residual stream", seq_len * self.width)
        activations = Activations(tuple(kept), backward=((gradient,),))
        embedding = Layer("embedding", tuple(tensors), activations=activations)
        return registered(embedding, self.embedding_registration)

    def _blocks(self, seq_len: int) -> list[Layer]:
        """Returns equal blocks in a row as one layer."""
        is_dense = [
            self.experts is None or index in self.dense_layers for index in range(self.layers)
        ]
        return [
            replace(self._block(seq_len, dense), count=len(list(equal)))
            for dense, equal in groupby(is_dense)
        ]

    def _block(self, seq_len: int, dense: bool) -> Layer:
        attention = self.attention.tensors(self.width)
        experts = None if dense else self.experts
        feed_forward = (experts or self.feed_forward).tensors(self.width)
        norms = [
            norm(f"{part}_norm", self.width, self.norm) for part in ("attention", "feed_forward")
        ]
        if self.post_norm:
            tensors = [*attention, *norms[0], *feed_forward, *norms[1]]
        else:
            tensors = [*norms[0], *attention, *norms[1], *feed_forward]
        block = block_layer(
            "dense_block" if self.experts and dense else "block",
            tensors,
            self.attention,
            experts or self.feed_forward,
            seq_len,
            self.width,
            Style(
                norm=self.norm,
                rotates=self.positions == "rotary",
                dropout=self.dropout,
                attention_dropout=self.attention_dropout,
                one_input=self.one_input,
            ),
        )
        if self.transposed:
            tensors = (replace(tensor, shape=tensor.shape[::-1]) for tensor in tensors)
            block = replace(block, tensors=tuple(tensors))
        return registered(block, self.registration)

    def _head(self, seq_len: int) -> Layer:
        """Returns the head. Each token of a sample is scored, also where few are masked."""
        if self.head == "span":
            return head_layer(seq_len, self.width, 2, bias=True)
        untied = head_layer(seq_len, self.width, self.vocabulary)
        if self.head in ("own", "tied"):
            return untied if self.head == "own" else tied(untied)
        transform = linear("transform", self.width, self.width, bias=True)
        tensors = [*transform, *norm("norm", self.width, self.norm)]
        tensors.append(Tensor("scores.bias", (self.vocabulary,)))
        next_sentence = linear("next_sentence", self.width, 2, bias=True)
        if self.head == "masked":
            next_sentence = []
        # A linear layer, a GELU and a norm come before the scores.
        before = computed("logits and loss", 3 * seq_len * self.width)
        layer = replace(
            tied(untied),
            tensors=(*tensors, *next_sentence),
            forward_flops=untied.forward_flops
            + linear_flops(transform, seq_len)
            + linear_flops(next_sentence, 1),
            activations=head_activations(seq_len, self.width, self.vocabulary, [before]),
        )
        return registered(layer, ("scores",))


def registered(layer: Layer, order: Sequence[str]) -> Layer:
    """Returns a layer as it is registered: modules of ``order`` (by prefix), then all others.

    The order of the forward pass is kept beside.
    """
    forward = tuple(dict.fromkeys(tensor.module for tensor in layer.tensors))

    def rank(tensor: Tensor) -> int:
        module = f"{tensor.module}."
        ranks = (index for index, part in enumerate(order) if module.startswith(f"{part}."))
        return next(ranks, len(order))

    tensors = tuple(sorted(layer.tensors, key=rank))
    return replace(layer, tensors=tensors, forward_modules=forward)
