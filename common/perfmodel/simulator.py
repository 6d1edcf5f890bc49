"""The backward pass of DDP, bucket by bucket.

A bucket is ready when its last gradient is. Buckets are reduced one after another in index order,
so bucket i starts at ``max(end of bucket i−1, ready i)`` and takes a(S_i). An all-reduce that runs
beside computation takes longer and costs computation time (``DdpCosts``). After the backward pass
each bucket is waited for and copied back in turn, so only the last copy is sure to be exposed.
Source of the order: ``Reducer::mark_bucket_ready`` and ``finalize_backward`` in PyTorch's
torch/csrc/distributed/c10d/reducer.cpp.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from common.errors import UserError
from common.perfmodel.buckets import DdpOptions, assign_buckets, ddp_buckets
from common.perfmodel.collectives import AllReduceModel
from common.perfmodel.profile import NO_COSTS, BackwardProfile, DdpCosts


@dataclass(frozen=True)
class BucketEvent:
    """One bucket's way through the backward pass; seconds from its start.

    ``ready_s``: its last gradient is copied in; ``start_s`` and ``end_s``: its all-reduce;
    ``copied_s``: its gradients are back.
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
        """What remains after computation has ended: all-reduces not hidden, and the last copy."""
        return self.total_s - self.compute_end_s

    @property
    def communication_s(self) -> float:
        """Time during which an all-reduce was active."""
        return sum(event.end_s - event.start_s for event in self.events)

    @property
    def num_buckets(self) -> int:
        """How many all-reduces the backward pass made."""
        return len(self.events)


def simulate_backward(
    profile: BackwardProfile,
    network: AllReduceModel,
    bucket_cap_mb: float | None,
    *,
    costs: DdpCosts = NO_COSTS,
    static_graph: bool = False,
    find_unused_parameters: bool = False,
) -> BackwardTimeline:
    """Simulate one backward pass of DDP in its steady state.

    Args:
        profile: gradient sizes and ready times of the slowest rank.
        network: the all-reduce model.
        bucket_cap_mb: as for DDP, in MiB; None is DDP's default.
        costs: bookkeeping and contention.
        static_graph, find_unused_parameters: as for DDP.
    """
    options = DdpOptions(bucket_cap_mb, static_graph, find_unused_parameters)
    return simulate_buckets(profile, network, profile_buckets(profile, options), costs)


def profile_buckets(profile: BackwardProfile, options: DdpOptions) -> list[list[int]]:
    """The steady-state buckets as indices into the profile, in reduction order."""
    cap, first_cap = options.caps_bytes()
    kinds = profile.kinds if len(set(profile.kinds)) > 1 else None
    if options.rebuild_iteration() is not None:
        return assign_buckets(profile.sizes_bytes.tolist(), cap, first_cap, kinds)
    if len(profile.registration) != len(profile.names):
        raise UserError("buckets in registration order need the profile's registration indices")
    ready_order = list(profile.registration)  # position in the profile -> registration index
    position = {registered: index for index, registered in enumerate(ready_order)}
    sizes = [int(profile.sizes_bytes[position[i]]) for i in range(len(ready_order))]
    by_registration = [kinds[position[i]] for i in range(len(sizes))] if kinds else None
    buckets = ddp_buckets(sizes, ready_order, options, kinds=by_registration)
    return [[position[i] for i in bucket] for bucket in buckets]


def simulate_buckets(
    profile: BackwardProfile,
    network: AllReduceModel,
    buckets: Sequence[Sequence[int]],
    costs: DdpCosts = NO_COSTS,
) -> BackwardTimeline:
    """Simulate one backward pass for given buckets (indices into the profile)."""
    members = np.concatenate([np.asarray(bucket) for bucket in buckets])
    starts = np.cumsum([0, *(len(bucket) for bucket in buckets[:-1])])
    sizes = np.add.reduceat(profile.sizes_bytes[members], starts)
    copied_in = profile.ready_s + costs.copy_in_s_per_byte * np.cumsum(profile.sizes_bytes)
    ready_work = np.maximum.reduceat(copied_in[members], starts).tolist()
    total_work = profile.backward_s + costs.copy_in_s_per_byte * profile.total_bytes
    alone_s = np.atleast_1d(network.time_s(sizes.astype(float)))
    beside_s, progress_s = costs.beside_computation(sizes, alone_s)

    spans = _advance(
        ready_work, alone_s.tolist(), beside_s.tolist(), progress_s.tolist(), total_work
    )
    copied = spans.compute_end_s
    events = []
    for index, (size, ready, start, end) in enumerate(
        zip(sizes.tolist(), spans.ready_s, spans.start_s, spans.end_s, strict=True)
    ):
        copied = max(copied, end) + costs.copy_out_s_per_byte * size
        bucket = tuple(buckets[index])
        events.append(BucketEvent(index, bucket, size, ready, start, end, copied))
    return BackwardTimeline(copied, spans.compute_end_s, total_work, tuple(events))


@dataclass
class _Spans:
    """When each bucket was ready, started and ended, and when computation ended (seconds)."""

    ready_s: list[float]
    start_s: list[float]
    end_s: list[float]
    compute_end_s: float


def _advance(
    ready_work: list[float],
    alone_s: list[float],
    beside_s: list[float],
    progress_s: list[float],
    total_work: float,
) -> _Spans:
    """Move computation and the queue of all-reduces forward together.

    ``work`` is the computation done so far, in seconds of it running alone. Between all-reduces
    computation runs at full speed. Beside one, ``progress_s`` of it is done in ``beside_s``; if
    computation ends first, the rest of the all-reduce runs alone.
    """
    start_s, end_s = [], []
    now = work = 0.0
    path_work, path_s = [0.0], [0.0]  # where computation stood, and when: piecewise linear
    for needed, alone, beside, progress in zip(
        ready_work, alone_s, beside_s, progress_s, strict=True
    ):
        if needed > work:  # nothing to send yet
            now, work = now + needed - work, needed
            path_work.append(work)
            path_s.append(now)
        start_s.append(now)
        left = total_work - work
        if left > 0:
            share = 1.0 if progress <= left else left / progress  # of the all-reduce, beside
            now += share * beside
            work = work + progress if progress <= left else total_work
            path_work.append(work)
            path_s.append(now)
            now += (1 - share) * alone
        else:
            now += alone
        end_s.append(now)
    compute_end = path_s[-1] if work >= total_work else path_s[-1] + total_work - work
    path_work.append(total_work)
    path_s.append(compute_end)
    # A plateau of the path (computation at rest) has two times; the earlier one is meant.
    ready_s = np.minimum(np.interp(ready_work, path_work, path_s), start_s).tolist()
    return _Spans(ready_s, start_s, end_s, compute_end)
