"""The moments of a training step that can be its peak, and what is in memory at each, in bytes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

STATE = ("parameters", "gradients", "optimizer states")
COMPONENTS = (
    *STATE,
    "residual stream",
    "norm outputs",
    "attention",
    "attention scores",
    "feed-forward",
    "dropout",
    "selected",
    "activations",
    "logits and loss",
    "autocast copies",
    "temporary buffers",
    "communication",
    "batch",
)
"""The uses of a moment's bytes, in the order of a table."""


@dataclass(frozen=True)
class Moment:
    """The contents of memory at one point of the step: component → bytes."""

    name: str
    components: Mapping[str, int]

    @property
    def total_bytes(self) -> int:
        return sum(self.components.values())

    @property
    def state_bytes(self) -> int:
        """Returns the bytes of parameters, gradients and optimizer states."""
        return sum(self.components.get(name, 0) for name in STATE)


@dataclass(frozen=True)
class MemoryPrediction:
    """The moments of a step; ``peak`` is the one that decides whether it fits."""

    moments: tuple[Moment, ...]

    @property
    def peak(self) -> Moment:
        return max(self.moments, key=lambda moment: moment.total_bytes)

    @property
    def peak_bytes(self) -> int:
        return self.peak.total_bytes

    def at(self, name: str) -> Moment:
        """Returns the moment of that name."""
        return next(moment for moment in self.moments if moment.name == name)


def largest_that_fits(peak_bytes: Callable[[int], float], capacity_bytes: float) -> int:
    """Returns the largest batch whose peak, which grows with it, fits; 0 if not even 1 does."""
    if peak_bytes(1) > capacity_bytes:
        return 0
    below, above = 1, 2
    while peak_bytes(above) <= capacity_bytes:
        below, above = above, 2 * above
    while above - below > 1:
        middle = (below + above) // 2
        fits = peak_bytes(middle) <= capacity_bytes
        below, above = (middle, above) if fits else (below, middle)
    return below
