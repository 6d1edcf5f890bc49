"""The choice among bucketings: T(b) is a step function of the cap, so only its steps compete."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from common.errors import UserError
from common.perfmodel.buckets import MIB, short_cap
from common.perfmodel.ddp.bucketings import Bucketing
from common.perfmodel.ddp.timeline import BackwardTimeline

ROUNDING = 1e-9
"""Predictions that differ by less are equal: the order of additions decides which is smaller."""
NEAR = 1.01
"""Multiple of the best time up to which caps count as near."""


@dataclass(frozen=True)
class Candidate:
    """One distinct bucketing: every cap from ``low_mib`` to ``high_mib`` gives it."""

    low_mib: float
    high_mib: float
    num_buckets: int
    total_s: float
    exposed_communication_s: float

    def contains(self, cap_mib: float) -> bool:
        """Returns True if this cap, in whole bytes as DDP takes it, is in the interval."""
        low, cap, high = (math.floor(mib * MIB) for mib in (self.low_mib, cap_mib, self.high_mib))
        return low <= cap <= high

    @property
    def short_cap_mib(self) -> float:
        """Returns the cap of the interval with the fewest digits, to ask for the bucketing by."""
        low, high = (max(1, round(mib * MIB)) for mib in (self.low_mib, self.high_mib))
        return short_cap(low_bytes=low, high_bytes=high)


@dataclass(frozen=True)
class BestCap:
    """The answer of a search.

    Attributes:
        cap_mib: b*, a cap that gives the fastest bucketing found.
        total_s: the predicted backward time there.
        near_mib: every maximal interval of searched caps within 1 % of the best, ascending.
    """

    cap_mib: float
    total_s: float
    near_mib: tuple[tuple[float, float], ...]
    candidates: tuple[Candidate, ...]

    def candidate(self, cap_mib: float) -> Candidate:
        """Returns the bucketing of a searched cap, or of any above if the largest gave one bucket.

        Raises UserError for any other cap.
        """
        last = self.candidates[-1]
        if last.num_buckets == 1 and cap_mib > last.high_mib:
            return last
        for candidate in self.candidates:
            if candidate.contains(cap_mib):
                return candidate
        raise UserError(f"cap {cap_mib} MiB was not searched")

    def matched_by(self, caps_mib: Iterable[float]) -> bool:
        """Returns True if one of these caps is predicted as fast as b*, within 0.1 %."""
        fastest_s = min(map(self.predicted_s, caps_mib))
        return fastest_s <= self.total_s * 1.001

    def predicted_s(self, cap_mib: float) -> float:
        """Returns T, in seconds, of a cap that ``candidate`` knows."""
        return self.candidate(cap_mib).total_s


def fastest_cap(
    bucketings: Sequence[Bucketing],
    timelines: Sequence[BackwardTimeline],
    caps_mib: Sequence[float] | None = None,
) -> BestCap:
    """Chooses the cap of the shortest backward pass.

    b* is the middle (geometric mean) of the caps that give the fastest bucketing, or of those
    among ``caps_mib``; larger caps win ties. ``timelines`` has the backward pass of each bucketing.
    """
    candidates = [
        Candidate(
            low_mib=bucketing.low_mib,
            high_mib=bucketing.high_mib,
            num_buckets=len(bucketing.buckets),
            total_s=timeline.total_s,
            exposed_communication_s=timeline.exposed_communication_s,
        )
        for bucketing, timeline in zip(bucketings, timelines, strict=True)
    ]
    least_s = min(candidate.total_s for candidate in candidates)
    fastest = [c for c in candidates if c.total_s <= least_s * (1 + ROUNDING)]
    best = max(fastest, key=lambda candidate: candidate.low_mib)
    cap = float(np.sqrt(best.low_mib * best.high_mib))
    if caps_mib is not None:
        cap = nearest_cap([c for c in caps_mib if best.contains(c)], cap)
    runs = near_runs([c.total_s for c in candidates], best.total_s * NEAR)
    near = tuple((candidates[first].low_mib, candidates[last].high_mib) for first, last in runs)
    return BestCap(cap, best.total_s, near, tuple(candidates))


def near_runs(total_s: Sequence[float], limit_s: float) -> list[tuple[int, int]]:
    """Returns the first and the last of each run of neighbours that take at most ``limit_s``."""
    by_nearness = groupby(range(len(total_s)), lambda index: bool(total_s[index] <= limit_s))
    runs = [[*run] for is_near, run in by_nearness if is_near]
    return [(run[0], run[-1]) for run in runs]


def nearest_cap(caps_mib: Sequence[float], cap_mib: float) -> float:
    """Returns the cap that is nearest to another by ratio; the smaller of two as near."""
    caps = np.sort(np.array(caps_mib, dtype=float))
    away = abs(np.log(caps / cap_mib))
    return float(caps[away <= away.min() + ROUNDING][0])
