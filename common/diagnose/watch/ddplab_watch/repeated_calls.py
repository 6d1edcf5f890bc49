"""Layers that a pass calls again with the same input, as where a network is run twice.

Such a call returns what the earlier one returned. Passes that compute it once are timed beside
passes as they are, so what the others cost is measured.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn

from ddplab_watch.torch_internals import is_in_backward


class RepeatedCalls:
    """Finds the calls of a model's layers that have the input of an earlier one in a pass.

    Layers are modules with parameters and without modules inside. A pass with checkpointing, which
    calls layers again in the backward pass, counts as one without repeated calls: it is to find the
    same tensors there.
    """

    def __init__(self, model: nn.Module) -> None:
        parts = [part for part in model.modules() if next(part.children(), None) is None]
        self.layers = [part for part in parts if next(part.parameters(), None) is not None]
        self.inputs: dict[nn.Module, list[tuple]] = {}
        """Input of each call of a layer in the pass that was looked at."""
        self.earlier: dict[nn.Module, dict[int, int]] = {}
        """Number of a layer's call → number of the first one with the same input."""
        self.recomputes = False

    @contextmanager
    def looked_for(self) -> Iterator[None]:
        """Notes the calls of the pass inside of the block, and finds those that repeat others."""
        self.inputs = {layer: [] for layer in self.layers}
        handles = [
            layer.register_forward_pre_hook(self._note, with_kwargs=True) for layer in self.layers
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
        if self.recomputes:
            return
        for layer, inputs in self.inputs.items():
            first = {number: inputs.index(values) for number, values in enumerate(inputs)}
            self.earlier[layer] = {n: index for n, index in first.items() if index < n}

    @property
    def calls(self) -> int:
        """Returns how many calls the pass had."""
        return sum(map(len, self.inputs.values()))

    @property
    def repeated(self) -> int:
        """Returns how many of them had the input of an earlier one."""
        return sum(map(len, self.earlier.values()))

    def _note(self, layer: nn.Module, args: tuple, kwargs: dict) -> None:
        if is_in_backward():
            self.recomputes = True
        self.inputs[layer].append((*map(_print, args), *map(_print, kwargs.values())))

    @contextmanager
    def once(self) -> Iterator[None]:
        """Lets each call in the block that repeats another return what that one has returned."""
        changed = [layer for layer, earlier in self.earlier.items() if earlier]
        forwards = {layer: vars(layer).get("forward") for layer in changed}
        for layer in changed:
            layer.forward = partial(_recall, layer.forward, self.earlier[layer], [])
        try:
            yield
        finally:
            for layer, forward in forwards.items():
                del layer.forward
                if forward is not None:
                    layer.forward = forward


def _recall(forward: Any, earlier: dict[int, int], outputs: list, *args: Any, **kwargs: Any) -> Any:
    """Calls a layer, or returns the output of an earlier call; ``outputs`` has those so far."""
    number = len(outputs)
    if number in earlier:
        outputs.append(outputs[earlier[number]])
        return outputs[-1]
    output = forward(*args, **kwargs)
    outputs.append(output if number in earlier.values() else None)
    return output


def _print(value: Any) -> Any:
    """Returns what tells an argument from others: of a tensor its shape, type and two sums."""
    if not isinstance(value, Tensor):
        return value if isinstance(value, int | float | str | None) else id(value)
    numbers = value.detach().double()
    return (*value.shape, value.dtype, numbers.sum().item(), numbers.square().sum().item())
