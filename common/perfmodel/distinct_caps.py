"""Caps that lead to different buckets, few of them, from many buckets to one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from common.errors import UserError
from common.perfmodel.buckets import MIB, walk_bucketings


@dataclass(frozen=True)
class DistinctCap:
    """A cap in MiB, in the middle of those that give the same buckets, and how many these are.

    A cap of None is DDP's default.
    """

    cap_mib: float | None
    num_buckets: int


def distinct_caps(sizes_bytes: Sequence[int]) -> Iterator[DistinctCap]:
    """Every distinct bucketing of gradients of one dtype in ready order, by ascending cap."""
    for low, high, buckets in walk_bucketings(sizes_bytes):
        yield DistinctCap((low + high) // 2 / MIB, len(buckets))


def choose_caps(
    sizes_bytes: Sequence[int], count: int, max_buckets: int
) -> tuple[DistinctCap, ...]:
    """At most ``count`` bucketings, their numbers of buckets spread evenly on a logarithmic scale.

    The one with the most buckets that ``max_buckets`` allows and the single bucket are always
    among them. By ascending cap. Raises UserError where there are not two.
    """
    known = [cap for cap in distinct_caps(sizes_bytes) if cap.num_buckets <= max_buckets]
    by_number = {cap.num_buckets: cap for cap in known}  # of equal numbers the largest cap
    numbers = sorted(by_number)
    if count < 2 or len(numbers) < 2:
        raise UserError(f"{len(numbers)} distinct bucketings, {count} asked: at least 2 are needed")
    chosen = {numbers[0], numbers[-1]}
    for wanted in np.geomspace(numbers[0], numbers[-1], count)[1:-1]:
        left = [n for n in numbers if n not in chosen]
        if left:
            chosen.add(min(left, key=lambda n: abs(np.log(n / wanted))))
    return tuple(by_number[number] for number in sorted(chosen, reverse=True))
