"""An architecture from a module itself: its forward and backward pass, followed on fake tensors.

Fake tensors have shapes and no data, so a model larger than any memory is followed in seconds.
Operations are counted by ``torch.utils.flop_counter``, the order of gradients is that in which
autograd hands them over, activations those that it saves. Equal
neighbours in a list of modules are blocks.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import groupby, pairwise
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from common.errors import UserError
from common.models.frozen import (
    all_trained,
    as_it_moves,
    frozen_keys,
    gradient_counter,
    partly_frozen,
)
from common.models.traced_memory import unit_of, with_activations
from common.perfmodel.architectures.activations import CUDA, NO_ACTIVATIONS, Activations, Piece
from common.perfmodel.architectures.architecture import Architecture, Layer
from common.perfmodel.architectures.architecture import Tensor as Parameter

BATCHED = r"bmm|scaled_dot_product|attention"
"""Names of operators that multiply two batches of matrices."""
ModelBatchLoss = tuple[nn.Module, object, Callable[[nn.Module, object], Tensor]]
"""A module, a batch, and a function that returns the loss of the two."""
Result = TypeVar("Result")


def traced_architecture(
    make: Callable[[], ModelBatchLoss], name: str, device: str = CUDA, samples: int | None = None
) -> Architecture:
    """Follows a module's passes on fake tensors, and returns it as layers.

    Args:
        make: returns (module, batch, loss); it is called where tensors are fake.
        device: cuda, or cpu, whose dropout and attention are other kernels.
        samples: samples of the batch; by default the rows of its first tensor.

    Raises UserError where the module cannot be followed, with what stopped it.
    """
    try:
        with faked(make) as (module, batch, loss):
            samples = samples or _rows(batch, name)
            run = partial(loss, module, batch)
            watched = (module, run, batch, samples, device)
            frozen = frozen_keys(module)
            with all_trained(module):
                sized = with_activations(_followed(module, run, samples, name, frozen), *watched)
            if frozen:
                trained = with_activations(_partly_frozen(sized, module, run, samples), *watched)
                sized = as_it_moves(trained, sized)
            return replace(sized, layers=tuple(_joined(sized.layers)))
    except UserError:
        raise
    except DataDependentOutputException as error:
        asks = "it asks for a tensor's value, as .item() or an if does"
        raise UserError(f"{name} cannot be followed on fake tensors: {asks}") from error
    except Exception as error:
        first = str(error).strip().splitlines() or [type(error).__name__]
        raise UserError(f"{name} cannot be followed on fake tensors: {first[0]}") from error


def _rows(batch: object, name: str) -> int:
    """Returns the rows of a batch's first tensor. Raises UserError where none has rows."""
    tensors = (leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim())
    first = next(tensors, None)
    if first is None:
        raise UserError(f"{name}: its batch has no tensor with a sample in each row")
    return len(first)


@contextmanager
def faked(make: Callable[[], Result]) -> Iterator[Result]:
    """Makes a model of fake tensors, whose passes may run inside the block; nothing is compiled."""
    eager = torch.compiler.set_stance("force_eager")  # code for fake tensors crashes on others
    with FakeTensorMode(), _operator_by_operator(), eager:
        with _Zeros():
            made = make()
        yield made


@contextmanager
def _operator_by_operator() -> Iterator[None]:
    """Takes oneDNN away, whose LSTM is one operator, in which neither products nor gates count."""
    enabled = torch.backends.mkldnn.enabled
    torch.backends.mkldnn.enabled = False
    try:
        yield
    finally:
        torch.backends.mkldnn.enabled = enabled


class _Zeros(TorchDispatchMode):
    """Answers 0 where an initialisation asks for a value, as a draw that is repeated does."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None) -> object:
        """Runs an operator, unless it reads a tensor's value."""
        if func is torch.ops.aten._local_scalar_dense.default:
            return False if args[0].dtype == torch.bool else 0
        return func(*args, **(kwargs or {}))


def _followed(
    module: nn.Module,
    loss: Callable[[], Tensor],
    samples: int,
    name: str,
    frozen: Collection[str],
) -> Architecture:
    """Runs both passes, and shares parameters and operations out over the module's units.

    All are trained meanwhile, those ``frozen``, too.
    """
    trained = {key: weight for key, weight in module.named_parameters() if weight.requires_grad}
    ready: list[str] = []
    for key, parameter in trained.items():
        parameter.register_post_accumulate_grad_hook(lambda _, key=key: ready.append(key))
    units = _units(module)
    with FlopCounterMode(display=False) as counter:
        out = loss()
    out.backward()
    flops = _by_unit(module, counter, units)
    attention = _by_unit(module, counter, units, of_attention=True)
    outside = flops.pop("", 0) / samples  # such as a head that is the embedding
    parameters = {key: unit_of(key, units) for key in trained}
    layers = []
    for path, keys in _in_forward_order(parameters, ready, units, frozen):
        registered = [key for key in trained if key in keys]
        # A part of a unit that is ready apart from the rest has the name of its first parameter.
        is_part = path in {layer.name for layer in layers}
        layer = Layer(
            name=registered[0] if is_part else path,
            tensors=tuple(
                Parameter(
                    key.removeprefix(f"{path}.") if units[path] else key, tuple(trained[key].shape)
                )
                for key in registered
            ),
            forward_flops=flops.pop(path, 0) / samples,
            attention_flops=attention.pop(path, 0) / samples,
            is_block=units[path],
            observed=tuple(registered.index(key) for key in keys),
        )
        layers.append(layer)
    if outside:
        layers.append(Layer("rest", forward_flops=outside))
    shared = _tied_elements(module, layers[0].name, units)
    layers[-1] = replace(layers[-1], shared_elements=shared)
    return Architecture(name=name, layers=tuple(layers), ties_head=shared > 0)


def _tied_elements(module: nn.Module, first: str, units: Collection[str]) -> int:
    """Returns the elements of the first unit's weights that a module behind it has, too."""
    weights = dict(module.named_parameters())
    tied = {
        parameter: parameter.numel()
        for key, parameter in module.named_parameters(remove_duplicate=False)
        if key not in weights and parameter.requires_grad
    }
    first_weights = (p for key, p in weights.items() if unit_of(key, units) == first)
    return sum(tied.get(parameter, 0) for parameter in first_weights)


def _partly_frozen(
    architecture: Architecture, module: nn.Module, loss: Callable[[], Tensor], samples: int
) -> Architecture:
    """Returns the architecture with what is frozen apart, and the operations of gradients."""
    frozen = frozen_keys(module)
    with gradient_counter() as counter:
        loss()
    flops = _by_unit(module, counter, {layer.name: layer.is_block for layer in architecture.layers})
    flops.setdefault("rest", flops.pop("", 0))  # a module may have that name
    layers = tuple(
        partly_frozen(layer, frozen, flops.get(layer.name, 0) / samples)
        for layer in architecture.layers
    )
    ties_head = architecture.ties_head and bool(layers[0].tensors)
    return replace(architecture, layers=layers, ties_head=ties_head)


def _in_forward_order(
    parameters: dict[str, str],
    ready: list[str],
    units: dict[str, bool],
    frozen: Collection[str],
) -> list[tuple[str, list[str]]]:
    """Returns units in the order of the forward pass, their parameters in that of gradients.

    ``parameters`` has the unit of each, ``ready`` the order of gradients. A block is whole, where
    its last gradient is; any other unit is in parts where gradients of others are ready between its
    own. What a pass does not use is ready before it, as under DDP's ``find_unused_parameters``;
    what is frozen then, as where it runs without gradients, comes first in the forward pass.
    """
    unused = [key for key in parameters if key not in ready and key not in frozen]
    first = [key for key in parameters if key not in ready and key in frozen]
    parts: list[tuple[str, list[str]]] = [(path, []) for path in units]
    for path, keys in groupby([*unused, *ready, *first[::-1]], key=parameters.__getitem__):
        before = [key for name, part in parts if name == path and units[path] for key in part]
        parts = [part for part in parts if part[0] != path or (part[1] and not units[path])]
        parts.append((path, [*before, *keys]))
    return parts[::-1]


def block_paths(module: nn.Module) -> list[str]:
    """Returns the paths of a module's blocks, in the order in which they are registered."""
    return [path for path, is_block in _units(module).items() if is_block]


def _units(module: nn.Module) -> dict[str, bool]:
    """Returns the paths of blocks (True) and of other modules that own parameters (False).

    Blocks are items of a list of modules of which two neighbours or more are equal.
    """
    units: dict[str, bool] = {}
    for path, child in module.named_modules():
        if any(path.startswith(f"{block}.") for block, is_block in units.items() if is_block):
            continue
        if isinstance(child, nn.ModuleList | nn.Sequential):
            signatures = [_signature(item) for item in child]
            if any(item and item == after for item, after in pairwise(signatures)):
                paths = (f"{path}.{i}".removeprefix(".") for i in range(len(signatures)))
                units |= {p: True for p, item in zip(paths, signatures, strict=True) if item}
                continue
        if path not in units and any(p.requires_grad for p in child.parameters(recurse=False)):
            units[path] = False
    return units


def _signature(module: nn.Module) -> tuple:
    """Returns what equal blocks have in common: their class, and their parameters' shapes."""
    shapes = tuple((name, tuple(weight.shape)) for name, weight in module.named_parameters())
    return (type(module), shapes) if shapes else ()


def _by_unit(
    module: nn.Module,
    counter: FlopCounterMode,
    units: dict[str, bool],
    *,
    of_attention: bool = False,
) -> dict[str, float]:
    """Returns the operations of each unit's forward pass, and of what is in none, by path.

    Attention's are those of products of two batches, fused or not: no weight is a batch.
    """
    root = type(module).__name__
    counted = {
        path: sum(
            count
            for operator, count in counts.items()
            if not of_attention or re.search(BATCHED, str(operator))
        )
        for path, counts in counter.get_flop_counts().items()
    }
    paths = [path for path, _ in module.named_modules()]
    inclusive = {path: counted.get(f"{root}.{path}" if path else root, 0) for path in paths}
    flops: dict[str, float] = {}
    for path in paths:
        children = (child for child in paths if child and child.rpartition(".")[0] == path)
        unit = unit_of(path, units)
        exclusive = inclusive[path] - sum(inclusive[child] for child in children)
        flops[unit if unit in units else ""] = flops.get(unit, 0) + exclusive
    outside = counted.get("Global", 0) - inclusive[""]
    flops[""] = flops.get("", 0) + outside
    return flops


def _joined(layers: Sequence[Layer]) -> Iterator[Layer]:
    """Yields layers with equal neighbours counted as one, under the name of the first."""
    for _, equal in groupby(
        layers,
        key=lambda layer: replace(
            layer, name="", activations=NO_ACTIVATIONS, backward_ratio=layer.has_backward
        ),
    ):
        group = list(equal)
        ratio = sum(layer.backward_ratio for layer in group) / len(group)
        activations = _joined_activations(group)
        yield replace(group[0], count=len(group), activations=activations, backward_ratio=ratio)


def _joined_activations(layers: Sequence[Layer]) -> Activations:
    """Returns the activations of one of several equal layers: the mean kept, the most beside it."""
    every = [layer.activations for layer in layers]

    def mean(pieces: list[tuple[Piece, ...]]) -> tuple[Piece, ...]:
        columns = zip(*(piece.sizes for layer in pieces for piece in layer), strict=True)
        sizes = tuple(sum(column) / len(layers) for column in columns)
        return (replace(pieces[0][0], sizes=sizes),) if sizes else ()

    def most(pieces: list[Piece]) -> Piece:
        return replace(
            pieces[0], sizes=tuple(map(max, zip(*(piece.sizes for piece in pieces), strict=True)))
        )

    if not every[0].kept:
        return every[0]
    return Activations(
        kept=mean([held.kept for held in every]),
        entering=mean([held.entering for held in every]),
        selected=mean([held.selected for held in every]),
        borrowed=mean([held.borrowed for held in every]),
        forward=(most([held.forward[0] for held in every]),),
        backward=((most([held.backward[0][0] for held in every]),),),
        moved=mean([held.moved for held in every]),
        fixed=every[-1].fixed,  # whose moments are the peaks of all
    )
