"""The model of training under DDP, with which every prediction of this project is made.

Inputs go in, each measured or assumed: when gradients are ready (``profile``), what all-reduces
take (``collectives``), what DDP adds and what computation and communication take from each other
(``DdpCosts``), and how many all-reduces the backend has in flight. Out come the backward pass of
any bucketing, bucket by bucket, the step around it (``ddp/step``), and the best cap
(``ddp/best_cap``).

A bucket is ready when its last gradient is, on the last rank. Buckets are reduced one after another
in index order (``recurrence``). With one at a time, as NCCL has it, bucket i starts at ``max(end of
bucket i−1, ready i)`` and takes a(S_i); gloo has two under way. An all-reduce that runs beside
computation takes longer and costs computation time (``DdpCosts``).
After the backward pass each bucket is waited for and copied back in turn, so only the last copy is
sure to be exposed. Source of the order: ``Reducer::mark_bucket_ready`` and ``finalize_backward`` in
PyTorch's torch/csrc/distributed/c10d/reducer.cpp.

What one rank's computation needs, all ranks need: while an all-reduce is under way it slows all of
them alike, so the rank that is last at a gradient is the one that is last there alone.

Beside the full model stands a ladder of simpler ones, each with one term more than the one before.
It has one set of names, wherever a prediction is shown.

``ddplab predict`` and ``tune``, the notebooks, the diagnosis and ``ddplab study accuracy`` predict
with this and nothing else. ``cap_grid`` is the same model for many cases at once, as
``predict --cluster`` has them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from common.errors import UserError
from common.perfmodel.buckets import DdpOptions
from common.perfmodel.collectives import AllReduceModel, AlphaBeta, as_alpha_beta
from common.perfmodel.ddp.best_cap import BestCap, fastest_cap
from common.perfmodel.ddp.bucketings import Bucketing, distinct_bucketings, profile_buckets
from common.perfmodel.ddp.closed_form import closed_form
from common.perfmodel.ddp.comm_hooks import CastHook
from common.perfmodel.ddp.profile import NO_COSTS, BackwardProfile, DdpCosts
from common.perfmodel.ddp.recurrence import TINY_S, Traffic, advance, without_contention
from common.perfmodel.ddp.step import StepOptions, StepParts, StepTimeline, step_timeline
from common.perfmodel.ddp.timeline import BackwardTimeline, BucketEvent

BY_HAND = "by hand"
LINE = "real buckets, α–β"
CURVE = "real buckets, a(x)"
SLOWEST = "slowest rank"
COPIES = "with copies"
SEVERAL = "several in flight"
COMPUTE = "computation slowed"
FULL = "full model"
NO_OVERLAP, PERFECT_OVERLAP = "no overlap", "perfect overlap"
"""The extremes of overlap, which know of buckets and all-reduces but not of when these begin."""
RUNGS = (BY_HAND, LINE, CURVE, COPIES, SEVERAL, COMPUTE, FULL)
"""The ladder, simplest first. ``SLOWEST`` comes before the copies where ranks were told apart."""

Predictor = Callable[[float | None], float]
"""A function from a bucket cap in MiB (None: DDP's default) to seconds of a backward pass."""


@dataclass(frozen=True, eq=False)
class DdpModel:
    """A predictor of the backward passes and steps of one model on one network.

    Attributes:
        profile: gradients and when they are ready on the slowest rank, without communication.
        network: all-reduces one after another.
        costs: DDP's copies, and contention.
        in_flight: all-reduces that share the link at a time: 1 for NCCL, 2 for gloo as it is.
        crowded_network: seconds per all-reduce while several are in flight, where measured, which
            tells their gain over one after another. Without it they gain nothing.
        added_latency_s: time that each bucket waits in addition, as on a longer link. Nothing is
            sent meanwhile, so computation beside it is not slowed, nor is the waiting.
    """

    profile: BackwardProfile
    network: AllReduceModel
    costs: DdpCosts = NO_COSTS
    in_flight: int = 1
    crowded_network: AllReduceModel | None = None
    added_latency_s: float = 0.0

    def __post_init__(self) -> None:
        if self.in_flight < 1:
            raise UserError(f"{self.in_flight} all-reduces in flight: at least 1")

    @property
    def line(self) -> AlphaBeta:
        """Returns α–β through the network, α with the latency that is added to every bucket."""
        line = as_alpha_beta(self.network)
        return replace(line, alpha_s=line.alpha_s + self.added_latency_s)

    def backward(
        self,
        options: DdpOptions | None = None,
        *,
        gradient_as_bucket_view: bool = False,
        hook: CastHook | None = None,
    ) -> BackwardTimeline:
        """Predicts the backward pass in its steady state.

        Args:
            options: the arguments of DDP that decide its buckets; its defaults without.
            gradient_as_bucket_view: as for DDP; nothing is copied back.
            hook: a communication hook, which decides what is sent.
        """
        model = self
        if gradient_as_bucket_view:
            model = replace(self, costs=self.costs.as_bucket_view())
        return model.simulate(profile_buckets(self.profile, options or DdpOptions()), hook=hook)

    def simulate(
        self, buckets: Sequence[Sequence[int]], *, hook: CastHook | None = None
    ) -> BackwardTimeline:
        """Simulates a backward pass; buckets are indices into the profile, in reduction order."""
        # ``members`` holds bucket after bucket, split at ``starts``; ``reduceat`` reduces each one.
        members = np.concatenate([np.asarray(bucket) for bucket in buckets])
        starts = np.cumsum([0, *(len(bucket) for bucket in buckets[:-1])])
        sizes = np.add.reduceat(self.profile.sizes_bytes[members], starts)
        messages = hook.message_bytes(self.profile, buckets) if hook else sizes.astype(float)
        traffic = self._traffic(members, starts, messages, hook)
        gain = None
        if self.in_flight > 1 and self.crowded_network is not None:
            crowded_s = self.crowded_network.time_s(messages)
            gain = np.maximum(1.0, traffic.alone_s / np.maximum(crowded_s, TINY_S))
        if self.added_latency_s:
            traffic = traffic.later(self.added_latency_s)
        if self.in_flight == 1 and not traffic.has_contention:
            spans = without_contention(traffic)
        else:
            spans = advance(traffic, self.in_flight, gain)

        unpack = hook.decompress_s_per_byte if hook else 0.0
        copied = spans.compute_end_s
        events = []
        for index, (size, ready, start, end) in enumerate(
            zip(sizes.tolist(), spans.ready_s, spans.start_s, spans.end_s, strict=True)
        ):
            copied = max(copied, end + unpack * size) + self.costs.copy_out_s_per_byte * size
            bucket = tuple(buckets[index])
            events.append(BucketEvent(index, bucket, size, ready, start, end, copied))
        return BackwardTimeline(copied, spans.compute_end_s, traffic.total_work, tuple(events))

    def _traffic(
        self, members: NDArray, starts: NDArray, messages: NDArray, hook: CastHook | None
    ) -> Traffic:
        """Computes what each bucket needs from computation and from the network.

        A bucket is launched once it and all before it are ready; what launching and compressing
        takes from the thread that computes delays every later gradient.
        """
        profile, costs = self.profile, self.costs
        copied_in = profile.slowest_ready_s + costs.copy_in_s_per_byte * np.cumsum(
            profile.sizes_bytes
        )
        ready_work = launched_work = np.maximum.reduceat(copied_in[members], starts)
        total_work = profile.backward_s + costs.copy_in_s_per_byte * profile.total_bytes
        if costs.launch_s or hook:
            sizes = np.add.reduceat(profile.sizes_bytes[members], starts)
            per_byte = hook.compress_s_per_byte if hook else 0.0
            # spent[i]: what launching the first i buckets took. A bucket is late by the launches of
            # all buckets that could be launched before it was ready; its own launch comes on top.
            spent = np.concatenate([[0.0], np.cumsum(costs.launch_s + per_byte * sizes)])
            at = np.maximum.accumulate(ready_work)
            ready_work = ready_work + spent[np.searchsorted(at, ready_work, side="left")]
            launched_work = at + spent[1:]
            total_work = max(total_work + float(spent[-1]), float(launched_work[-1]))
        alone_s = self.network.time_s(messages)
        beside_s, progress_s = costs.beside_computation(messages, alone_s)
        return Traffic(ready_work, launched_work, alone_s, beside_s, progress_s, total_work)

    def at_cap(self, cap_mib: float | None) -> BackwardTimeline:
        """Predicts the backward pass at one bucket cap in MiB; None is DDP's default."""
        return self.backward(DdpOptions(cap_mib))

    def backward_s(self, cap_mib: float | None) -> float:
        """Predicts the seconds of a backward pass at one bucket cap in MiB."""
        return self.at_cap(cap_mib).total_s

    def step(self, parts: StepParts, options: StepOptions | None = None) -> StepTimeline:
        """Predicts a whole step, whose other parts were measured without DDP."""
        options = options or StepOptions()
        backward = self.backward(
            options.ddp, gradient_as_bucket_view=options.gradient_as_bucket_view, hook=options.hook
        )
        return step_timeline(parts, options, backward, self.profile.backward_s)

    def best_cap(
        self,
        caps_mib: Sequence[float] | None = None,
        *,
        bucketings: Sequence[Bucketing] | None = None,
        hook: CastHook | None = None,
    ) -> BestCap:
        """Finds the cap with the shortest predicted backward pass.

        Args:
            caps_mib: caps to choose from; caps that give the same buckets are simulated once. None
                searches the bucketings of ``distinct_bucketings``.
            bucketings: result of ``distinct_bucketings`` for this profile and these caps, computed
                once where many networks are compared.
            hook: a communication hook, which decides what is sent.
        """
        if caps_mib is not None and not len(caps_mib):
            raise UserError("no caps to search")
        if bucketings is None:
            bucketings = distinct_bucketings(self.profile, caps_mib)
        timelines = [self.simulate(bucketing.buckets, hook=hook) for bucketing in bucketings]
        return fastest_cap(bucketings, timelines, caps_mib)

    def ladder(self, one_rank: BackwardProfile | None = None) -> dict[str, Predictor]:
        """Returns every predictor of ``RUNGS`` by its name, simplest first.

        ``SEVERAL`` is left out where one all-reduce is under way at a time. Rungs below ``SLOWEST``
        take the profile of ``one_rank``, where it is given.
        """
        # Built from the full model downwards: each rung lacks a term that the next one has.
        unslowed = self.costs.without("communication_slowdown")
        copies = unslowed.without("launch", "compute_slowdown")
        one_by_one = replace(self, in_flight=1, crowded_network=None)
        bare = replace(one_by_one, costs=NO_COSTS)
        single = replace(bare, profile=one_rank or self.profile)
        by_hand = closed_form(single.profile, self.line)
        models = {
            LINE: replace(single, network=as_alpha_beta(self.network)),
            CURVE: single,
            SLOWEST: bare,
            COPIES: replace(one_by_one, costs=copies),
            SEVERAL: replace(self, costs=copies),
            COMPUTE: replace(self, costs=unslowed),
            FULL: self,
        }
        if one_rank is None:
            del models[SLOWEST]
        if self.in_flight == 1:
            del models[SEVERAL]
        predictors: dict[str, Predictor] = {BY_HAND: by_hand.at_cap_s}
        return predictors | {name: model.backward_s for name, model in models.items()}

    def extremes(self) -> dict[str, Predictor]:
        """Returns compute + Σ a(x), where nothing overlaps, and their maximum, where all does."""

        def exchange_s(cap_mib: float | None) -> float:
            sizes = [event.size_bytes for event in self.at_cap(cap_mib).events]
            return sum(float(self.network.time_s(size)) + self.added_latency_s for size in sizes)

        compute_s = self.profile.backward_s
        return {
            NO_OVERLAP: lambda cap_mib: compute_s + exchange_s(cap_mib),
            PERFECT_OVERLAP: lambda cap_mib: max(compute_s, exchange_s(cap_mib)),
        }
