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
    Piece,
    computed,
    dropout,
    norm_input,
    streamed,
)
from common.perfmodel.architectures.architecture import Architecture, Layer, Tensor
from common.perfmodel.architectures.block_activations import (
    Style,
    block_activations,
    head_activations,
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
        name: name of the model, for messages and tables.
        layers: blocks.
        width: width of the hidden state.
        vocabulary: rows of the token embedding.
        attention: sizes of a block's attention.
        feed_forward: sizes of a block's feed-forward part; None if all blocks have experts.
        experts: experts in place of ``feed_forward`` in all blocks but ``dense_layers``.
        dense_layers: blocks, counted from 0, whose feed-forward part is no choice of experts.
        norm: ``layer`` (weight and bias), ``layer_no_bias`` or ``rms`` (weight).
        post_norm: whether norms come after the parts, as in BERT, and not before them.
        final_norm: whether a norm follows the last block.
        positions: kind of positions; learned ones are parameters.
        position_rows: rows of the table of learned positions.
        position_offset: rows of that table that no token uses.
        segments: rows of the table of segments; 0: there is none.
        embedding_norm: whether a norm follows the embeddings.
        pooler: whether a linear layer follows at the first token.
        head: one of ``HEADS``.
        transposed: whether weights of linear layers in blocks are [in, out], as in transformers'
            GPT-2.
        registration: modules of a block, or what their names begin with, in the order in which
            they are registered; empty where that is the order of the forward pass.
        embedding_registration: modules of the embeddings in the order of registration.
        dropout: whether it is trained with dropout behind the embeddings and all parts.
        attention_dropout: whether it is trained with dropout on the scores.
        one_input: whether both parts of a block read its input.
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

        Raises:
            UserError: the sequence is not positive, or longer than the learned positions.
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
        scores = self.attention.product_flops(seq_len, seq_len)
        flops = linear_flops(tensors, seq_len) + scores
        activations = block_activations(
            [(self.attention, seq_len)],
            experts or self.feed_forward,
            seq_len,
            self.width,
            self._style(),
            [tensor for tensor in tensors if len(tensor.shape) == 2],
        )
        if self.transposed:
            tensors = [replace(tensor, shape=tensor.shape[::-1]) for tensor in tensors]
        block = Layer(
            name="dense_block" if self.experts and dense else "block",
            tensors=tuple(tensors),
            forward_flops=flops + (experts.expert_flops(self.width, seq_len) if experts else 0),
            is_block=True,
            attention_flops=scores,
            activations=activations,
        )
        return registered(block, self.registration)

    def _style(self) -> Style:
        return Style(
            norm=self.norm,
            rotates=self.positions == "rotary",
            float32_softmax=self.positions == "rotary",
            dropout=self.dropout,
            attention_dropout=self.attention_dropout,
            one_input=self.one_input,
        )

    def _head_activations(self, seq_len: int) -> Activations:
        if self.head == "span":
            return head_activations(seq_len, self.width, 2, ())
        before: list[Piece] = []
        if self.head in ("masked", "pretraining"):  # a linear layer, a GELU and a norm
            stream = seq_len * self.width
            before = [computed("logits and loss", 3 * stream)]
        return head_activations(seq_len, self.width, self.vocabulary, before)

    def _head(self, seq_len: int) -> Layer:
        """Returns the head. Each token of a sample is scored, also where few are masked."""
        scores = linear_flops(linear("", self.width, self.vocabulary), seq_len)
        activations, weight = self._head_activations(seq_len), self.vocabulary * self.width
        if self.head == "tied":
            layer = Layer("head", (), scores, activations=activations)
            return replace(layer, shared_elements=weight)
        if self.head in ("own", "span"):
            span = self.head == "span"
            tensors = linear("head", self.width, 2 if span else self.vocabulary, bias=span)
            flops = linear_flops(tensors, seq_len)
            return Layer("head", tuple(tensors), flops, activations=activations)
        transform = linear("transform", self.width, self.width, bias=True)
        flops = linear_flops(transform, seq_len) + scores
        tensors = [*transform, *norm("norm", self.width, self.norm)]
        tensors.append(Tensor("scores.bias", (self.vocabulary,)))
        if self.head == "pretraining":
            next_sentence = linear("next_sentence", self.width, 2, bias=True)
            flops += linear_flops(next_sentence, 1)
            tensors += next_sentence
        layer = Layer("head", tuple(tensors), flops, activations=activations)
        return registered(replace(layer, shared_elements=weight), ("scores",))


def registered(layer: Layer, order: Sequence[str]) -> Layer:
    """Returns a layer whose tensors stand in order of the forward pass, as it is registered.

    Args:
        layer: a layer with tensors in the order of the forward pass, which is kept beside.
        order: modules, or what their names begin with; the rest comes after them.
    """
    forward = tuple(dict.fromkeys(tensor.module for tensor in layer.tensors))

    def rank(tensor: Tensor) -> int:
        module = f"{tensor.module}."
        ranks = (index for index, part in enumerate(order) if module.startswith(f"{part}."))
        return next(ranks, len(order))

    tensors = tuple(sorted(layer.tensors, key=rank))
    return replace(layer, tensors=tensors, forward_modules=forward)
