"""Searches that are too long to be called step by step: for caps, and for partitions."""

from __future__ import annotations


def bucketings(sizes: list[int]) -> list[tuple[int, int, list[list[int]]]]:
    """Returns all that ``walk_bucketings`` yields."""
    from common.exercises.cap_search import walk_bucketings

    walked = walk_bucketings(sizes)
    return [(low, high, [list(bucket) for bucket in buckets]) for low, high, buckets in walked]


def partitions(lengths: list[list[int]], ranks: int) -> list[float]:
    """Returns the cost of the slowest rank in the best partition of each batch."""
    import numpy as np

    from common.exercises.min_max_partition import SortedBatch, min_max_partition

    def cost(batch, longest):
        return 1e-3 + 1e-6 * batch * longest + 1e-9 * batch * longest**2

    return [
        min_max_partition(SortedBatch.of(np.array(batch)), ranks, cost, len(batch))[0]
        for batch in lengths
    ]
