"""A residual network of convolutions (He et al. 2015, arXiv 1512.03385) that classifies images."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from common.errors import UserError
from common.perfmodel.architectures.activations import Activations, Piece, computed
from common.perfmodel.architectures.architecture import Architecture, Layer, Tensor
from common.perfmodel.architectures.block_activations import head_layer
from common.perfmodel.architectures.parts import Whole, norm
from common.perfmodel.architectures.transformer import registered
from common.settings import OneOf, Settings

LAYER_TYPES = ("basic", "bottleneck")
PART = "activations"


@dataclass(frozen=True)
class _Convolution:
    """A convolution with its batch norm, of an image whose side has ``pixels``."""

    name: str
    inputs: int
    outputs: int
    width: int
    pixels: int
    stride: int = 1

    @property
    def out_pixels(self) -> int:
        """Returns the side of the image that comes out: padding keeps it, the stride divides it."""
        return -(-self.pixels // self.stride)

    @property
    def out_elements(self) -> int:
        """Returns the numbers of a sample that come out."""
        return self.outputs * self.out_pixels**2

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Returns the parameters, in the order of the forward pass."""
        shape = (self.outputs, self.inputs, self.width, self.width)
        weight = Tensor(f"{self.name}.convolution.weight", shape)
        return (weight, *norm(f"{self.name}.norm", self.outputs, "layer"))

    @property
    def forward_flops(self) -> int:
        """Returns the operations of a sample."""
        return 2 * self.out_pixels**2 * self.tensors[0].elements

    def kept(self, activated: bool = True) -> list[Piece]:
        """Returns the norm's input, and what the activation function makes of its output."""
        return [computed(PART, (2 if activated else 1) * self.out_elements)]


@dataclass(frozen=True, kw_only=True)
class ResidualNetwork(Settings):
    """The sizes of a ResNet.

    Attributes:
        widths: channels that come out of each stage.
        depths: residual layers of each stage.
        layer_type: basic (two convolutions of 3 × 3) or bottleneck (1 × 1, 3 × 3, 1 × 1).
        embedding_width: channels of the first convolution.
        shrinks_at_once: whether the first stage halves the image, too.
        shrinks_first: whether a bottleneck halves the image in its first convolution.

    Raises UserError for another type of layers, and for widths and depths that do not match.
    """

    name: str
    widths: tuple[int, ...]
    depths: tuple[int, ...]
    layer_type: Annotated[str, OneOf(LAYER_TYPES, "layer_type")] = "bottleneck"
    embedding_width: Annotated[int, Whole] = 64
    shrinks_at_once: bool = False
    shrinks_first: bool = False
    image_width: Annotated[int, Whole] = 224
    channels: Annotated[int, Whole] = 3
    classes: Annotated[int, Whole] = 1000

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.widths or len(self.widths) != len(self.depths):
            raise UserError(f"{len(self.widths)} hidden_sizes for {len(self.depths)} depths")
        for key, numbers in (("hidden_sizes", self.widths), ("depths", self.depths)):
            for number in numbers:
                Whole.check(key, number)

    def architecture(self, seq_len: int | None = None) -> Architecture:
        """Returns the layers for one image a sample. Raises UserError for a length of a text."""
        if seq_len is not None:
            raise UserError(f"{self.name} takes images, which have no length of {seq_len} tokens")
        first = _Convolution("stem", self.channels, self.embedding_width, 7, self.image_width, 2)
        # The image is the batch's, of which autocast makes a copy. Pooling halves the image again,
        # and keeps of each number where it came from.
        pixels = self.channels * self.image_width**2
        pooled = -(-first.out_pixels // 2)
        taken = self.embedding_width * pooled**2
        image = Piece("batch", (0, 2 * pixels, 2 * pixels))
        kept = (image, *first.kept(), computed(PART, taken), Piece(PART, (8 * taken,) * 3))
        layers = [Layer("stem", first.tensors, first.forward_flops, activations=Activations(kept))]
        layers += self._stages(pooled)
        layers.append(head_layer(1, self.widths[-1], self.classes, bias=True))
        return Architecture(self.name, tuple(layers), sample_bytes=4 * pixels + 8)

    def _stages(self, pixels: int) -> Iterator[Layer]:
        """Yields the residual layers; the first of a stage may halve the image."""
        inputs = self.embedding_width
        for number, (outputs, depth) in enumerate(zip(self.widths, self.depths, strict=True)):
            stride = 2 if number or self.shrinks_at_once else 1
            first = f"first of stage {number + 1}"
            yield self._residual(first, inputs, outputs, pixels, stride, follows_block=number > 0)
            inputs, pixels = outputs, -(-pixels // stride)
            if depth > 1:
                name = f"stage {number + 1}"
                yield self._residual(name, outputs, outputs, pixels, 1, count=depth - 1)

    def _residual(
        self,
        name: str,
        inputs: int,
        outputs: int,
        pixels: int,
        stride: int,
        *,
        count: int = 1,
        follows_block: bool = True,
    ) -> Layer:
        """Returns convolutions beside a shortcut, which has one where sizes change."""
        small = -(-pixels // stride)
        if self.layer_type == "basic":
            convolutions = [
                _Convolution("first", inputs, outputs, 3, pixels, stride),
                _Convolution("second", outputs, outputs, 3, small),
            ]
        else:
            inner, shrunk = outputs // 4, small if self.shrinks_first else pixels
            strides = (stride, 1) if self.shrinks_first else (1, stride)
            convolutions = [
                _Convolution("first", inputs, inner, 1, pixels, strides[0]),
                _Convolution("second", inner, inner, 3, shrunk, strides[1]),
                _Convolution("third", inner, outputs, 1, small),
            ]
        kept = [piece for convolution in convolutions for piece in convolution.kept()]
        if inputs != outputs or stride > 1:
            shortcut = _Convolution("shortcut", inputs, outputs, 1, pixels, stride)
            convolutions.append(shortcut)
            kept += shortcut.kept(activated=False)
        # Gradients of both sides: those of the output, and the largest that one of them makes.
        entering, made = inputs * pixels**2, convolutions[-1].out_elements
        backward = computed("temporary buffers", 2 * made + entering)
        # The activation function at a block's end keeps what enters the next one.
        image = computed(PART, entering)
        layer = Layer(
            name,
            tuple(tensor for convolution in convolutions for tensor in convolution.tensors),
            sum(convolution.forward_flops for convolution in convolutions),
            count=count,
            is_block=True,
            activations=Activations(
                kept=tuple(kept),
                entering=(image,),
                borrowed=(image,) if follows_block else (),
                backward=((backward,),),
            ),
        )
        return registered(layer, ("shortcut",))
