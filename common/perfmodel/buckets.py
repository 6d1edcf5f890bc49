"""The buckets into which DistributedDataParallel groups gradients.

Sources: ``compute_bucket_assignment_by_size`` and ``Reducer::rebuild_buckets`` in PyTorch's
torch/csrc/distributed/c10d/reducer.cpp; ``_ddp_init_helper`` and, for limits given one by one
(``bucket_cap_mb_list``), ``_BucketCapacityConfig`` in torch/nn/parallel/distributed.py.
"MB" in ``bucket_cap_mb`` is MiB there, and so it is here.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from common.errors import UserError
from common.exercises.bucket_assignment import assign_buckets

MIB = 2**20
DEFAULT_FIRST_CAP_BYTES = 1 * MIB
DEFAULT_CAP_BYTES = 25 * MIB


def parse_cap(text: str | float) -> float | None:
    """Parses a cap in MiB as a user gives it; ``None`` or ``default`` is DDP's own default.

    Raises UserError for anything that is not a finite number above zero.
    """
    if str(text).lower() in ("none", "default"):
        return None
    try:
        cap = float(text)
    except (TypeError, ValueError):
        raise UserError(f"bucket cap {text!r} is not a number of MiB (or None)") from None
    if not math.isfinite(cap) or cap * MIB < 1:
        raise UserError(f"bucket cap {text} MiB: it must be above 0 and finite")
    return cap


def cap_label(cap_mib: float | None) -> str:
    """Formats a cap as tables show it: ``0.25``, ``25``, ``None``."""
    return "None" if cap_mib is None else f"{cap_mib:.12g}"


@dataclass(frozen=True)
class DdpOptions:
    """The arguments of DDP that decide its buckets.

    Attributes:
        bucket_cap_mib: ``bucket_cap_mb``; None is DDP's default.
        static_graph, find_unused_parameters: as for DDP.
        bucket_cap_mib_list: ``bucket_cap_mb_list``, the caps of the first, the second, … bucket;
            the last one counts for all that follow. Where it is given, ``bucket_cap_mib`` means
            nothing. Older releases of PyTorch do not have it.

    Raises UserError for a cap that is not a finite number of at least one byte.
    """

    bucket_cap_mib: float | None = None
    static_graph: bool = False
    find_unused_parameters: bool = False
    bucket_cap_mib_list: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        for cap in (self.bucket_cap_mib, *self.bucket_cap_mib_list):
            if cap is not None:
                parse_cap(cap)
        if None in self.bucket_cap_mib_list:
            raise UserError("a list of bucket caps holds numbers of MiB; None has no place in it")

    def limits_bytes(self) -> tuple[int, ...]:
        """Returns the caps of the first, the second, … bucket; the last counts for all others."""
        if self.bucket_cap_mib is None and not self.bucket_cap_mib_list:
            return DEFAULT_FIRST_CAP_BYTES, DEFAULT_CAP_BYTES
        return tuple(int(cap * MIB) for cap in self.bucket_cap_mib_list or (self.bucket_cap_mib,))

    def rebuild_iteration(self) -> int | None:
        """Returns the first iteration with buckets in gradient-ready order; None if none has."""
        if self.static_graph:
            return 2
        return None if self.find_unused_parameters else 1


def ddp_buckets(
    sizes_bytes: Sequence[int],
    ready_order: Sequence[int],
    options: DdpOptions,
    iteration: int | None = None,
    kinds: Sequence[Hashable] | None = None,
) -> list[list[int]]:
    """Returns DDP's buckets in reduction order, each its parameters' registration indices.

    Args:
        sizes_bytes: sizes in registration order (that of ``module.parameters()``), in bytes.
        ready_order: the parameters' indices in the order their gradients become ready on rank 0;
            unused ones, which never do, may be left out.
        iteration: counted from 0; None is the steady state.
        kinds: (dtype, device) of each parameter, in registration order.
    """
    limits = options.limits_bytes()
    rebuilt_at = options.rebuild_iteration()
    if rebuilt_at is None or (iteration is not None and iteration < rebuilt_at):
        if rebuilt_at is not None and not options.bucket_cap_mib_list:
            limits = (sum(sizes_bytes) + 1,)  # one bucket (of each kind) until the rebuild
        # Filled in registration order, then reversed: the last-registered parameters go first.
        buckets = assign_buckets(sizes_bytes, limits, kinds=kinds)
        return sorted(buckets, key=min)[::-1]
    # A rebuild adds parameters whose gradients never came, in registration order.
    ready_order = [*ready_order, *sorted(set(range(len(sizes_bytes))) - set(ready_order))]
    ordered_kinds = None if kinds is None else [kinds[index] for index in ready_order]
    ordered_sizes = [sizes_bytes[i] for i in ready_order]
    buckets = assign_buckets(ordered_sizes, limits, kinds=ordered_kinds)
    return [[ready_order[i] for i in bucket] for bucket in buckets]


def short_cap(low_bytes: int, high_bytes: int) -> float:
    """Returns the cap in MiB with the fewest digits that lies within two bounds in bytes.

    It is their geometric mean, rounded as far as DDP's cap, in whole bytes, stays between them.
    """
    middle = (low_bytes * high_bytes) ** 0.5 / MIB
    for digits in range(1, 18):
        cap = float(f"{middle:.{digits}g}")
        if low_bytes <= int(cap * MIB) <= high_bytes:
            return cap
    return (low_bytes + 0.5) / MIB
