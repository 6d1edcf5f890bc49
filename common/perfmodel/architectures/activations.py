"""Activations of any layer: what a forward pass keeps for the backward pass, piece by piece.

Autograd's nodes say what they save (derivatives.yaml of PyTorch); under mixed precision autocast's
rules decide in which type. Korthikanti et al. 2022 (arXiv 2205.05198) count in the same way. Sizes
are those of PyTorch's own operators and of the transformers library's modules in eager mode.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from common.errors import require_known

CASTS = ("float32", "autocast", "half")
"""Types of a step: all float32; matrix products in 16 bits by autocast, beside float32 weights and
a float32 residual stream; all of the passes in 16 bits, as where FSDP casts every unit."""
FUSED, WRITTEN = "fused attention", "attention written out"
PLAIN_LOSS, FUSED_LOSS = "plain loss", "fused loss"
CPU, CUDA = "cpu", "cuda"


@dataclass(frozen=True)
class Numerics:
    """The types and kernels that decide the size of a piece.

    Attributes:
        casts: one of ``CASTS``.
        fused_attention: whether scores stay inside of a kernel.
        fused_loss: whether one kernel makes the loss from logits in the type of products, and
            keeps no float32 table of them (a compiled loss, flash-attn's cross-entropy).
        device: cuda, whose dropout keeps a byte an element, or cpu, whose keeps a number.

    Raises UserError for other casts.
    """

    casts: str = "float32"
    fused_attention: bool = True
    fused_loss: bool = False
    device: str = CUDA

    def __post_init__(self) -> None:
        require_known("casts", self.casts, CASTS)

    @property
    def compute_bytes(self) -> int:
        """Returns the bytes of a number in matrix products."""
        return 4 if self.casts == "float32" else 2

    @property
    def root_bytes(self) -> int:
        """Returns the bytes of a number that FSDP gathers of what is in no block.

        A policy of 16 bits for every unit holds for the root, too; this project's trainer gives one
        to blocks alone, beside which autocast casts the head.
        """
        return self.compute_bytes if self.casts == "half" else 4

    @property
    def conditions(self) -> frozenset[str]:
        """Returns the conditions of pieces that hold."""
        attention = FUSED if self.fused_attention else WRITTEN
        return frozenset((attention, FUSED_LOSS if self.fused_loss else PLAIN_LOSS, self.device))


FLOAT32_NUMERICS = Numerics()


@dataclass(frozen=True)
class Piece:
    """A tensor, or several of one use.

    Attributes:
        part: the use, one of ``moments.COMPONENTS``.
        sizes: bytes of a sample in each of ``CASTS``.
        only: conditions (of ``Numerics.conditions``) under which it is there at all.
    """

    part: str
    sizes: tuple[float, float, float]
    only: tuple[str, ...] = ()

    def bytes_in(self, numerics: Numerics) -> float:
        """Returns the bytes of a sample; 0 where a condition does not hold."""
        holds = numerics.conditions.issuperset(self.only)
        return self.sizes[CASTS.index(numerics.casts)] if holds else 0.0


@dataclass(frozen=True)
class Activations:
    """The activations of a layer, as pieces a sample.

    Attributes:
        kept: pieces between the layer's forward and its backward pass.
        entering: input of the layer, which is all that checkpointing keeps of a block.
        selected: pieces that selective checkpointing keeps beside ``entering``.
        borrowed: pieces of ``entering`` that are not in ``kept``, as the block before keeps them.
            That one drops them under checkpointing, which then holds them for this layer.
        forward: temporaries at the high point of its forward pass.
        backward: pieces beside ``kept`` at each moment of its backward pass that can be the
            peak; negative where kept pieces are gone by then.
        moved: pieces that it would keep if all were trained, which its operators move through
            memory; empty where these are ``kept``.
        fixed: autocast's copies of weights that a module was seen to hold, less those that its
            weights let expect: bytes in each of ``CASTS`` whatever the samples, in the forward and
            in the backward pass. They hold without sharding and checkpointing.
    """

    kept: tuple[Piece, ...] = ()
    entering: tuple[Piece, ...] = ()
    selected: tuple[Piece, ...] = ()
    borrowed: tuple[Piece, ...] = ()
    forward: tuple[Piece, ...] = ()
    backward: tuple[tuple[Piece, ...], ...] = field(default=((),))
    moved: tuple[Piece, ...] = ()
    fixed: tuple[Piece, ...] = ()


NO_ACTIVATIONS = Activations()


def in_parts(pieces: Iterable[Piece], numerics: Numerics, samples: float = 1) -> dict[str, float]:
    """Adds up the bytes of ``samples`` samples by part."""
    parts: dict[str, float] = {}
    for piece in pieces:
        size = samples * piece.bytes_in(numerics)
        if size:
            parts[piece.part] = parts.get(piece.part, 0.0) + size
    return parts


def computed(part: str, elements: float, *only: str, copies: int = 1) -> Piece:
    """Makes numbers in the type of products; autocast makes ``copies``, one for each reader."""
    return Piece(part, (4 * elements, 2 * copies * elements, 2 * elements), only)


def streamed(part: str, elements: float, *only: str) -> Piece:
    """Makes numbers in the type of the residual stream."""
    return Piece(part, (4 * elements, 4 * elements, 2 * elements), only)


def exact(part: str, elements: float, *only: str) -> Piece:
    """Makes numbers that are float32 whatever the casts."""
    return Piece(part, (4 * elements,) * 3, only)


def negative(pieces: Iterable[Piece]) -> list[Piece]:
    """Returns pieces that take away what these add."""
    return [Piece(piece.part, tuple(-size for size in piece.sizes), piece.only) for piece in pieces]


def written_out(activations: Activations) -> Activations:
    """Returns the activations of a layer whose attention is never fused, whatever the kernels."""

    def of(pieces: tuple[Piece, ...]) -> tuple[Piece, ...]:
        return tuple(
            replace(piece, only=tuple(name for name in piece.only if name != WRITTEN))
            for piece in pieces
            if FUSED not in piece.only
        )

    return Activations(
        kept=of(activations.kept),
        entering=of(activations.entering),
        selected=of(activations.selected),
        borrowed=of(activations.borrowed),
        forward=of(activations.forward),
        backward=tuple(of(pieces) for pieces in activations.backward),
    )


def dropout(elements: float, *only: str, in_stream: bool = False) -> list[Piece]:
    """Returns what a dropout keeps: a byte an element on a GPU, a number of its type on a CPU."""
    number = (streamed if in_stream else computed)("dropout", elements, CPU, *only)
    return [number, Piece("dropout", (elements,) * 3, (CUDA, *only))]


def norm_input(tokens: float, width: int, kind: str) -> list[Piece]:
    """Returns what a norm keeps of its input.

    A layer norm keeps the input, and a mean and a deviation of each token. An RMS norm of several
    operators keeps the input in float32, its inverse root, and the normalised input.
    """
    if kind != "rms":
        return [streamed("residual stream", tokens * width), exact("norm outputs", 2 * tokens)]
    return [
        exact("residual stream", tokens * width),
        streamed("norm outputs", tokens * width),
        exact("norm outputs", tokens),
    ]
