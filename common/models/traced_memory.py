"""Activations of a module that is followed: what autograd saves, and what is alive beside it.

Each storage counts once, where it is first kept, views with it; parameters do not count, nor do
their low-precision copies. The step is followed in float32 and under autocast; where that does
not run, sizes of float32 are taken for both. For a GPU dropout keeps a byte an element, and
attention is a fused kernel.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from common.perfmodel.architectures.activations import CASTS, CUDA, Activations, Numerics, Piece
from common.perfmodel.architectures.architecture import Architecture, Layer
from common.perfmodel.one_device.moments import STATE
from common.perfmodel.one_device.training_memory import Passes, predict_training_memory

PART, COPIES = "activations", "autocast copies"
NOTHING = (0.0, 0.0)
PRODUCTS = (
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.convolution.default,
)


@dataclass
class _Bytes:
    """Bytes of floating-point tensors and of the others."""

    floats: float = 0
    integers: float = 0

    def add(self, tensor: Tensor) -> None:
        """Adds a tensor's storage."""
        size = tensor.untyped_storage().nbytes()
        if tensor.is_floating_point():
            self.floats += size
        else:
            self.integers += size


@dataclass
class _Unit:
    """Memory of a unit in one step; peaks are of all that is alive, but for parameters."""

    kept: _Bytes = field(default_factory=_Bytes)
    entering: _Bytes = field(default_factory=_Bytes)
    selected: _Bytes = field(default_factory=_Bytes)
    borrowed: _Bytes = field(default_factory=_Bytes)
    forward_peak: tuple[float, float] = NOTHING
    backward_peak: tuple[float, float] = NOTHING
    """Bytes, and how many of them are copies of parameters."""
    entered: set[int] = field(default_factory=set)
    has_frozen: bool = False
    is_block: bool = False


def with_activations(
    architecture: Architecture,
    module: nn.Module,
    loss: Callable[[], Tensor],
    batch: object,
    samples: int,
    device: str = CUDA,
) -> Architecture:
    """Returns an architecture whose layers have what was seen of them.

    Args:
        architecture: single layers whose names are paths of modules.
        loss: runs the forward pass of ``module``, on fake tensors.
        device: cuda or cpu, whose kernels of dropout and attention are followed.
    """
    watched = {"float32": _step(module, loss, architecture.layers, device)}
    for casts in CASTS[1:]:
        try:
            watched[casts] = _step(module, loss, architecture.layers, device, casts)
        except RuntimeError:  # some operators do not run in 16 bits
            as_it_is = watched["float32"]
            watched[casts] = _halved(as_it_is) if casts == "half" else as_it_is
    batch_bytes = sum(leaf.nbytes for leaf in tree_leaves(batch) if isinstance(leaf, Tensor))
    sized = replace(
        architecture,
        sample_bytes=batch_bytes / samples,
        layers=tuple(_with_kept(layer, watched, samples) for layer in architecture.layers),
    )
    extras = {casts: _extras(sized, watched[casts], casts, samples) for casts in CASTS}
    layers = []
    for index, layer in enumerate(sized.layers):
        parts = ("temporary buffers", "temporary buffers", COPIES, COPIES)
        forward, backward, *fixed = (
            Piece(part, tuple(extras[casts][index][number] for casts in CASTS))
            for number, part in enumerate(parts)
        )
        beside = {"forward": (forward,), "backward": ((backward,),), "fixed": tuple(fixed)}
        activations = replace(layer.activations, **beside)
        layers.append(replace(layer, activations=activations))
    return replace(sized, layers=tuple(layers))


def unit_of(key: str, units: Collection[str]) -> str:
    """Returns the innermost unit that a parameter or module belongs to."""
    path = key
    while path not in units and path:
        path = path.rpartition(".")[0]
    return path


def _halved(units: Mapping[str, _Unit]) -> dict[str, _Unit]:
    """Returns what would be seen in 16 bits throughout: floating-point numbers take half."""

    def half(size: _Bytes) -> _Bytes:
        return _Bytes(size.floats / 2, size.integers)

    return {
        path: _Unit(
            kept=half(unit.kept),
            entering=half(unit.entering),
            selected=half(unit.selected),
            borrowed=half(unit.borrowed),
            forward_peak=(unit.forward_peak[0] / 2, 0.0),
            backward_peak=(unit.backward_peak[0] / 2, 0.0),
        )
        for path, unit in units.items()
    }


def _with_kept(layer: Layer, watched: Mapping[str, Mapping[str, _Unit]], samples: int) -> Layer:
    units = [watched[casts].get(layer.name, _Unit()) for casts in CASTS]

    def pieces(name: str) -> tuple[Piece, ...]:
        sizes = [getattr(unit, name) for unit in units]
        return (Piece(PART, tuple((size.floats + size.integers) / samples for size in sizes)),)

    names = ("kept", "entering", "selected", "borrowed")
    activations = Activations(*map(pieces, names))
    return replace(layer, activations=activations)


def _extras(
    architecture: Architecture, watched: Mapping[str, _Unit], casts: str, samples: int
) -> list[list[float]]:
    """Returns what was alive in each layer's passes beyond what its moments add up to.

    Two are bytes of a sample, in the forward and in the backward pass. Two are bytes of autocast's
    copies in these passes, whatever the samples.
    """
    moments = predict_training_memory(Passes(architecture, samples, Numerics(casts))).moments
    before = {"batch", *STATE} - {"gradients"}
    # A weight in 16 bits has such a gradient; FSDP makes float32 of it only to reduce it.
    share = {"gradients": 0.5} if casts == "half" else {}
    is_copied = casts == "autocast"
    sizes = [
        sum(
            share.get(part, 1) * size
            for part, size in moment.components.items()
            if part not in {*before, COPIES}
        )
        for moment in moments
    ]
    count = len(architecture.layers)
    extras = []
    for index, layer in enumerate(architecture.layers):
        unit = watched.get(layer.name, _Unit())
        growing, fixed = [], []
        for (peak, copies), at in (
            (unit.forward_peak, index),
            (unit.backward_peak, 2 * count - 1 - index),
        ):
            copies = copies if is_copied else 0.0
            expected = moments[at].components.get(COPIES, 0.0)
            growing.append((peak - copies - sizes[at]) / samples if peak else 0.0)
            fixed.append(copies - expected if peak else 0.0)
        extras.append(growing + fixed)
    return extras


def _step(
    module: nn.Module,
    loss: Callable[[], Tensor],
    layers: Sequence[Layer],
    device: str,
    casts: str = "float32",
) -> dict[str, _Unit]:
    """Follows one step, and returns what was seen of each layer's module, by its path."""
    for parameter in module.parameters():
        parameter.grad = None
    units = {layer.name: _Unit(is_block=layer.is_block) for layer in layers}
    kernels = _Kernels() if device == CUDA else nullcontext()
    with _in_half(module, units) if casts == "half" else nullcontext():
        watch = _Watch(module, units)
        with watch.hooks(module), watch, kernels:
            saved = torch.autograd.graph.saved_tensors_hooks(watch.keep, lambda tensor: tensor)
            with torch.autocast("cpu", torch.bfloat16, enabled=casts == "autocast"), saved:
                value = loss()
            watch.close_forward()
            value.backward()
    *_, before, last = [_Unit(), *units.values()]
    if last.backward_peak == NOTHING:  # a tied head, whose own passes end with another's gradient
        last.backward_peak, before.backward_peak = before.backward_peak, NOTHING
    return units


@contextmanager
def _in_half(module: nn.Module, paths: Collection[str]) -> Iterator[None]:
    """Casts weights, and what enters the module or a block, to 16 bits, as FSDP does."""

    def cast(_module: nn.Module, args: tuple, kwargs: dict) -> tuple:
        return tree_map_only(
            Tensor, lambda t: t.bfloat16() if t.is_floating_point() else t, (args, kwargs)
        )

    weights = [(parameter, parameter.data) for parameter in module.parameters()]
    modules = dict(module.named_modules(remove_duplicate=False))
    with ExitStack() as hooks:
        for part in (module, *(modules[path] for path in paths if path in modules)):
            hooks.enter_context(part.register_forward_pre_hook(cast, with_kwargs=True))
        try:
            for parameter, weight in weights:
                parameter.grad = None
                parameter.data = weight.bfloat16()
            yield
        finally:
            for parameter, weight in weights:
                parameter.grad = None
                parameter.data = weight


class _Kernels(TorchFunctionMode):
    """Takes dropout and attention as a GPU's kernels do them."""

    def __torch_function__(self, func, types, args=(), kwargs=None) -> object:
        """Replaces a call of a dropout or of attention."""
        kwargs = kwargs or {}
        if func is functional.scaled_dot_product_attention:
            names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
            values = dict(zip(names, args, strict=False)) | kwargs
            return func(**values | {"dropout_p": 0.0})  # a CPU would write the scores out
        if func is functional.dropout:
            values = dict(zip(("input", "p", "training", "inplace"), args, strict=False)) | kwargs
            rate = values.get("p", 0.5)
            if values.get("training", True) and rate > 0:
                return torch.native_dropout(values["input"], rate, True)[0]
        return func(*args, **kwargs)


class _Watch(TorchDispatchMode):
    """Counts what is alive, and what each unit keeps."""

    def __init__(self, module: nn.Module, units: dict[str, _Unit]) -> None:
        super().__init__()
        self.units = units
        self.parameters = {p.untyped_storage()._cdata for p in module.parameters()}
        self.counted = {b.untyped_storage()._cdata for b in module.buffers()} | self.parameters
        self.kept: dict[int, _Unit] = {}
        """Unit that first keeps a storage, by the storage's number."""
        self.live = self.copies = 0.0
        self.peak = NOTHING
        self.products = 0
        self.unit = next(iter(units.values()))

    def __torch_dispatch__(self, func, types, args=(), kwargs=None) -> object:
        """Runs an operator, and counts storages that it made."""
        out = func(*args, **(kwargs or {}))
        inputs = {
            leaf.untyped_storage()._cdata
            for leaf in tree_leaves((args, kwargs))
            if isinstance(leaf, Tensor)
        }
        copies = func is torch.ops.aten._to_copy.default and inputs <= self.parameters
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self._count(leaf, inputs, copies)
        if func in PRODUCTS and not torch._C._current_autograd_node():
            self.products += 1
            if self.products % 2 and isinstance(out, Tensor):
                self.unit.selected.add(out)
        return out

    def _count(self, tensor: Tensor, inputs: set[int], is_copy: bool) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self.counted or key in inputs:
            return
        self.counted.add(key)
        size = storage.nbytes()
        if is_copy:
            self.parameters.add(key)
            self.copies += size
        self.live += size
        self.peak = max(self.peak, (self.live, self.copies))
        weakref.finalize(storage, self._free, key, size)

    def _free(self, key: int, size: int) -> None:
        self.live -= size
        self.copies -= size if key in self.parameters else 0.0
        self.kept.pop(key, None)
        for keys in (self.counted, self.parameters):
            keys.discard(key)

    def keep(self, tensor: Tensor) -> Tensor:
        """Counts a tensor that autograd saves."""
        key = tensor.untyped_storage()._cdata
        if key in self.counted - self.parameters and key not in self.kept:
            self.kept[key] = self.unit
            self.unit.kept.add(tensor)
        return tensor

    @contextmanager
    def hooks(self, module: nn.Module) -> Iterator[None]:
        """Notes which unit runs, forward and backward."""
        modules = dict(module.named_modules(remove_duplicate=False))
        with ExitStack() as hooks:
            for path, unit in self.units.items():
                if path in modules:  # else it is a parameter's own unit
                    enter = modules[path].register_forward_pre_hook
                    hooks.enter_context(enter(self._entered(unit), with_kwargs=True))
            for key, parameter in module.named_parameters():
                unit = self.units.get(unit_of(key, self.units))
                if unit is None:
                    continue
                unit.has_frozen |= not parameter.requires_grad
                if parameter.requires_grad:
                    ready = self._ready(unit)
                    hooks.enter_context(parameter.register_post_accumulate_grad_hook(ready))
            yield

    def _entered(self, unit: _Unit) -> Callable:
        def enter(_module: nn.Module, args: tuple, kwargs: dict) -> None:
            self.close_forward()
            self.unit, self.products = unit, 0
            for leaf in tree_leaves((args, kwargs)):
                if isinstance(leaf, Tensor) and leaf.is_floating_point():
                    unit.entering.add(leaf)
                    key = leaf.untyped_storage()._cdata
                    unit.entered.add(key)
                    keeper = self.kept.get(key)
                    if keeper and keeper.is_block and key not in keeper.entered:
                        unit.borrowed.add(leaf)
                    if leaf.requires_grad and unit.has_frozen:
                        leaf.register_hook(self._ready(unit))

        return enter

    def _ready(self, unit: _Unit) -> Callable:
        def ready(_parameter: Tensor) -> None:
            unit.backward_peak = max(unit.backward_peak, self.peak)
            self.peak = (self.live, self.copies)

        return ready

    def close_forward(self) -> None:
        """Ends the forward pass of the unit that runs."""
        self.unit.forward_peak = max(self.unit.forward_peak, self.peak)
        self.peak = (self.live, self.copies)
