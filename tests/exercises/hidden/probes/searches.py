"""What the search for caps yields, as a list."""

from __future__ import annotations


def bucketings(sizes: list[int]) -> list[tuple[int, int, list[list[int]]]]:
    """Returns all that ``walk_bucketings`` yields."""
    from common.exercises.cap_search import walk_bucketings

    walked = walk_bucketings(sizes)
    return [(low, high, [list(bucket) for bucket in buckets]) for low, high, buckets in walked]
