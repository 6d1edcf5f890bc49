"""Computation and a queue of all-reduces, moved forward together.

``work`` is the computation done so far, in seconds of it running alone. An all-reduce may start
once ``work`` has come to where its bucket was launched, and all before it have started. Beside
computation it takes ``beside_s`` instead of ``alone_s``, and meanwhile ``progress_s`` of
computation is done; if computation ends first, what is left of the all-reduce runs alone.

One at a time is how NCCL runs them (one stream). Gloo has two worker threads for each process
group and takes up the next all-reduce while one is under way. Two of them share the link: each runs
at half speed, so two together take as long as one after the other, unless what they gain by hiding
each other's latency is known (``gain``).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Traffic:
    """What has to be done; one entry per bucket in the order of reduction.

    Attributes:
        ready_work: the work after which the bucket's last gradient is in it.
        launched_work: the work after which its all-reduce may start.
        alone_s, beside_s: how long the all-reduce takes by itself, and beside computation.
        progress_s: computation done meanwhile, at most ``beside_s``.
        total_work: the whole computation.
    """

    ready_work: NDArray
    launched_work: NDArray
    alone_s: NDArray
    beside_s: NDArray
    progress_s: NDArray
    total_work: float


@dataclass(frozen=True)
class Spans:
    """When each bucket was ready, started and ended, and when computation ended (seconds)."""

    ready_s: list[float]
    start_s: list[float]
    end_s: list[float]
    compute_end_s: float


def advance(traffic: Traffic) -> Spans:
    """One all-reduce at a time."""
    start_s, end_s = [], []
    total_work = traffic.total_work
    now = work = 0.0
    path_work, path_s = [0.0], [0.0]  # where computation stood, and when: piecewise linear
    for needed, alone, beside, progress in zip(
        traffic.launched_work.tolist(),
        traffic.alone_s.tolist(),
        traffic.beside_s.tolist(),
        traffic.progress_s.tolist(),
        strict=True,
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
    return _spans(traffic, start_s, end_s, compute_end, path_work, path_s)


def advance_several(traffic: Traffic, in_flight: int, gain: NDArray) -> Spans:
    """Up to ``in_flight`` all-reduces at a time, each at its part of the link.

    Args:
        traffic: what has to be done.
        in_flight: how many may be under way.
        gain: [buckets], how much faster than one after the other all-reduces of this size are
            done when several are in flight; at least 1.
    """
    count = len(traffic.alone_s)
    alone_s, beside_s = traffic.alone_s.tolist(), traffic.beside_s.tolist()
    lost_s = (traffic.beside_s - traffic.progress_s).tolist()
    launched_work, gains = traffic.launched_work.tolist(), gain.tolist()
    start_s, end_s = [0.0] * count, [0.0] * count
    now = work = 0.0
    path_work, path_s = [0.0], [0.0]
    compute_end = None
    left: dict[int, float] = {}  # of each all-reduce under way, the share still to do
    upcoming = 0
    while upcoming < count or left or compute_end is None:
        if compute_end is None and work >= traffic.total_work:
            compute_end = now
        computing = compute_end is None
        free = len(left) < in_flight and upcoming < count
        if free and (not computing or work >= launched_work[upcoming]):
            start_s[upcoming], left[upcoming] = now, 1.0
            upcoming += 1
            continue
        duration_s = beside_s if computing else alone_s
        part = {i: gains[i] / len(left) if len(left) > 1 else 1.0 for i in left}
        rates = {i: part[i] / max(duration_s[i], TINY_S) for i in left}
        speed = max(0.0, 1 - sum(rate * lost_s[i] for i, rate in rates.items()))
        ends = {i: share / rates[i] for i, share in left.items()}
        target = traffic.total_work
        if free:
            target = min(target, launched_work[upcoming])
        reached = (target - work) / speed if computing and speed > 0 else float("inf")
        step = min([reached, *ends.values()])
        now += step
        if computing:
            work = target if reached <= step else work + speed * step
            path_work.append(work)
            path_s.append(now)
        for i in list(left):
            left[i] -= rates[i] * step
            if ends[i] <= step:
                end_s[i] = now
                del left[i]
    return _spans(traffic, start_s, end_s, compute_end, path_work, path_s)


TINY_S = 1e-15
"""Stands for an all-reduce of no time, whose speed would be infinite."""


def _spans(
    traffic: Traffic,
    start_s: list[float],
    end_s: list[float],
    compute_end_s: float,
    path_work: list[float],
    path_s: list[float],
) -> Spans:
    path_work.append(traffic.total_work)
    path_s.append(compute_end_s)
    ready = np.minimum(first_reached(traffic.ready_work, path_work, path_s), start_s)
    return Spans(ready.tolist(), start_s, end_s, compute_end_s)


def first_reached(asked: NDArray, work: list[float], time_s: list[float]) -> NDArray:
    """When computation first came to the work ``asked`` on a piecewise linear path.

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
