"""The model of training under DDP, with which every prediction of this project is made.

Inputs go in, each measured or assumed: when gradients are ready (``profile``), what all-reduces
take (``collectives``), what DDP adds and what computation and communication take from each other
(``DdpCosts``), and how many all-reduces the backend has in flight. Out come the backward pass of
any bucketing (``simulator``), the step around it (``ddp_step``), and the best cap (``search``).

Beside the full model stands a ladder of simpler ones, each with one term more than the one before.
It has one set of names, wherever a prediction is shown.

``ddplab predict`` and ``tune``, the notebooks, the diagnosis and ``ddplab study accuracy`` predict
with this and nothing else. ``cap_grid`` is the same model for many cases at once, as
``predict --cluster`` has them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from common.perfmodel.buckets import DdpOptions
from common.perfmodel.collectives import AllReduceModel, AlphaBeta, as_alpha_beta
from common.perfmodel.ddp.closed_form import closed_form
from common.perfmodel.ddp.comm_hooks import CommHook
from common.perfmodel.ddp.profile import NO_COSTS, BackwardProfile, DdpCosts
from common.perfmodel.ddp.step import StepOptions, StepParts, StepTimeline, step_timeline
from common.perfmodel.search import BestCap, Bucketing, best_bucket_cap
from common.perfmodel.simulator import BackwardTimeline, profile_buckets, simulate_buckets

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
        in_flight: all-reduces that the backend has under way at a time: 1 for NCCL.
        crowded_network: seconds per all-reduce while several are in flight, where measured.
        added_latency_s: what each bucket waits in addition (``simulate_buckets``).
    """

    profile: BackwardProfile
    network: AllReduceModel
    costs: DdpCosts = NO_COSTS
    in_flight: int = 1
    crowded_network: AllReduceModel | None = None
    added_latency_s: float = 0.0

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
        hook: CommHook | None = None,
    ) -> BackwardTimeline:
        """Predicts the backward pass in its steady state.

        Args:
            options: the arguments of DDP that decide its buckets; its defaults without.
            gradient_as_bucket_view: as for DDP; nothing is copied back.
            hook: a communication hook, which decides what is sent.
        """
        return simulate_buckets(
            self.profile,
            self.network,
            profile_buckets(self.profile, options or DdpOptions()),
            self.costs.as_bucket_view() if gradient_as_bucket_view else self.costs,
            hook=hook,
            in_flight=self.in_flight,
            crowded_network=self.crowded_network,
            added_latency_s=self.added_latency_s,
        )

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
            options.ddp,
            gradient_as_bucket_view=options.gradient_as_bucket_view,
            hook=options.hook,
        )
        return step_timeline(parts, options, backward, self.profile.backward_s)

    def best_cap(
        self,
        caps_mib: Sequence[float] | None = None,
        *,
        bucketings: Sequence[Bucketing] | None = None,
        hook: CommHook | None = None,
    ) -> BestCap:
        """Finds the cap with the shortest predicted backward pass (``best_bucket_cap``)."""
        return best_bucket_cap(
            self.profile,
            self.network,
            caps_mib,
            costs=self.costs,
            bucketings=bucketings,
            hook=hook,
            in_flight=self.in_flight,
            crowded_network=self.crowded_network,
            added_latency_s=self.added_latency_s,
        )

    def ladder(self, one_rank: BackwardProfile | None = None) -> dict[str, Predictor]:
        """Returns every predictor of ``RUNGS`` by its name, simplest first.

        ``SEVERAL`` is left out where one all-reduce is under way at a time.

        Args:
            one_rank: the profile of a single rank; the rungs below ``SLOWEST`` then take it.
        """
        # Built from the full model downwards: each rung lacks a term that the next one has.
        unslowed = self.costs.without("communication_slowdown")
        copies = unslowed.without("launch", "compute_slowdown")
        one_by_one = replace(self, in_flight=1, crowded_network=None)
        bare = replace(one_by_one, costs=NO_COSTS)
        own = replace(bare, profile=one_rank or self.profile)
        by_hand = closed_form(own.profile, self.line)
        models = {
            LINE: replace(own, network=as_alpha_beta(self.network)),
            CURVE: own,
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
        """Returns two predictors that need no timeline: compute + Σ a(x), and their maximum.

        Computation and all-reduces follow one another where nothing overlaps, and the shorter of
        the two is hidden where all of it does.
        """

        def exchange_s(cap_mib: float | None) -> float:
            sizes = [event.size_bytes for event in self.at_cap(cap_mib).events]
            return sum(float(self.network.time_s(size)) + self.added_latency_s for size in sizes)

        compute_s = self.profile.backward_s
        return {
            NO_OVERLAP: lambda cap_mib: compute_s + exchange_s(cap_mib),
            PERFECT_OVERLAP: lambda cap_mib: max(compute_s, exchange_s(cap_mib)),
        }
