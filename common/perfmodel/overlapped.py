"""Computation beside a queue of collectives, for many cases at once.

Computation is a line of work that is done in order. Collectives are served one after another; each
starts when a level of that work is reached (``ready``), and computation does not get past another
level (``limit``) before the collective is done. DDP's buckets have no limit but the end of the
pass, which makes this the recurrence of ``simulator``; the gathers of FSDP have one. While a
collective is active, computation takes ``compute_slowdown`` times as long.

A step of the recurrence is a few operations on an array over all cases, so that 200 caps on 12
sizes of a cluster take a fraction of a second.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Overlap:
    """What came of it, each an array over cases, in seconds.

    Attributes:
        total_s: until computation, collectives and what follows them are done.
        slowed_s: what computation took longer because collectives were active.
        exposed_s: what remains of the total beside the work and its slowing down: computation that
            waits, collectives that outlast it, and the copies after them.
    """

    total_s: NDArray
    slowed_s: NDArray
    exposed_s: NDArray


def overlap(
    work_s: NDArray,
    ready_s: NDArray,
    alone_s: NDArray,
    *,
    limit_s: NDArray | None = None,
    tail_s: NDArray | None = None,
    compute_slowdown: NDArray | float = 1.0,
    communication_slowdown: float = 1.0,
) -> Overlap:
    """Move computation and the queue forward together, in every case.

    Args:
        work_s: (cases,) all of the computation, in seconds of it running alone.
        ready_s: (collectives, cases or 1) the work after which each may start; never decreasing.
        alone_s: (collectives, cases or 1) how long each takes with nothing beside it.
        limit_s: (collectives, cases or 1) the work that can be done before each has ended, at least
            its ``ready_s``; None sets no limit.
        tail_s: (collectives,) what has to follow the end of each, its own copy and all later ones.
        compute_slowdown: (cases,) computation beside a collective takes this many times longer.
        communication_slowdown: and a collective beside computation this many times.
    """
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
        able = alone_s[index] * communication_slowdown / slow
        stops = able >= limit - work
        done = np.where(stops, np.maximum(limit - work, 0.0), able)
        beside = done * slow
        computed = np.where(done > 0, now + beside, computed)
        now = now + alone_s[index] + beside * (1 - 1 / communication_slowdown)
        work = np.where(stops, np.maximum(work, limit), work + done)
        slowed = slowed + (beside - done)
        last = np.maximum(last, now + (0.0 if tail_s is None else tail_s[index]))
    compute_end = np.where(work < work_s, now + work_s - work, computed)
    after = 0.0 if tail_s is None or not len(tail_s) else tail_s[0]
    total = np.maximum(compute_end + after, last)
    return Overlap(total, slowed, total - work_s - slowed)
