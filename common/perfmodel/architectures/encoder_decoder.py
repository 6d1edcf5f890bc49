"""T5: an encoder and a decoder, whose blocks look at what the encoder has made."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

from common.perfmodel.architectures.activations import Activations, dropout, norm_input, written_out
from common.perfmodel.architectures.architecture import Architecture, Layer, Tensor
from common.perfmodel.architectures.block_activations import (
    Style,
    block_layer,
    head_layer,
    tied,
)
from common.perfmodel.architectures.parts import (
    Attention,
    FeedForward,
    Whole,
    norm,
)
from common.perfmodel.architectures.transformer import registered
from common.settings import Settings

REGISTRATION = (
    *("attention.query", "attention.key", "attention.value", "attention.output", "attention"),
    *("attention_norm", "cross_attention", "cross_attention_norm", "feed_forward"),
)
"""Modules of a block in the order in which transformers registers T5's."""


@dataclass(frozen=True, kw_only=True)
class EncoderDecoder(Settings):
    """The sizes of a T5 (Raffel et al. 2020): relative positions, RMS norms, no biases.

    Attributes:
        vocabulary: rows of the token embedding, which encoder and decoder share.
        position_buckets: distances that are told apart; the first block of a stack has a weight for
            each of them and each head, which all blocks use.
        ties_head: whether the head's weight is the token embedding's.
    """

    name: str
    encoder_layers: Annotated[int, Whole]
    decoder_layers: Annotated[int, Whole]
    width: Annotated[int, Whole]
    vocabulary: Annotated[int, Whole]
    attention: Attention
    feed_forward: FeedForward
    position_buckets: Annotated[int, Whole]
    ties_head: bool = True
    dropout: bool = True

    def architecture(self, seq_len: int) -> Architecture:
        """Returns the layers for samples of ``seq_len`` tokens on either side; they count once.

        Raises UserError for a length that is not positive.
        """
        Whole.check("sequence length", seq_len)
        head = head_layer(seq_len, self.width, self.vocabulary)
        layers = (
            Layer("embedding", (Tensor("token.weight", (self.vocabulary, self.width)),)),
            *self._stack("encoder", self.encoder_layers, seq_len),
            *self._stack("decoder", self.decoder_layers, seq_len),
            tied(head) if self.ties_head else head,
        )
        return Architecture(self.name, layers, seq_len, self.ties_head, sample_bytes=24 * seq_len)

    def _stack(self, side: str, count: int, seq_len: int) -> list[Layer]:
        later = replace(self._block(side, seq_len, first=False), count=count - 1)
        kept = norm_input(seq_len, self.width, "rms")
        kept += dropout(2 * seq_len * self.width, in_stream=True) if self.dropout else []
        norms = tuple(norm("norm", self.width, "rms"))
        last_norm = Layer(f"{side}_norm", norms, activations=Activations(tuple(kept)))
        return [
            self._block(side, seq_len, first=True),
            *([later] if later.count else []),
            last_norm,
        ]

    def _block(self, side: str, seq_len: int, first: bool) -> Layer:
        parts = ("attention", "cross_attention") if side == "decoder" else ("attention",)
        tensors = []
        for part in parts:
            projections = self.attention.tensors(self.width, part)
            tensors += [*norm(f"{part}_norm", self.width, "rms"), *projections]
        tensors += norm("feed_forward_norm", self.width, "rms")
        tensors += self.feed_forward.tensors(self.width)
        block = block_layer(
            f"{side}_first_block" if first else f"{side}_block",
            tensors,
            self.attention,
            self.feed_forward,
            seq_len,
            self.width,
            Style(
                norm="rms",
                dropout=self.dropout,
                attention_dropout=self.dropout,
                inner_dropout=self.dropout,
            ),
            attentions=len(parts),
        )
        if first:
            shape = (self.position_buckets, self.attention.heads)
            before_output = [tensor.name for tensor in tensors].index("attention.output.weight")
            tensors.insert(before_output, Tensor("attention.positions.weight", shape))
        # The bias of positions is added to scores, for which transformers writes them out.
        activations = written_out(block.activations)
        block = replace(block, tensors=tuple(tensors), activations=activations)
        return registered(block, REGISTRATION)
