"""A simulated backward pass of DDP: its buckets in the order in which they are reduced."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class BucketEvent:
    """One bucket's way through the backward pass; seconds from its start.

    ``size_bytes``: its gradients, whatever a hook makes of them on the wire; ``ready_s``: the last
    one is copied in; ``start_s`` and ``end_s``: its all-reduce; ``copied_s``: they are back.
    """

    index: int
    members: tuple[int, ...]
    size_bytes: int
    ready_s: float
    start_s: float
    end_s: float
    copied_s: float


@dataclass(frozen=True)
class BackwardTimeline:
    """A simulated backward pass.

    Attributes:
        total_s: from its start until every gradient is reduced and copied back.
        compute_end_s: when computation ends, slowed by what ran beside it.
        compute_alone_s: the computation's length with nothing beside it.
        events: the buckets in reduction order.
    """

    total_s: float
    compute_end_s: float
    compute_alone_s: float
    events: tuple[BucketEvent, ...]

    @property
    def exposed_communication_s(self) -> float:
        """Returns the seconds after computation ends: exposed all-reduces, and the last copy."""
        return self.total_s - self.compute_end_s

    @property
    def communication_s(self) -> float:
        """Returns the seconds during which an all-reduce was active."""
        active = last_end = 0.0
        for event in self.events:
            active += max(0.0, event.end_s - max(event.start_s, last_end))
            last_end = max(last_end, event.end_s)
        return active

    @property
    def num_buckets(self) -> int:
        """Returns the number of buckets, each of which is reduced once."""
        return len(self.events)
