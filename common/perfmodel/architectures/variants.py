"""An architecture whose linear layers are trained in another way: by adapters, or in float8.

Times are computed of operations at one rate, with a backward pass of twice the forward pass. So
operations here are those of a step that takes as long.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import zip_longest

from common.errors import UserError
from common.perfmodel.architectures.activations import Piece
from common.perfmodel.architectures.architecture import Architecture, Layer, Tensor
from common.perfmodel.architectures.parts import linear, linear_flops

FLOAT8_SPEEDUP = 2
"""Products in float8 are twice as fast as in 16 bits (data sheets of Hopper and Blackwell)."""
FROZEN_SHARE = 2 / 3
"""A product with a frozen weight has a forward pass and the gradient of its input, two of three
equal parts. Attention has no weights."""


def with_adapters(architecture: Architecture, rank: int) -> Architecture:
    """Returns a model that trains low-rank adapters of its blocks' linear layers (LoRA).

    A layer of [out, in] gets [rank, in] and [out, rank] beside it (Hu et al. 2021, arXiv
    2106.09685). All else is frozen, and is not among the tensors.

    Raises UserError for a rank below 1.
    """
    if rank < 1:
        raise UserError(f"adapters of rank {rank}: at least 1")
    layers = tuple(
        _adapted(layer, rank, architecture.tokens_per_sample) for layer in architecture.layers
    )
    return replace(architecture, layers=layers, ties_head=False)


def _adapted(layer: Layer, rank: int, tokens: int) -> Layer:
    adapters: list[Tensor] = []
    for tensor in layer.tensors:
        if layer.is_block and tensor.name.endswith(".weight") and len(tensor.shape) == 2:
            outputs, inputs = tensor.shape
            adapters += linear(f"{tensor.module}.down", inputs, rank)
            adapters += linear(f"{tensor.module}.up", rank, outputs)
    saved = (1 - FROZEN_SHARE) * (layer.forward_flops - layer.attention_flops)
    return replace(
        layer,
        tensors=tuple(adapters),
        forward_flops=layer.forward_flops - saved + linear_flops(adapters, tokens),
        forward_modules=(),
        observed=(),
    )


def in_float8(architecture: Architecture) -> Architecture:
    """Returns a model whose blocks' linear layers compute in float8, in operations of 16 bits.

    All else stays in 16 bits, as in torchtitan's conversion of ``nn.Linear`` but the head.
    """
    layers = []
    for layer in architecture.layers:
        products = linear_flops(layer.tensors, architecture.tokens_per_sample)
        saved = products * (1 - 1 / FLOAT8_SPEEDUP) if layer.is_block else 0
        layers.append(replace(layer, forward_flops=layer.forward_flops - saved))
    return replace(architecture, layers=tuple(layers))


def in_units(architecture: Architecture, blocks: int) -> Architecture:
    """Returns a model whose blocks are joined, so many in a row, as FSDP may gather them.

    A unit has the sizes and times of all of its blocks; the last of a row may have fewer. One that
    holds blocks without a backward pass, and behind these others with it, is two here.
    """
    layers: list[Layer] = []
    for layer, behind in zip_longest(architecture.layers, architecture.layers[1:]):
        full, remainder = divmod(layer.count, blocks) if layer.is_block else (0, 0)
        if not layer.is_block:
            layers.append(layer)
        if full:
            layers.append(replace(_joined(layer, blocks), count=full))
        if remainder:
            part = replace(_joined(layer, remainder), name=f"{layer.name} of {remainder}")
            goes_on = behind is not None and behind.is_block and behind.has_backward
            layers.append(replace(part, shares_unit=goes_on and not layer.has_backward))
    return replace(architecture, layers=tuple(layers))


def _joined(layer: Layer, blocks: int) -> Layer:
    """Returns equal layers in a row as one."""
    if blocks == 1:
        return replace(layer, count=1)

    def pieces(of_one: tuple[Piece, ...]) -> tuple[Piece, ...]:
        """Returns pieces of all the layers."""
        return tuple(
            replace(piece, sizes=tuple(blocks * size for size in piece.sizes)) for piece in of_one
        )

    def named(of_one: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Returns parameters of all the layers."""
        return tuple(
            replace(tensor, name=f"{number}.{tensor.name}")
            for number in range(blocks)
            for tensor in of_one
        )

    held = layer.activations
    return replace(
        layer,
        tensors=named(layer.tensors),
        frozen=named(layer.frozen),
        forward_flops=blocks * layer.forward_flops,
        attention_flops=blocks * layer.attention_flops,
        forward_modules=(),
        observed=(),
        activations=replace(held, kept=pieces(held.kept), moved=pieces(held.moved)),
        count=1,
    )
