"""A model as its layers in the order of the forward pass: what predictions need to know of any.

Operations are those of matrix products, attention and convolutions, two for a multiplication with
its addition, as ``torch.utils.flop_counter`` counts them: attention whole, its causal half, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

from common.perfmodel.architectures.activations import NO_ACTIVATIONS, Activations


@dataclass(frozen=True)
class Tensor:
    """A parameter: its name inside its layer, such as ``attention.query.weight``, and its shape."""

    name: str
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        """Returns the number of elements."""
        return prod(self.shape)

    @property
    def module(self) -> str:
        """Returns the name of the module that the parameter belongs to."""
        return self.name.rpartition(".")[0]


@dataclass(frozen=True)
class Layer:
    """Equal layers in a row, such as the blocks of a transformer, its embeddings or its head.

    Attributes:
        name: ``block`` for those of a transformer.
        tensors: trained parameters of one layer in the order in which PyTorch registers them,
            without a weight that is another layer's (a tied head).
        forward_flops: operations of one layer in the forward pass of one sample.
        attention_flops: the part of ``forward_flops`` of scores and their products with values.
        count: number of such layers.
        is_block: whether FSDP gathers each layer by itself and checkpointing computes it again.
            What is no block is one unit of FSDP, the root.
        forward_modules: names of the tensors' modules in the order of the forward pass; empty where
            they are registered in it.
        observed: places of ``tensors`` in the order in which their gradients were seen to be ready.
        activations: memory that passes of one sample hold.
        shared_elements: elements of another layer's weight that it multiplies by (a tied head).
        frozen: parameters of one layer that are not trained, in the same order.
        backward_ratio: operations of its backward pass over those of its forward pass: 1 where
            products have frozen weights, 0 below the first trained parameter.
        shares_unit: whether FSDP gathers it at once with a block behind it that has a backward
            pass, where it has none itself.
    """

    name: str
    tensors: tuple[Tensor, ...] = ()
    forward_flops: float = 0
    count: int = 1
    is_block: bool = False
    forward_modules: tuple[str, ...] = ()
    observed: tuple[int, ...] = ()
    activations: Activations = NO_ACTIVATIONS
    shared_elements: int = 0
    attention_flops: float = 0
    frozen: tuple[Tensor, ...] = ()
    backward_ratio: float = 2
    shares_unit: bool = False

    @cached_property
    def elements(self) -> int:
        """Returns the parameters of one layer that are trained."""
        return sum(tensor.elements for tensor in self.tensors)

    @cached_property
    def all_elements(self) -> int:
        """Returns the parameters of one layer, frozen ones too."""
        return self.elements + sum(tensor.elements for tensor in self.frozen)

    @property
    def has_backward(self) -> bool:
        """Returns True if gradients are made in a layer or pass through it."""
        return bool(self.tensors or self.backward_ratio)

    @property
    def is_gathered_again(self) -> bool:
        """Returns True if FSDP's unit with a layer is there in the backward pass, too."""
        return self.has_backward or self.shares_unit

    def ready_places(self) -> list[int]:
        """Returns places in ``tensors`` in the order in which one layer's gradients are ready.

        Unless that was observed, modules come in reverse of the forward pass. The bias of a linear
        layer, whose weight is a matrix, is ready before its weight; that of a norm or a convolution
        after it.
        """
        if self.observed:
            return list(self.observed)
        by_module: dict[str, list[int]] = {}
        for index, tensor in enumerate(self.tensors):
            by_module.setdefault(tensor.module, []).append(index)
        ready = []
        for module in reversed(self.forward_modules or tuple(by_module)):
            places = by_module[module]
            tensors = [self.tensors[index] for index in places]
            weights = [tensor for tensor in tensors if tensor.name.endswith("weight")]
            is_linear = all(len(weight.shape) == 2 for weight in weights)
            ready += reversed(places) if is_linear else places
        return ready


@dataclass(frozen=True)
class Architecture:
    """A model that trains on samples of one size.

    Attributes:
        layers: in the order of the forward pass.
        tokens_per_sample: tokens of a sequence; 1 where a sample is an image.
        sample_bytes: bytes of a sample in the batch, its target included.
        ties_head: whether the head's weight is the token embedding's, whose gradient is then
            complete at the end of the backward pass.
    """

    name: str
    layers: tuple[Layer, ...]
    tokens_per_sample: int = 1
    ties_head: bool = False
    sample_bytes: float = 0

    def __post_init__(self) -> None:
        """Raises ValueError where two blocks of one name differ: a unit of FSDP has one size."""
        named: dict[str, Layer] = {}
        for block in self.blocks:
            single = replace(block, count=1)
            if named.setdefault(block.name, single) != single:
                raise ValueError(f"{self.name}: unequal blocks are called {block.name}")

    @cached_property
    def num_parameters(self) -> int:
        """Returns the number of parameters, each shared weight once."""
        return sum(layer.count * layer.all_elements for layer in self.layers)

    @cached_property
    def num_trained(self) -> int:
        """Returns the number of parameters that are trained."""
        return sum(layer.count * layer.elements for layer in self.layers)

    @property
    def forward_flops(self) -> float:
        """Returns the operations of one sample's forward pass."""
        return sum(layer.count * layer.forward_flops for layer in self.layers)

    @property
    def backward_flops(self) -> float:
        """Returns the operations of one sample's backward pass."""
        return sum(
            layer.count * layer.backward_ratio * layer.forward_flops for layer in self.layers
        )

    @property
    def blocks(self) -> tuple[Layer, ...]:
        """Returns the layers that are blocks, in order."""
        return tuple(layer for layer in self.layers if layer.is_block)

    @cached_property
    def root(self) -> Layer:
        """Returns all parameters outside of blocks as one layer."""
        outside = [layer for layer in self.one_by_one() if not layer.is_block]
        return Layer(
            "root",
            tensors=tuple(tensor for layer in outside for tensor in layer.tensors),
            frozen=tuple(tensor for layer in outside for tensor in layer.frozen),
        )

    def parameter_sizes(self) -> list[int]:
        """Returns the elements of each trained parameter, layer by layer."""
        sizes = []
        for layer in self.layers:
            sizes += layer.count * [tensor.elements for tensor in layer.tensors]
        return sizes

    def ready_order(self) -> list[int]:
        """Returns places in ``parameter_sizes`` as gradients become ready; a tied one is last."""
        order, first = [], sum(layer.count * len(layer.tensors) for layer in self.layers)
        for layer in reversed(self.layers):
            places = layer.ready_places()
            for _ in range(layer.count):
                first -= len(places)
                order += [first + index for index in places]
        return order

    def one_by_one(self) -> Iterator[Layer]:
        """Yields each single layer, in the order of the forward pass."""
        for layer in self.layers:
            for _ in range(layer.count):
                yield layer
