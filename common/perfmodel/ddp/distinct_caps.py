"""A few bucket caps that lead to different buckets, from many buckets to one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from common.errors import UserError
from common.exercises.cap_search import walk_bucketings
from common.perfmodel.buckets import MIB


@dataclass(frozen=True)
class DistinctCap:
    """A cap in MiB, in the middle of those that give the same buckets, and the number of buckets.

    A cap of None is DDP's default.
    """

    cap_mib: float | None
    num_buckets: int


def distinct_caps(sizes_bytes: Sequence[int]) -> Iterator[DistinctCap]:
    """Yields a cap for each distinct bucketing of gradients of one dtype, ascending.

    ``sizes_bytes`` are in gradient-ready order.
    """
    for low, high, buckets in walk_bucketings(sizes_bytes):
        yield DistinctCap((low + high) // 2 / MIB, len(buckets))


def choose_caps(
    sizes_bytes: Sequence[int], count: int, max_buckets: int
) -> tuple[DistinctCap, ...]:
    """Chooses at most ``count`` bucketings, spread evenly by the logarithm of their bucket count.

    The one with the most buckets that ``max_buckets`` allows and the single bucket are always
    among them. By ascending cap. Raises UserError where there are not two.
    """
    candidates = [cap for cap in distinct_caps(sizes_bytes) if cap.num_buckets <= max_buckets]
    by_number = {cap.num_buckets: cap for cap in candidates}  # of equal numbers the largest cap
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
