"""Modules of which a part is frozen: what its layers train, and what their passes compute.

A product makes one gradient for each of its two factors that has one: none below the first trained
parameter, one where the weight is frozen. An attention kernel makes all of its own as soon as one
is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace

from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from common.perfmodel.architectures.architecture import Architecture, Layer
from common.perfmodel.architectures.architecture import Tensor as Parameter


def frozen_keys(module: nn.Module) -> set[str]:
    """Returns the names of a module's parameters that are not trained."""
    return {key for key, weight in module.named_parameters() if not weight.requires_grad}


@contextmanager
def all_trained(module: nn.Module) -> Iterator[None]:
    """Lets every parameter have a gradient that can have one."""
    frozen = [
        weight
        for weight in module.parameters()
        if weight.is_floating_point() and not weight.requires_grad
    ]
    try:
        for weight in frozen:
            weight.requires_grad_(True)
        yield
    finally:
        for weight in frozen:
            weight.requires_grad_(False)


def gradient_counter() -> FlopCounterMode:
    """Returns a counter that counts in a forward pass what the backward pass will compute."""
    formulas = {operator: _of_gradients(count) for operator, count in flop_registry.items()}
    return FlopCounterMode(display=False, custom_mapping=formulas)


def _of_gradients(count: Callable[..., int]) -> Callable[..., int]:
    def counted(*args: object, **kwargs: object) -> int:
        factors = [leaf for leaf in args if isinstance(leaf, Tensor) and leaf.dim() > 1]
        needed = sum(factor.requires_grad for factor in factors)
        gradients = needed if len(factors) == 2 else 2 * bool(needed)
        return gradients * count(*args, **kwargs)

    counted._get_raw = True  # the counter then passes tensors, not their shapes
    return counted


def partly_frozen(layer: Layer, frozen: Collection[str], backward_flops: float) -> Layer:
    """Returns a layer that was followed as if all were trained, with its frozen part apart.

    Args:
        frozen: names of the module's parameters that are not trained.
        backward_flops: operations of its backward pass.
    """

    def is_frozen(tensor: Parameter) -> bool:
        return (f"{layer.name}.{tensor.name}" if layer.is_block else tensor.name) in frozen

    trained = [tensor for tensor in layer.tensors if not is_frozen(tensor)]
    ready = [layer.tensors[index] for index in layer.observed]
    return replace(
        layer,
        tensors=tuple(trained),
        frozen=tuple(filter(is_frozen, layer.tensors)),
        observed=tuple(trained.index(tensor) for tensor in ready if tensor in trained),
        backward_ratio=backward_flops / layer.forward_flops if layer.forward_flops else 2,
    )


def as_it_moves(architecture: Architecture, if_trained: Architecture) -> Architecture:
    """Returns an architecture whose layers know what they would keep if all were trained.

    What has no operation has a backward pass where it keeps something for it.
    """
    layers = []
    for layer, trained in zip(architecture.layers, if_trained.layers, strict=True):
        activations = replace(layer.activations, moved=trained.activations.kept)
        keeps = any(any(piece.sizes) for piece in activations.kept)
        ratio = layer.backward_ratio if layer.forward_flops or keeps else 0
        layers.append(replace(layer, activations=activations, backward_ratio=ratio))
    return replace(architecture, layers=tuple(layers))
