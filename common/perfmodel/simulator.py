"""The backward pass of DDP, bucket by bucket.

A bucket is ready when its last gradient is, on the last rank. Buckets are reduced one after another
in index order (``recurrence``). With one at a time, as NCCL has it, bucket i starts at ``max(end of
bucket i−1, ready i)`` and takes a(S_i); gloo has two under way. An all-reduce that runs beside
computation takes longer and costs computation time (``DdpCosts``).
After the backward pass each bucket is waited for and copied back in turn, so only the last copy is
sure to be exposed. Source of the order: ``Reducer::mark_bucket_ready`` and ``finalize_backward`` in
PyTorch's torch/csrc/distributed/c10d/reducer.cpp.

What one rank's computation needs, all ranks need: while an all-reduce is under way it slows all of
them alike, so the rank that is last at a gradient is the one that is last there alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from common.errors import UserError
from common.perfmodel.buckets import DdpOptions, assign_buckets, ddp_buckets
from common.perfmodel.collectives import AllReduceModel
from common.perfmodel.ddp.comm_hooks import CommHook
from common.perfmodel.ddp.profile import NO_COSTS, BackwardProfile, DdpCosts
from common.perfmodel.ddp.recurrence import TINY_S, Traffic, advance, without_contention


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


def simulate_backward(
    profile: BackwardProfile,
    network: AllReduceModel,
    bucket_cap_mb: float | None,
    *,
    costs: DdpCosts = NO_COSTS,
    static_graph: bool = False,
    find_unused_parameters: bool = False,
    bucket_cap_mb_list: Sequence[float] = (),
    gradient_as_bucket_view: bool = False,
    hook: CommHook | None = None,
    in_flight: int = 1,
    crowded_network: AllReduceModel | None = None,
    added_latency_s: float = 0.0,
) -> BackwardTimeline:
    """Simulates one backward pass of DDP in its steady state.

    Args:
        profile: gradient sizes and ready times of the slowest rank.
        network: the all-reduce model.
        bucket_cap_mb: as for DDP, in MiB; None is DDP's default.
        costs: bookkeeping and contention.
        static_graph, find_unused_parameters, bucket_cap_mb_list: as for DDP.
        gradient_as_bucket_view: as for DDP; nothing is copied back.
        hook, in_flight, crowded_network, added_latency_s: as in ``simulate_buckets``.
    """
    options = DdpOptions(
        bucket_cap_mib=bucket_cap_mb,
        static_graph=static_graph,
        find_unused_parameters=find_unused_parameters,
        bucket_cap_mib_list=tuple(bucket_cap_mb_list),
    )
    return simulate_buckets(
        profile,
        network,
        profile_buckets(profile, options),
        costs.as_bucket_view() if gradient_as_bucket_view else costs,
        hook=hook,
        in_flight=in_flight,
        crowded_network=crowded_network,
        added_latency_s=added_latency_s,
    )


def profile_buckets(profile: BackwardProfile, options: DdpOptions) -> list[list[int]]:
    """Returns the steady-state buckets as indices into the profile, in reduction order."""
    kinds = profile.kinds if len(set(profile.kinds)) > 1 else None
    if options.rebuild_iteration() is not None:
        return assign_buckets(profile.sizes_bytes.tolist(), options.limits_bytes(), kinds=kinds)
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
    *,
    hook: CommHook | None = None,
    in_flight: int = 1,
    crowded_network: AllReduceModel | None = None,
    added_latency_s: float = 0.0,
) -> BackwardTimeline:
    """Simulates one backward pass for given buckets (indices into the profile).

    Args:
        profile: gradient sizes and ready times.
        network: the all-reduce model, one after another.
        buckets: in reduction order.
        costs: bookkeeping and contention.
        hook: a communication hook, which decides what is sent (``comm_hooks``).
        in_flight: number of all-reduces that share the link: 1 for NCCL, 2 for gloo as it is.
        crowded_network: seconds per all-reduce while several are in flight, where measured, which
            tells their gain over one after another. Without it they gain nothing.
        added_latency_s: time that each bucket waits in addition, as on a longer link. Nothing is
            sent meanwhile, so computation beside it is not slowed, nor is the waiting.
    """
    if in_flight < 1:
        raise UserError(f"{in_flight} all-reduces in flight: at least 1")
    # ``members`` holds bucket after bucket, split at ``starts``; ``reduceat`` reduces each one.
    members = np.concatenate([np.asarray(bucket) for bucket in buckets])
    starts = np.cumsum([0, *(len(bucket) for bucket in buckets[:-1])])
    sizes = np.add.reduceat(profile.sizes_bytes[members], starts)
    messages = hook.message_bytes(profile, buckets) if hook else sizes[:, None].astype(float)
    traffic = _traffic(profile, network, costs, hook, members, starts, messages)
    gain = None
    if in_flight > 1 and crowded_network is not None:
        crowded_s = _message_times(crowded_network, messages).sum(axis=1)
        gain = np.maximum(1.0, traffic.alone_s / np.maximum(crowded_s, TINY_S))
    if added_latency_s:
        traffic = traffic.later(added_latency_s)
    if in_flight == 1 and not traffic.has_contention:
        spans = without_contention(traffic)
    else:
        spans = advance(traffic, in_flight, gain)

    unpack = hook.decompress_s_per_byte if hook else 0.0
    copied = spans.compute_end_s
    events = []
    for index, (size, ready, start, end) in enumerate(
        zip(sizes.tolist(), spans.ready_s, spans.start_s, spans.end_s, strict=True)
    ):
        copied = max(copied, end + unpack * size) + costs.copy_out_s_per_byte * size
        bucket = tuple(buckets[index])
        events.append(BucketEvent(index, bucket, size, ready, start, end, copied))
    return BackwardTimeline(copied, spans.compute_end_s, traffic.total_work, tuple(events))


def _traffic(
    profile: BackwardProfile,
    network: AllReduceModel,
    costs: DdpCosts,
    hook: CommHook | None,
    members: NDArray,
    starts: NDArray,
    messages: NDArray,
) -> Traffic:
    """Computes what each bucket needs from computation and from the network.

    A bucket is launched once it and all before it are ready; what launching and compressing takes
    from the thread that computes delays every later gradient.
    """
    copied_in = profile.slowest_ready_s + costs.copy_in_s_per_byte * np.cumsum(profile.sizes_bytes)
    ready_work = launched_work = np.maximum.reduceat(copied_in[members], starts)
    total_work = profile.backward_s + costs.copy_in_s_per_byte * profile.total_bytes
    if costs.launch_s or hook:
        sizes = np.add.reduceat(profile.sizes_bytes[members], starts)
        per_byte = hook.compress_s_per_byte if hook else 0.0
        # spent[i]: what launching the first i buckets took. A bucket is late by the launches of all
        # buckets that could be launched before it was ready, and its own launch comes on top.
        spent = np.concatenate([[0.0], np.cumsum(costs.launch_s + per_byte * sizes)])
        at = np.maximum.accumulate(ready_work)
        ready_work = ready_work + spent[np.searchsorted(at, ready_work, side="left")]
        launched_work = at + spent[1:]
        total_work = max(total_work + float(spent[-1]), float(launched_work[-1]))
    message_s = _message_times(network, messages)
    beside_s, progress_s = costs.beside_computation(messages, message_s)
    if messages.shape[1] > 1:
        beside_s, progress_s = (
            np.where(messages > 0, found, 0.0) for found in (beside_s, progress_s)
        )
    return Traffic(
        ready_work=ready_work,
        launched_work=launched_work,
        alone_s=message_s.sum(axis=1),
        beside_s=beside_s.sum(axis=1),
        progress_s=progress_s.sum(axis=1),
        total_work=total_work,
    )


def _message_times(network: AllReduceModel, messages: NDArray) -> NDArray:
    """Returns the seconds of each message [buckets, messages]; an empty one takes no time."""
    if messages.shape[1] == 1:
        return np.atleast_1d(network.time_s(messages[:, 0]))[:, None]
    times = np.atleast_1d(network.time_s(np.maximum(messages, 1.0).ravel()))
    return np.where(messages > 0, times.reshape(messages.shape), 0.0)
