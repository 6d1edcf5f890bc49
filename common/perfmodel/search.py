"""The best bucket cap: T(b) is a step function of the cap, so only its steps are searched."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from common.errors import UserError
from common.exercises.cap_search import walk_bucketings
from common.perfmodel.buckets import MIB, DdpOptions
from common.perfmodel.collectives import AllReduceModel
from common.perfmodel.ddp.comm_hooks import CommHook
from common.perfmodel.ddp.profile import NO_COSTS, BackwardProfile, DdpCosts
from common.perfmodel.simulator import profile_buckets, simulate_buckets

GRID_CAPS = 400
"""Caps searched where gradients of several dtypes forbid walking through all bucketings."""


ROUNDING = 1e-9
"""Predictions that differ by less are equal: the order of additions decides which is smaller."""


@dataclass(frozen=True)
class Bucketing:
    """Buckets (indices into a profile) that every cap from ``low_mib`` to ``high_mib`` gives."""

    low_mib: float
    high_mib: float
    buckets: tuple[tuple[int, ...], ...]


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


@dataclass(frozen=True)
class BestCap:
    """The answer of a search.

    Attributes:
        cap_mib: b*, a cap that gives the fastest bucketing found.
        total_s: the predicted backward time there.
        near_mib: every maximal interval of searched caps within 1 % of the best, ascending.
        candidates: all distinct bucketings that were searched, by cap.
    """

    cap_mib: float
    total_s: float
    near_mib: tuple[tuple[float, float], ...]
    candidates: tuple[Candidate, ...]

    def candidate(self, cap_mib: float) -> Candidate:
        """Returns the bucketing of a searched cap.

        A cap above all searched ones is known, too, if the largest gave one bucket. Raises
        UserError for any other cap.
        """
        last = self.candidates[-1]
        if last.num_buckets == 1 and cap_mib > last.high_mib:
            return last
        for candidate in self.candidates:
            if candidate.contains(cap_mib):
                return candidate
        raise UserError(f"cap {cap_mib} MiB was not searched")

    def matched_by(self, caps_mib: Iterable[float], tolerance: float = 1e-3) -> bool:
        """Returns True if one of these caps is predicted as fast as b*, within ``tolerance``."""
        fastest_s = min(map(self.predicted_s, caps_mib))
        return fastest_s <= self.total_s * (1 + tolerance)

    def predicted_s(self, cap_mib: float) -> float:
        """Returns T, in seconds, of a cap that ``candidate`` knows."""
        return self.candidate(cap_mib).total_s


def best_bucket_cap(
    profile: BackwardProfile,
    network: AllReduceModel,
    caps_mib: Sequence[float] | None = None,
    *,
    costs: DdpCosts = NO_COSTS,
    tolerance: float = 0.01,
    bucketings: Sequence[Bucketing] | None = None,
    hook: CommHook | None = None,
    in_flight: int = 1,
    crowded_network: AllReduceModel | None = None,
    added_latency_s: float = 0.0,
) -> BestCap:
    """Finds the cap with the shortest predicted backward pass.

    Args:
        profile: gradient sizes and ready times.
        network: the all-reduce model.
        caps_mib: caps to choose from; caps that give the same buckets are simulated once. None
            searches the bucketings of ``distinct_bucketings``.
        costs: bookkeeping and contention.
        tolerance: excess over the best time that counts as near, as a fraction of that time.
        bucketings: of ``distinct_bucketings`` for this profile and these caps, found once where
            many networks are compared.
        hook, in_flight, crowded_network, added_latency_s: as in ``simulate_buckets``.

    b* is the middle (geometric mean) of the caps that give the fastest bucketing, or of those
    among ``caps_mib``; larger caps win ties.
    """
    if caps_mib is not None and not len(caps_mib):
        raise UserError("no caps to search")
    if bucketings is None:
        bucketings = distinct_bucketings(profile, caps_mib)
    candidates = []
    for one in bucketings:
        timeline = simulate_buckets(
            profile,
            network,
            one.buckets,
            costs,
            hook=hook,
            in_flight=in_flight,
            crowded_network=crowded_network,
            added_latency_s=added_latency_s,
        )
        total_s, exposed_s = timeline.total_s, timeline.exposed_communication_s
        found = Candidate(one.low_mib, one.high_mib, len(one.buckets), total_s, exposed_s)
        candidates.append(found)
    least_s = min(candidate.total_s for candidate in candidates)
    alike = [c for c in candidates if c.total_s <= least_s * (1 + ROUNDING)]
    best = max(alike, key=lambda candidate: candidate.low_mib)
    cap = float(np.sqrt(best.low_mib * best.high_mib))
    if caps_mib is not None:
        inside = [c for c in caps_mib if best.contains(c)]
        cap = min(inside, key=lambda c: abs(np.log(c / cap)))
    near = _near_intervals(candidates, best.total_s * (1 + tolerance))
    return BestCap(cap, best.total_s, near, tuple(candidates))


def regret(measured_s: dict[float, float], chosen_mib: float) -> float:
    """Computes the excess of the measured time at the chosen cap over the best, as a fraction.

    Args:
        measured_s: measured time by cap (MiB).
        chosen_mib: one of those caps.
    """
    if chosen_mib not in measured_s:
        raise UserError(f"cap {chosen_mib} MiB was not measured")
    return measured_s[chosen_mib] / min(measured_s.values()) - 1


def distinct_bucketings(
    profile: BackwardProfile, caps_mib: Sequence[float] | None = None
) -> tuple[Bucketing, ...]:
    """Returns the distinct bucketings of these caps, or, without caps, all that there are; by cap.

    Gradients of several dtypes forbid walking through all: without caps those of ``GRID_CAPS`` caps
    are found. Raises UserError for no caps.
    """
    if caps_mib is None:
        if len(set(profile.kinds)) <= 1:
            return tuple(_all_bucketings(profile))
        caps_mib = np.geomspace(profile.sizes_bytes.min(), profile.total_bytes, GRID_CAPS) / MIB
    if not len(caps_mib):
        raise UserError("no caps to search")
    # A bucketing is known by the last gradient of each bucket. Caps ascend, so the first one that
    # gives it is its lowest, and the latest its highest.
    found: dict[tuple[int, ...], Bucketing] = {}
    for cap in sorted(set(map(float, caps_mib))):
        buckets = profile_buckets(profile, DdpOptions(cap))
        key = tuple(bucket[-1] for bucket in buckets)
        low = found[key].low_mib if key in found else cap
        found[key] = Bucketing(low, cap, tuple(map(tuple, buckets)))
    return tuple(found.values())


def _all_bucketings(profile: BackwardProfile) -> Iterator[Bucketing]:
    for low, high, buckets in walk_bucketings(profile.sizes_bytes.tolist()):
        yield Bucketing(low / MIB, high / MIB, tuple(map(tuple, buckets)))


def _near_intervals(
    candidates: Sequence[Candidate], limit_s: float
) -> tuple[tuple[float, float], ...]:
    intervals: list[tuple[float, float]] = []
    extend = False
    for candidate in candidates:
        if candidate.total_s > limit_s:
            extend = False
        elif extend:
            intervals[-1] = (intervals[-1][0], candidate.high_mib)
        else:
            intervals.append((candidate.low_mib, candidate.high_mib))
            extend = True
    return tuple(intervals)
