"""A2.2: the time T(b) of a backward pass whose gradients are reduced bucket by bucket.

Buckets are ready at r₁, r₂, …, are reduced one after another in order, and take a₁, a₂, …::

    end_i = max(end_{i−1}, max(r₁, …, r_i)) + a_i

The pass ends when both the computation and the last all-reduce have.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence


def backward_time_s(
    sizes_bytes: Sequence[int],
    ready_s: Sequence[float],
    buckets: Sequence[Sequence[int]],
    all_reduce_s: Callable[[float], float],
) -> float:
    """Computes T, in seconds from the start of the backward pass; changes no argument.

    Args:
        sizes_bytes: of each gradient.
        ready_s: when each gradient is final, in seconds, in no order; the latest of them ends the
            computation.
        buckets: in the order of their all-reduces, each the indices of its gradients; at least one.
            A gradient that is in none is computed, and not sent.
        all_reduce_s: seconds of an all-reduce of so many bytes.
    """
    # BEGIN SOLUTION A2.2
    bucket_ready_s = [max(ready_s[index] for index in bucket) for bucket in buckets]
    bucket_bytes = [sum(sizes_bytes[index] for index in bucket) for bucket in buckets]
    ends_s = one_after_another(bucket_ready_s, [all_reduce_s(size) for size in bucket_bytes])
    return max(max(ready_s), *ends_s)
    # END SOLUTION


def one_after_another(ready_s: Sequence[float], alone_s: Sequence[float]) -> list[float]:
    """Returns when each all-reduce ends: the recurrence above.

    >>> one_after_another([1.0, 2.0, 9.0], [3.0, 3.0, 3.0])
    [4.0, 7.0, 12.0]
    """
    # BEGIN SOLUTION A2.2
    end = ready = 0.0
    ends = []
    for moment, duration in zip(ready_s, alone_s, strict=True):
        ready = max(ready, moment)
        end = max(end, ready) + duration
        ends.append(end)
    return ends
    # END SOLUTION
