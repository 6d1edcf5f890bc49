"""Searches that are too long to be called step by step: for caps, and for partitions."""

from __future__ import annotations


def bucketings(sizes: list[int]) -> list[tuple[int, int, list[list[int]]]]:
    """Returns all that ``walk_bucketings`` yields, read when all have been."""
    from common.exercises.cap_search import walk_bucketings

    walked = list(walk_bucketings(sizes))
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


class Solved:
    """A cost that knows the largest batch within a time, and whose value nobody needs then."""

    def __init__(self, most: dict[int, int]) -> None:
        self.by_length = most

    def __call__(self, batch, longest):
        """Refuses: there is no need to search."""
        raise AssertionError("a cost with `most` of its own is searched for")

    def most(self, longest, time):
        """Returns the largest batch for each longest text."""
        import numpy as np

        return np.array([self.by_length[int(length)] for length in longest])


def most_by_its_own(most: dict[int, int], limit: int):
    """Returns ``most_samples`` of a cost that has ``most``."""
    import numpy as np

    from common.exercises.min_max_partition import most_samples

    return most_samples(Solved(most), np.array(list(most)), 1.0, limit)
