"""When each gradient of a model is final in a backward pass: the compute side of DDP's overlap."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

READY_COLUMNS = (
    *("rank", "iteration", "parameter", "registration_index", "ready_index"),
    *("dtype", "size_bytes", "ready_time_ms"),
)
"""``gradient-ready-times.csv``: one row per rank, pass and parameter; ms from the pass's start."""


@contextmanager
def ready_marks(model: nn.Module, clock) -> Iterator[dict]:
    """Mark when each parameter's gradient is final.

    Yields a dict from parameter name to the mark of the latest backward pass, in the order in
    which they came. The hooks are removed at the end.
    """
    marks: dict = {}
    handles = [
        parameter.register_post_accumulate_grad_hook(
            lambda _, name=name: marks.__setitem__(name, clock.mark())
        )
        for name, parameter in model.named_parameters()
    ]
    try:
        yield marks
    finally:
        for handle in handles:
            handle.remove()


def ready_rows(model: nn.Module, ready_s: dict[str, float], iteration: int) -> list[dict]:
    """Rows of READY_COLUMNS, but for the rank, from the seconds at which gradients were ready."""
    came = [name for name in ready_s if name != "hidden"]
    return [
        {
            "iteration": iteration,
            "parameter": name,
            "registration_index": index,
            "ready_index": came.index(name),
            "dtype": str(parameter.dtype).removeprefix("torch."),
            "size_bytes": parameter.numel() * parameter.element_size(),
            "ready_time_ms": ready_s[name] * 1e3,
        }
        for index, (name, parameter) in enumerate(model.named_parameters())
    ]
