"""A2.3: the search for the best bucket cap b*.

T(b) is a step function of the cap: many caps give the same buckets. So each distinct bucketing is
tried once, and no cap between two of them is missed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from common.exercises.bucket_assignment import assign_buckets
from common.exercises.bucket_time import backward_time_s


def fastest_cap(
    sizes_bytes: Sequence[int],
    ready_s: Sequence[float],
    all_reduce_s: Callable[[float], float],
) -> tuple[int, float]:
    """Finds the cap in bytes with the smallest T (A2.2), and that T in seconds.

    T is computed once for each distinct bucketing. Of several that are as fast, the one of the
    largest caps is taken, and of its caps the largest, at most the size of all gradients.

    Args:
        sizes_bytes, ready_s: of each gradient, in the order in which they become ready.
        all_reduce_s: seconds of an all-reduce of so many bytes.
    """
    # BEGIN SOLUTION A2.3
    best = None
    for _, high, buckets in walk_bucketings(sizes_bytes):
        time_s = backward_time_s(sizes_bytes, ready_s, buckets, all_reduce_s)
        if best is None or time_s <= best[1]:
            best = high, time_s
    return best
    # END SOLUTION


def walk_bucketings(sizes_bytes: Sequence[int]) -> Iterator[tuple[int, int, list[list[int]]]]:
    """Yields every distinct bucketing of gradients of one kind in ready order, by ascending cap.

    Each is the smallest and the largest cap in bytes that give it, the largest at most the size of
    all gradients, and its buckets, in lists that do not change afterwards. It takes as many steps
    as there are bucketings, however many bytes the gradients have.
    """
    # BEGIN SOLUTION A2.3
    total, cap = sum(sizes_bytes), 1
    while cap <= total:
        buckets = assign_buckets(sizes_bytes, cap)
        low, high = cap_interval(sizes_bytes, buckets)
        high = min(high, total)
        yield low, high, buckets
        cap = high + 1
    # END SOLUTION


def cap_interval(sizes_bytes: Sequence[int], buckets: Sequence[Sequence[int]]) -> tuple[int, int]:
    """Returns the smallest and the largest cap in bytes that give exactly these buckets.

    For buckets of one kind and without a first cap of its own. A closed bucket bounds the cap
    from above by its size and from below by its size without its last tensor. The last bucket
    counts as closed if it is larger than all that the others allow.
    """
    # BEGIN SOLUTION A2.3
    smallest, largest = 1, 2**62
    for bucket in buckets[:-1]:
        size = sum(sizes_bytes[i] for i in bucket)
        largest = min(largest, size)
        smallest = max(smallest, size - sizes_bytes[bucket[-1]] + 1)
    last = sum(sizes_bytes[i] for i in buckets[-1]) - sizes_bytes[buckets[-1][-1]]
    return max(smallest, last + 1), largest
    # END SOLUTION
