"""A pass of the window, kept so that it can be run again, and nothing of it left behind.

A pass is run again from the arguments that the script called its model with, and starts backward
from the model's outputs with the gradients that the script's own loss gave them: so the loss
itself need not be known.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ddplab_watch import torch_internals
from ddplab_watch.batches import resized_batch, tensors_in
from ddplab_watch.files import read_memory_bytes


@dataclass
class Kept:
    """The last pass of the window: how the model was called, and what its outputs' gradients were.

    Attributes:
        module: the outermost module, and ``inner`` the same without DDP around it.
        samples, elements: samples and elements of the batch (``batches.counts``).
        gradients: gradient of an output, by its index among the pass's tensors; of the last
            pass, whose batch may have had another size.
        autocast: whether it was on, and the type that it computed in.
        updated: identities of the parameters that optimizers were seen to update; none where that
            is not known.
    """

    module: nn.Module
    inner: nn.Module
    args: tuple
    kwargs: dict
    samples: int
    elements: int
    gradients: dict[int, Tensor]
    autocast: tuple[bool, torch.dtype]
    updated: Collection[int] = ()

    @property
    def device(self) -> torch.device:
        """Returns where the model is."""
        return next(self.inner.parameters()).device

    @property
    def gradient_bytes(self) -> int:
        """Returns the bytes of all gradients."""
        return sum(p.nbytes for p in self.inner.parameters() if p.requires_grad)

    @property
    def unused(self) -> dict[str, int]:
        """Returns the bytes of the gradients that no optimizer uses, by parameter."""
        named = self.inner.named_parameters() if self.updated else ()
        return {n: p.nbytes for n, p in named if p.requires_grad and id(p) not in self.updated}

    @property
    def is_compiled(self) -> bool:
        """Returns True if torch.compile has a part in the model."""
        return any(map(torch_internals.is_compiled, self.inner.modules()))

    def why_once(self) -> str:
        """Returns why the pass cannot be run again; empty where it can."""
        if self.is_compiled and "torch._inductor.cudagraph_trees" in sys.modules:
            # Its graphs write into the same memory each time, which the script may still read.
            return "CUDA graphs keep what a pass computes"
        return ""

    def sized(self, size: float) -> Kept:
        """Returns the same pass on ``size`` (½, 1 or 2) times as many samples."""

        def part(value: Any) -> Any:
            return resized_batch(value, self.samples, size)

        gradients = {index: part(gradient) for index, gradient in self.gradients.items()}
        return replace(self, args=part(self.args), kwargs=part(self.kwargs), gradients=gradients)

    def forward(self, module: nn.Module) -> tuple[list[Tensor], list[Tensor]]:
        """Runs a module on the batch.

        Returns:
            the outputs that the script's loss used, and the gradient of each.
        """
        enabled, dtype = self.autocast
        with torch.autocast(self.device.type, dtype, enabled=enabled):
            outputs = outputs_of(module(*self.args, **self.kwargs))
        used = [(o, self.gradients[i]) for i, o in enumerate(outputs) if i in self.gradients]
        return [output for output, _ in used], [fitting(gradient, o) for o, gradient in used]


def outputs_of(output: Any) -> list[Tensor]:
    """Returns the outputs that a loss is computed from: the loss where a model returns it."""
    tensors = list(tensors_in(output))
    named = [tensor for name, tensor in tensors if name == "loss" and tensor.requires_grad]
    return named or [tensor for _, tensor in tensors if tensor.requires_grad]


def fitting(gradient: Tensor, output: Tensor) -> Tensor:
    """Returns an output's gradient; one of the same size on the whole if that was of another shape.

    What a pass takes does not depend on the numbers in it.
    """
    if gradient.shape == output.shape:
        return gradient
    return torch.ones_like(output.detach()) * gradient.abs().mean()


def keep_gradients(output: Any, into: dict[int, Tensor]) -> None:
    """Keeps the gradients of a pass's outputs, when they come."""
    for index, tensor in enumerate(outputs_of(output)):
        tensor.register_hook(lambda gradient, index=index: into.__setitem__(index, gradient))


@contextmanager
def left_as_it_was(
    module: nn.Module, device: torch.device, parameters: bool = True
) -> Iterator[None]:
    """Puts back what a module holds, and all random numbers, at the end of the block.

    A forward pass may change more than the gradients show: running means, the averaged weights of a
    second encoder, a counter. Parameters, buffers, and attributes that are tensors, numbers or
    texts are put back, where an attribute was given another tensor, too. Lists are not.

    Args:
        module: without DDP around it.
        device: device of the module, whose random numbers are put back.
        parameters: put back its parameters, too: False for a sharded model, whose passes exchange
            them for others.

    Raises RuntimeError: a copy of it may not fit into the host's memory.
    """
    held = list(_held(module, parameters))
    tensors = {id(value): value for _, _, value in held if isinstance(value, Tensor)}
    needed = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    free, _ = read_memory_bytes()
    if free is not None and needed > free / 2:
        raise RuntimeError(f"a copy of {needed / 2**30:.1f} GiB may not fit into the host's memory")
    # With each tensor the storage that it has now: ``tensor.data = other`` gives it another one.
    before = [
        (tensor, tensor.data, tensor.detach().to("cpu", copy=True)) for tensor in tensors.values()
    ]
    states = (random.getstate(), torch.get_rng_state())
    on_gpu = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    numpy = sys.modules.get("numpy")
    of_numpy = numpy.random.get_state() if numpy is not None else None
    try:
        yield
    finally:
        for table, name, value in held:
            table[name] = value
        with torch.no_grad():
            for tensor, storage, values in before:
                tensor.data = storage
                tensor.data.copy_(values)
        random.setstate(states[0])
        torch.set_rng_state(states[1])
        if on_gpu is not None:
            torch.cuda.set_rng_state(on_gpu, device)
        if numpy is not None:
            numpy.random.set_state(of_numpy)


def _held(module: nn.Module, parameters: bool) -> Iterator[tuple[dict[str, Any], str, Any]]:
    """Yields what a forward pass may change: where it stands, its name there, and its value."""
    for part in module.modules():
        for table in (part._parameters if parameters else {}, part._buffers, vars(part)):
            for name, value in table.items():
                if isinstance(value, Tensor | int | float | str | None):
                    yield table, name, value


def free_bytes(device: torch.device) -> int | None:
    """Returns the bytes that are free where a model is; None where it is not known."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return read_memory_bytes()[0]


def has_room(device: torch.device) -> bool:
    """Returns True if twice the batch, or a second model, surely fits into memory."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        peak = torch.cuda.max_memory_allocated(device)
        return free + torch.cuda.memory_reserved(device) > 2.2 * peak
    free, total = read_memory_bytes()
    return free is not None and total is not None and free > total / 2


@contextmanager
def with_threads(count: int) -> Iterator[None]:
    """Computes with so many threads inside the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
