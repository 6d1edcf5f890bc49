"""How computation and all-reduces slow each other down, fitted from one overlapped run.

While an all-reduce is under way computation advances at 1/s of its speed (dw/dt = 1/s), and while
computation runs an all-reduce takes r times as long. Two numbers, of the machine and the network
and not of the bucket cap: fitted at one cap, they are held for all.

What one run can tell depends on what was watched.

- Its time T alone gives s, for a given r, where computation is on the critical path. Where
  communication is, computation hides behind it however slow it becomes: T hardly moves with s, and
  s cannot be told (``ContentionFit.identified``). What all-reduces of each size take from a
  backward pass, measured apart (``samples.OverlapSamples``), then stays in force.
- With the moment C at which computation ended, C gives s in either case, for a given r: what is
  told is the computation lost to a second of all-reduce, r·(1 − 1/s). T then gives r where
  communication is on the critical path; elsewhere r stays what it was given as.

A fit to T attributes to contention whatever else that run had; it holds for the network on which
it was made, and no other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from common.errors import UserError
from common.perfmodel.buckets import DdpOptions
from common.perfmodel.collectives import AllReduceModel
from common.perfmodel.profile import NO_COSTS, BackwardProfile, DdpCosts
from common.perfmodel.simulator import profile_buckets, simulate_buckets

LARGEST_SLOWDOWN = 8.0
"""Slowdowns are sought up to here."""
TOLD_WITHIN = 0.5
"""s counts as identified where its range is no wider. On one machine it was between 1.1 and 1.8
over networks from 0.5 Gbit/s to loopback, so a wider range tells nothing."""
NOISE = 0.01
"""The least that two runs of the same thing differ by, as a fraction."""


@dataclass(frozen=True)
class OverlappedRun:
    """Backward passes of DDP at one cap.

    Attributes:
        total_s: T of each pass, the slowest rank's.
        compute_end_s: when computation ended in each, where that was watched.
        options: DDP's arguments.
    """

    total_s: Sequence[float]
    compute_end_s: Sequence[float] = ()
    options: DdpOptions = field(default_factory=DdpOptions)

    def __post_init__(self) -> None:
        for name, values in (("T", self.total_s), ("end of computation", self.compute_end_s)):
            if len(values) and not (np.isfinite(values).all() and min(values) > 0):
                raise UserError(f"overlapped run: each {name} must be a number of seconds above 0")
        if not len(self.total_s):
            raise UserError("overlapped run: no backward pass")
        if len(self.compute_end_s) and np.median(self.compute_end_s) > np.median(self.total_s):
            raise UserError("overlapped run: computation ends after the backward pass does")


@dataclass(frozen=True)
class ContentionFit:
    """What one overlapped run says.

    Attributes:
        compute_slowdown, communication_slowdown: s and r.
        compute_range: the s with which the run agrees to within twice its noise.
        identified: whether that range is narrow enough to mean anything.
        costs: what to predict with: s and r where s is identified, else what was given.
        note: one sentence on which of the two it is.
    """

    compute_slowdown: float
    communication_slowdown: float
    compute_range: tuple[float, float]
    identified: bool
    costs: DdpCosts
    note: str


def fit_contention(
    profile: BackwardProfile,
    network: AllReduceModel,
    run: OverlappedRun,
    costs: DdpCosts = NO_COSTS,
    *,
    noise: float = NOISE,
    added_latency_s: float = 0.0,
) -> ContentionFit:
    """Fit s, and r where the end of computation was watched, to one overlapped run.

    Args:
        profile: of the model that ran.
        network: its all-reduces alone, one after another.
        run: what was measured; its cap is then no longer one to judge predictions on.
        costs: copies and launches, which are kept; r where the run does not contradict it; and
            the contention that stays in force where s cannot be told.
        noise: the least uncertainty of the run's median, as a fraction.
        added_latency_s: as in ``simulate_buckets``.
    """
    buckets = profile_buckets(profile, run.options)

    def ends(s: float, r: float) -> tuple[float, float]:
        timeline = simulate_buckets(
            profile,
            network,
            buckets,
            _with_rates(costs, s, r),
            added_latency_s=added_latency_s,
        )
        return timeline.total_s, timeline.compute_end_s

    total_s, total_noise_s = _middle(run.total_s, noise)
    if len(run.compute_end_s):
        end_s, end_noise_s = _middle(run.compute_end_s, noise)

        def slowdown_at(r: float) -> float:
            return _root(lambda s: ends(s, r)[1], end_s)

        r = costs.communication_slowdown
        if abs(ends(slowdown_at(r), r)[0] - total_s) > 2 * total_noise_s:
            r = _root(lambda r: ends(slowdown_at(r), r)[0], total_s)
        s = slowdown_at(r)
        watched, aim, uncertain, what = 1, end_s, end_noise_s, "the end of its computation"
    else:
        r = costs.communication_slowdown
        s = _root(lambda s: ends(s, r)[0], total_s)
        watched, aim, uncertain, what = 0, total_s, total_noise_s, "its time"
    low, high = (
        _root(lambda s: ends(s, r)[watched], aim + sign * 2 * uncertain) for sign in (-1, 1)
    )
    identified = high - low <= TOLD_WITHIN and high < LARGEST_SLOWDOWN
    if identified:
        note = f"contention fitted to one overlapped run: s = {s:.2f} ({low:.2f} to {high:.2f})"
        return ContentionFit(s, r, (low, high), True, _with_rates(costs, s, r), note)
    kept = "what was measured apart stays" if costs.lost_compute else "none is assumed"
    bound = f"{high:.2f}" if high < LARGEST_SLOWDOWN else "any"
    note = f"{what} agrees with s from {low:.2f} to {bound}: contention cannot be told; {kept}"
    return ContentionFit(s, r, (low, high), False, costs, note)


def split_lost_compute(costs: DdpCosts, network: AllReduceModel) -> DdpCosts:
    """Measured ``lost_compute`` as a launch and a slowdown: lost(S) = launch_s + κ·a(S).

    A line through what all-reduces of each size took from computation, over how long they take
    alone, neither part below 0. While an all-reduce of a(S) runs for r·a(S), s of computation is
    lost at a rate of 1 − 1/s, so κ = r·(1 − 1/s).

    Raises UserError where nothing was measured.
    """
    if costs.lost_compute is None:
        raise UserError("no computation lost to all-reduces was measured: nothing to split")
    sizes, lost = (np.asarray(values) for values in costs.lost_compute)
    alone = np.atleast_1d(network.time_s(sizes))
    launch, share = 0.0, float(alone @ lost / (alone @ alone))
    if len(sizes) > 1:
        slope, intercept = np.polyfit(alone, lost, 1)
        if slope < 0:
            launch, share = float(lost.mean()), 0.0
        elif intercept > 0:
            launch, share = float(intercept), float(slope)
    r = costs.communication_slowdown
    s = LARGEST_SLOWDOWN if share >= r else min(LARGEST_SLOWDOWN, r / (r - share))
    return replace(costs, lost_compute=None, launch_s=launch, compute_slowdown=s)


def _with_rates(costs: DdpCosts, s: float, r: float) -> DdpCosts:
    return replace(costs, lost_compute=None, compute_slowdown=s, communication_slowdown=r)


def _middle(values: Sequence[float], noise: float) -> tuple[float, float]:
    """The median and its standard error (from the median deviation), at least ``noise`` of it."""
    middle = float(np.median(values))
    deviation = 1.4826 * float(np.median(np.abs(np.asarray(values) - middle)))
    return middle, max(1.2533 * deviation / len(values) ** 0.5, noise * middle)


def _root(rising: Callable[[float], float], aim: float) -> float:
    """Where a quantity that never falls reaches ``aim``, between 1 and ``LARGEST_SLOWDOWN``."""
    low, high = 1.0, LARGEST_SLOWDOWN
    if rising(low) >= aim:
        return low
    if rising(high) < aim:
        return high
    while high - low > 1e-4:
        middle = (low + high) / 2
        low, high = (middle, high) if rising(middle) < aim else (low, middle)
    return high
