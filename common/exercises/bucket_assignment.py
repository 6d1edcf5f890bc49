"""A2.1: the buckets into which DistributedDataParallel groups gradients.

Source: ``compute_bucket_assignment_by_size`` in PyTorch's torch/csrc/distributed/c10d/reducer.cpp.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from common.errors import UserError


def assign_buckets(
    sizes_bytes: Sequence[int],
    cap_bytes: int | Sequence[int],
    first_cap_bytes: int | None = None,
    kinds: Sequence[Hashable] | None = None,
) -> list[list[int]]:
    """Groups tensors into buckets, as DDP does when it rebuilds them.

    A tensor joins the open bucket of its kind, which closes once it holds at least the cap. No
    tensor is split, so a bucket may be larger than the cap. No tensors make no buckets.

    Args:
        sizes_bytes: sizes in gradient-ready order, in bytes.
        cap_bytes: when a bucket closes; at least 1. Several caps are those of the first, the
            second, … bucket of each kind; the last one counts for all that follow.
        first_cap_bytes: the cap of the first bucket of each kind, where it differs.
        kinds: (dtype, device) of each tensor; only equal kinds share a bucket.

    Returns:
        For each bucket, in reduction order, the indices of its tensors. Buckets left open at the
        end come last; of several, the kind seen last comes first (the order in which libstdc++
        walks the hash map that PyTorch keeps them in).
    """
    caps = (cap_bytes,) if not isinstance(cap_bytes, Sequence) else tuple(cap_bytes)
    if first_cap_bytes is not None:
        caps = (first_cap_bytes, *caps)
    if not caps:
        raise UserError("no bucket cap: give at least one")
    if min(caps) < 1:
        raise UserError(f"bucket cap of {min(caps)} bytes: it must be at least 1 byte")
    # BEGIN SOLUTION A2.1
    if kinds is None:
        return _assign_one_kind(sizes_bytes, caps)
    buckets: list[list[int]] = []
    open_buckets: dict[Hashable, tuple[list[int], int, int]] = {}  # members, bytes, buckets closed
    for index, (size, kind) in enumerate(zip(sizes_bytes, kinds, strict=True)):
        members, total, closed = open_buckets.get(kind, ([], 0, 0))
        members.append(index)
        total += size
        if total >= caps[min(closed, len(caps) - 1)]:
            buckets.append(members)
            members, total, closed = [], 0, closed + 1
        open_buckets[kind] = (members, total, closed)
    left_open = [members for members, _, _ in open_buckets.values() if members]
    return buckets + left_open[::-1]
    # END SOLUTION


# BEGIN SOLUTION A2.1
def _assign_one_kind(sizes_bytes: Sequence[int], caps: Sequence[int]) -> list[list[int]]:
    buckets: list[list[int]] = []
    members: list[int] = []
    total = 0
    last = len(caps) - 1
    limit = caps[0]
    for index, size in enumerate(sizes_bytes):
        members.append(index)
        total += size
        if total >= limit:
            buckets.append(members)
            members, total, limit = [], 0, caps[min(len(buckets), last)]
    if members:
        buckets.append(members)
    return buckets


# END SOLUTION
