"""Training steps one after another, each with its time."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Protocol

import torch

from common.runtime.timing import clock_for
from common.training.step import TokenBatch


class Step(Protocol):
    """A step that can be run again and again, like ``TrainingStep``."""

    device: torch.device

    def run(self, batches: Iterable[TokenBatch]) -> object:
        """Makes one step."""


def time_steps(
    step: Step,
    batches: Iterable[TokenBatch],
    count: int,
    after_step: Callable[[], None] = lambda: None,
) -> list[float]:
    """Returns the seconds of each of ``count`` steps, one right after another.

    On a GPU the marks are events, read at the end: the host runs ahead, as it does in training.
    """
    clock = clock_for(step.device)
    clock.wait()
    marks = [clock.mark()]
    for _ in range(count):
        step.run(batches)
        marks.append(clock.mark())
        after_step()
    clock.wait()
    return [clock.elapsed_s(start, end) for start, end in pairwise(marks)]
