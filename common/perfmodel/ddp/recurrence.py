"""Computation and a queue of collectives, moved forward together: the two recurrences of the model.

The plain one knows nothing of contention. Buckets are ready at r₁, r₂, …, are reduced in order, and
take a₁, a₂, …::

    end_i = max(end_{i−1}, max(r₁, …, r_i)) + a_i

The one with contention moves two clocks. ``work`` is the computation done so far, in seconds of it
running alone. An all-reduce may start once ``work`` has come to where its bucket was launched, and
all before it have started. Beside computation it takes ``beside_s`` instead of ``alone_s``, and
meanwhile ``progress_s`` of computation is done; if computation ends first, what is left of the
all-reduce runs alone.

One at a time is how NCCL runs them (one stream). Gloo has two worker threads for each process
group and takes up the next all-reduce while one is under way. Two of them share the link: each runs
at half speed, so two together take as long as one after the other, unless what they gain by hiding
each other's latency is known (``gain``).

``advance`` takes one case at a time; ``many_cases`` computes the same for arrays of cases, with one
collective at a time that takes no longer beside computation. The tests hold the forms against each
other over random cases.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from common.exercises.bucket_time import one_after_another

TINY_S = 1e-15
"""Lower bound on an all-reduce's time: one of no time would have infinite speed."""


@dataclass(frozen=True)
class Traffic:
    """The computation and all-reduces to be done; one entry per bucket in the order of reduction.

    Attributes:
        ready_work: the work after which the bucket's last gradient is in it.
        launched_work: the work after which its all-reduce may start; never decreasing.
        alone_s, beside_s: duration of the all-reduce by itself, and beside computation.
        progress_s: computation done meanwhile, at most ``beside_s``.
        total_work: the whole computation.
    """

    ready_work: NDArray
    launched_work: NDArray
    alone_s: NDArray
    beside_s: NDArray
    progress_s: NDArray
    total_work: float

    def later(self, latency_s: float) -> Traffic:
        """Adds a latency to every all-reduce, during which it slows nothing."""
        return replace(
            self,
            alone_s=self.alone_s + latency_s,
            beside_s=self.beside_s + latency_s,
            progress_s=self.progress_s + latency_s,
        )

    @property
    def has_contention(self) -> bool:
        """Returns True if all-reduces and computation slow one another."""
        slower = (self.beside_s != self.alone_s).any()
        return bool(slower or (self.progress_s != self.beside_s).any())


@dataclass(frozen=True)
class Spans:
    """Seconds at which each bucket was ready, started and ended, and computation ended."""

    ready_s: list[float]
    start_s: list[float]
    end_s: list[float]
    compute_end_s: float


def without_contention(traffic: Traffic) -> Spans:
    """Moves the queue forward where nothing slows anything: work and time are then the same."""
    launched_s, alone_s = traffic.launched_work.tolist(), traffic.alone_s.tolist()
    end_s = one_after_another(launched_s, alone_s)
    start_s = [max(end, at) for end, at in zip([0.0, *end_s], launched_s, strict=False)]
    ready_s = np.minimum(traffic.ready_work, start_s).tolist()
    return Spans(ready_s, start_s, end_s, traffic.total_work)


def advance(traffic: Traffic, in_flight: int = 1, gain: NDArray | None = None) -> Spans:
    """Moves computation and queue from event to event: a launch, an end, the end of computation.

    Args:
        traffic: the computation and all-reduces to be done.
        in_flight: upper bound on the all-reduces under way, each at its part of the link.
        gain: [buckets], speed of all-reduces of this size when several are in flight, relative to
            one after the other; at least 1, which it is by default.
    """
    # Between two events every rate is constant, so each step goes exactly to the next event.
    # ``left[i]`` is the share of all-reduce i still to do; ``rate`` is the share of it that gets
    # done in a second; ``speed`` is the computation done in a second, 1 where nothing slows it.
    count = len(traffic.alone_s)
    alone_s, beside_s = traffic.alone_s.tolist(), traffic.beside_s.tolist()
    lost_s = (traffic.beside_s - traffic.progress_s).tolist()
    launched_work, total_work = traffic.launched_work.tolist(), traffic.total_work
    gains = [1.0] * count if gain is None else gain.tolist()
    start_s, end_s, left = [0.0] * count, [0.0] * count, [1.0] * count
    now = work = 0.0
    path_work, path_s = [0.0], [0.0]  # where computation stood, and when: piecewise linear
    under_way: list[int] = []
    upcoming = 0
    compute_end_s = None
    while upcoming < count or under_way or compute_end_s is None:
        if compute_end_s is None and work >= total_work:
            compute_end_s = now
        computing = compute_end_s is None
        free = upcoming < count and len(under_way) < in_flight
        if free and (not computing or work >= launched_work[upcoming]):
            start_s[upcoming] = now
            under_way.append(upcoming)
            upcoming += 1
            continue
        # How fast each all-reduce gets done, what that leaves of computation, and what ends first.
        duration_s = beside_s if computing else alone_s
        sharing = len(under_way) > 1
        step, speed, rates = float("inf"), 1.0, []
        for i in under_way:
            part = gains[i] / len(under_way) if sharing else 1.0
            rate = part / max(duration_s[i], TINY_S)
            rates.append(rate)
            speed -= rate * lost_s[i]
            step = min(step, left[i] / rate)
        target = min(total_work, launched_work[upcoming]) if free else total_work
        reached = (target - work) / speed if computing and speed > 0 else float("inf")
        step = min(step, reached)
        now += step
        if computing:
            work = target if reached <= step else work + max(0.0, speed) * step
            path_work.append(work)
            path_s.append(now)
        ended = [i for i, rate in zip(under_way, rates, strict=True) if left[i] / rate <= step]
        for i, rate in zip(under_way, rates, strict=True):
            left[i] -= rate * step
        for i in ended:
            end_s[i] = now
            under_way.remove(i)
    ready_s = np.minimum(first_reached(traffic.ready_work, path_work, path_s), start_s)
    return Spans(ready_s.tolist(), start_s, end_s, compute_end_s)


def first_reached(asked: NDArray, work: list[float], time_s: list[float]) -> NDArray:
    """Returns when computation first came to the work ``asked`` on a piecewise linear path.

    ``numpy.interp`` leaves open which of the times of a plateau it takes, where computation is at
    rest while an all-reduce goes on.

    >>> first_reached(np.array([1.0, 1.5]), [0.0, 1.0, 1.0, 2.0], [0.0, 1.0, 5.0, 6.0]).tolist()
    [1.0, 5.5]
    """
    works, times = np.asarray(work), np.asarray(time_s)
    asked = np.minimum(asked, works[-1])
    after = np.searchsorted(works, asked)  # the first point that has come so far
    before = np.maximum(after - 1, 0)
    gap = works[after] - works[before]
    share = np.where(gap > 0, (asked - works[before]) / np.where(gap > 0, gap, 1.0), 1.0)
    return times[before] + share * (times[after] - times[before])


@dataclass(frozen=True)
class Overlap:
    """The outcome of many cases; arrays over them, in seconds.

    Attributes:
        total_s: until computation, collectives and what follows them are done.
        slowed_s: time added to computation because collectives were active.
        exposed_s: the rest of the total beside the work and its slowing down: computation that
            waits, collectives that outlast it, and the copies after them.
    """

    total_s: NDArray
    slowed_s: NDArray
    exposed_s: NDArray


def many_cases(
    work_s: NDArray,
    ready_s: NDArray,
    alone_s: NDArray,
    *,
    limit_s: NDArray | None = None,
    tail_s: NDArray | None = None,
    compute_slowdown: NDArray | float = 1.0,
) -> Overlap:
    """Moves computation and the queue forward together, in every case.

    A step of the recurrence is a few operations on an array over all cases, so that 200 caps on 12
    sizes of a cluster take a fraction of a second. FSDP's gathers bound computation, too: it does
    not get past a level (``limit_s``) before the gather is done.

    Args:
        work_s: (cases,) all of the computation, in seconds of it running alone.
        ready_s: (collectives, cases or 1) the work after which each may start; never decreasing.
        alone_s: (collectives, cases or 1) duration of each with nothing beside it.
        limit_s: (collectives, cases or 1) the work that can be done before each has ended, at least
            its ``ready_s``; None sets no limit.
        tail_s: (collectives,) what has to follow the end of each, its own copy and all later ones.
        compute_slowdown: (cases,) computation beside a collective takes this many times longer.
    """
    # One collective after another moves two clocks, ``now`` and the computation done, ``work``.
    # First computation comes to where the collective may start. Then the collective runs: for
    # ``beside`` seconds beside computation, which does ``done`` of its work meanwhile, and alone
    # for the rest, as computation has then come to ``limit``. ``computed`` is the time at which
    # computation last got on; ``last`` is the latest end of a collective with its copies.
    work_s = np.asarray(work_s, dtype=float)
    slow = np.asarray(compute_slowdown, dtype=float)
    now, work, slowed, computed = (np.zeros(work_s.shape) for _ in range(4))
    last = np.full(work_s.shape, -np.inf)
    for index in range(len(alone_s)):
        needed = np.minimum(ready_s[index], work_s)
        now = now + np.maximum(needed - work, 0.0)
        computed = np.where(needed > work, now, computed)
        work = np.maximum(work, needed)
        limit = work_s if limit_s is None else np.minimum(limit_s[index], work_s)
        able = alone_s[index] / slow
        stops = able >= limit - work
        done = np.where(stops, np.maximum(limit - work, 0.0), able)
        beside = done * slow
        computed = np.where(done > 0, now + beside, computed)
        now = now + alone_s[index]
        work = np.where(stops, np.maximum(work, limit), work + done)
        slowed = slowed + (beside - done)
        last = np.maximum(last, now + (0.0 if tail_s is None else tail_s[index]))
    compute_end = np.where(work < work_s, now + work_s - work, computed)
    after = 0.0 if tail_s is None or not len(tail_s) else tail_s[0]
    total = np.maximum(compute_end + after, last)
    return Overlap(total, slowed, total - work_s - slowed)
