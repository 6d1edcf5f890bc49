"""A vision transformer (Dosovitskiy et al. 2021), whose tokens are patches of an image."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

from common.errors import UserError
from common.perfmodel.architectures.activations import Activations, Piece, norm_input
from common.perfmodel.architectures.architecture import Architecture, Layer, Tensor
from common.perfmodel.architectures.block_activations import (
    Style,
    block_layer,
    head_layer,
)
from common.perfmodel.architectures.parts import (
    Attention,
    FeedForward,
    Whole,
    norm,
)
from common.perfmodel.architectures.transformer import registered
from common.settings import Settings

REGISTRATION = ("attention", "attention_norm", "feed_forward_norm", "feed_forward")
"""Modules of a block in the order in which transformers registers ViT's."""


@dataclass(frozen=True, kw_only=True)
class VisionTransformer(Settings):
    """The sizes of a ViT that classifies square images by a class token; widths are in pixels."""

    name: str
    layers: Annotated[int, Whole]
    width: Annotated[int, Whole]
    attention: Attention
    feed_forward: FeedForward
    image_width: Annotated[int, Whole] = 224
    patch_width: Annotated[int, Whole] = 16
    channels: Annotated[int, Whole] = 3
    classes: Annotated[int, Whole] = 1000

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.image_width % self.patch_width:
            patch = f"a patch's {self.patch_width}"
            raise UserError(f"an image's {self.image_width} pixels are no multiple of {patch}")

    def architecture(self, seq_len: int | None = None) -> Architecture:
        """Returns the layers of an image. Raises UserError for another number of tokens."""
        patches = (self.image_width // self.patch_width) ** 2
        tokens = patches + 1
        if seq_len not in (None, tokens):
            raise UserError(f"{self.name} has {tokens} tokens an image, not {seq_len}")
        # The head reads the class token, a view of all tokens' norms; autocast copies it out.
        view = Piece("norm outputs", (4 * patches * self.width, 0, 2 * patches * self.width))
        layers = (
            self._embedding(patches),
            self._block(tokens),
            Layer(
                "final_norm",
                tuple(norm("norm", self.width, "layer")),
                activations=Activations((*norm_input(tokens, self.width, "layer"), view)),
            ),
            head_layer(1, self.width, self.classes, bias=True),
        )
        pixels = self.channels * self.image_width**2
        return Architecture(self.name, layers, sample_bytes=4 * pixels + 8)

    def _embedding(self, patches: int) -> Layer:
        weight = (self.width, self.channels, self.patch_width, self.patch_width)
        tensors = (
            Tensor("patch.weight", weight),
            Tensor("patch.bias", (self.width,)),
            Tensor("class_token.weight", (1, 1, self.width)),
            Tensor("position.weight", (1, patches + 1, self.width)),
        )
        pixels = self.channels * self.image_width**2
        # The image is the batch's; autocast and the casts of FSDP make a copy.
        kept = Activations((Piece("batch", (0, 2 * pixels, 2 * pixels)),))
        flops = 2 * patches * tensors[0].elements
        embedding = Layer("embedding", tensors, flops, activations=kept)
        return registered(embedding, ("class_token", "position"))

    def _block(self, tokens: int) -> Layer:
        tensors = (
            *norm("attention_norm", self.width, "layer"),
            *self.attention.tensors(self.width),
            *norm("feed_forward_norm", self.width, "layer"),
            *self.feed_forward.tensors(self.width),
        )
        block = block_layer(
            "block",
            tensors,
            self.attention,
            self.feed_forward,
            tokens,
            self.width,
            Style(norm="layer"),
        )
        return registered(replace(block, count=self.layers), REGISTRATION)
