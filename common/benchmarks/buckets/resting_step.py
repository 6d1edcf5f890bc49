"""A training step whose states rest on the host, so that a GPU holds those of one step only.

Parameters and optimizer states keep their identity, as ``nn.Module.to`` keeps it: only their data
are replaced, so that compiled code, which looks at a parameter's shape, type and device, and the
optimizer's own tables go on as before. Nothing here is timed; a warm-up follows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from common.training.step import TrainingStep


def rest(step: TrainingStep, device: torch.device) -> Callable[[], None]:
    """Moves the states that are on the step's device to ``device``.

    To be called between steps, when there are no gradients. Returns the function that brings
    them back. What was elsewhere (AdamW's step counters, on the host unless it is fused) stays.
    """
    moved = [tensor for tensor in states_of(step) if tensor.device == step.device]
    _move(moved, device)
    return lambda: _move(moved, step.device)


def states_of(step: TrainingStep) -> Iterator[Tensor]:
    """Yields parameters, buffers and optimizer states, each once; gradients left out."""
    yield from step.model.parameters()
    yield from step.model.buffers()
    for state in step.optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, Tensor))


def _move(tensors: list[Tensor], device: torch.device) -> None:
    for tensor in tensors:
        tensor.data = tensor.data.to(device, copy=True)
