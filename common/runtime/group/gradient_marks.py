"""Gradient-ready times: the moments of a backward pass at which each gradient is final."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from common.runtime.timing import MARK_S

READY_COLUMNS = (
    "rank",
    "iteration",
    "parameter",
    "registration_index",
    "ready_index",
    "dtype",
    "size_bytes",
    "ready_time_ms",
)
"""Columns of ``gradient-ready-times.csv``: one row per rank, pass and parameter; milliseconds count
from the start of the pass."""


@contextmanager
def ready_marks(model: nn.Module, clock) -> Iterator[dict]:
    """Marks the moment at which each parameter's gradient is final, inside the block.

    Yields a dict from parameter name to the mark of the latest backward pass, in the order of
    readiness. A pass's marks are valid until the next pass. The hooks are removed at the end.
    """
    marks: dict = {}
    made: dict = {}

    def note(name: str) -> None:
        marks[name] = made[name] = clock.mark(made.get(name))

    handles = [
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: note(name))
        for name, parameter in model.named_parameters()
    ]
    try:
        yield marks
    finally:
        for handle in handles:
            handle.remove()


def hold_for_marks(model: nn.Module, clock) -> None:
    """Holds the device back for the time that marking costs the host.

    Called right before a pass begins. Otherwise a pass that is bound by the host's launches would
    take longer than DDP's own, which has no marks: by about 3.5 ms for the 436 parameters of
    gpt2-large.
    """
    clock.hold(MARK_S * sum(1 for _ in model.parameters()))


def ready_seconds(marks: dict, start: Any, clock: Any) -> dict[str, float]:
    """Returns the seconds from ``start`` to each gradient's mark; wait for the device first."""
    return {name: clock.elapsed_s(start, mark) for name, mark in marks.items()}


def ready_rows(model: nn.Module, ready_s: dict[str, float], iteration: int) -> list[dict]:
    """Returns rows of READY_COLUMNS, but for the rank, from the seconds of ``ready_seconds``."""
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
