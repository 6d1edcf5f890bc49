"""The buckets of a profile, all distinct bucketings that caps can give it, and a few of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from common.errors import UserError
from common.exercises.cap_search import walk_bucketings
from common.perfmodel.buckets import MIB, DdpOptions, assign_buckets, ddp_buckets
from common.perfmodel.ddp.profile import BackwardProfile

GRID_CAPS = 400
"""Caps searched where gradients of several dtypes forbid walking through all bucketings."""


@dataclass(frozen=True)
class Bucketing:
    """Buckets (indices into a profile) that every cap from ``low_mib`` to ``high_mib`` gives."""

    low_mib: float
    high_mib: float
    buckets: tuple[tuple[int, ...], ...]


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


def distinct_bucketings(
    profile: BackwardProfile, caps_mib: Sequence[float] | None = None
) -> tuple[Bucketing, ...]:
    """Returns the distinct bucketings of these caps, or, without caps, all that there are; by cap.

    Gradients of several dtypes forbid walking through all: without caps ``GRID_CAPS`` are tried.
    Raises UserError for no caps.
    """
    if caps_mib is None:
        if len(set(profile.kinds)) <= 1:
            return tuple(
                Bucketing(low / MIB, high / MIB, tuple(map(tuple, buckets)))
                for low, high, buckets in walk_bucketings(profile.sizes_bytes.tolist())
            )
        caps_mib = np.geomspace(profile.sizes_bytes.min(), profile.total_bytes, GRID_CAPS) / MIB
    if not len(caps_mib):
        raise UserError("no caps to search")
    # A bucketing is known by the last gradient of each bucket. Caps ascend, so the first one that
    # gives it is its lowest, and the latest its highest.
    bucketings: dict[tuple[int, ...], Bucketing] = {}
    for cap in sorted(set(map(float, caps_mib))):
        buckets = profile_buckets(profile, DdpOptions(cap))
        key = tuple(bucket[-1] for bucket in buckets)
        low = bucketings[key].low_mib if key in bucketings else cap
        bucketings[key] = Bucketing(low, cap, tuple(map(tuple, buckets)))
    return tuple(bucketings.values())


@dataclass(frozen=True)
class DistinctCap:
    """A cap in MiB amid those that give the same buckets, and their number; None: DDP's default."""

    cap_mib: float | None
    num_buckets: int


def choose_caps(
    sizes_bytes: Sequence[int], count: int, max_buckets: int
) -> tuple[DistinctCap, ...]:
    """Chooses at most ``count`` bucketings, spread evenly by the logarithm of their bucket count.

    Sizes are those of gradients of one dtype, in ready order. The most buckets that ``max_buckets``
    allows and the single bucket are always among the chosen. Raises UserError where there are not
    two.
    """
    by_number: dict[int, DistinctCap] = {}  # of equal numbers the largest cap
    for low, high, buckets in walk_bucketings(sizes_bytes):
        if len(buckets) <= max_buckets:
            by_number[len(buckets)] = DistinctCap((low + high) // 2 / MIB, len(buckets))
    numbers = sorted(by_number)
    if count < 2 or len(numbers) < 2:
        raise UserError(f"{len(numbers)} distinct bucketings, {count} asked: at least 2 are needed")
    # Not every number of buckets can be had: each wanted one takes the nearest that is still left.
    chosen = {numbers[0], numbers[-1]}
    for wanted in np.geomspace(numbers[0], numbers[-1], count)[1:-1]:
        pool = [n for n in numbers if n not in chosen]
        if pool:
            chosen.add(min(pool, key=lambda n: abs(np.log(n / wanted))))
    return tuple(by_number[number] for number in sorted(chosen, reverse=True))
