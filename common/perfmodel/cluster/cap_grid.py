"""Many bucket caps under many circumstances: networks, speeds and slowdowns.

The search of ``DdpModel.best_cap``, for hundreds of systems at once: caps that give the same
buckets are one case, all-reduce times are looked up once for every size that occurs, and each
bucketing is simulated for all circumstances together. The tests hold the two against each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from common.errors import UserError
from common.perfmodel.buckets import MIB, DdpOptions
from common.perfmodel.collectives import AllReduceModel
from common.perfmodel.ddp.best_cap import NEAR, ROUNDING, near_runs, nearest_cap
from common.perfmodel.ddp.bucketings import distinct_bucketings, profile_buckets
from common.perfmodel.ddp.profile import BackwardProfile
from common.perfmodel.ddp.recurrence import Overlap, many_cases


@dataclass(frozen=True)
class CapRow:
    """One bucketing, which every given cap from ``low_mib`` to ``high_mib`` leads to.

    ``cap_mib`` is the given cap nearest to their geometric mean; None is DDP's default. ``last``
    holds the place of each bucket's last gradient in the profile, ``sizes_bytes`` their sizes.
    """

    cap_mib: float | None
    low_mib: float
    high_mib: float
    last: NDArray
    sizes_bytes: NDArray


@dataclass(frozen=True)
class Circumstances:
    """The differences between simulated backward passes; arrays over cases.

    Attributes:
        compute_scale: computation takes this many times the profile's.
        network: index into the networks.
        network_scale: an all-reduce takes this many times the network's time.
        compute_slowdown: computation beside an all-reduce takes this many times longer.
    """

    compute_scale: NDArray
    network: NDArray
    network_scale: NDArray
    compute_slowdown: NDArray


def cap_rows(profile: BackwardProfile, caps_mib: Sequence[float]) -> tuple[CapRow, ...]:
    """Returns the bucketings that these caps lead to, from small caps to large ones.

    Raises UserError for no caps, and for gradients of several dtypes.
    """
    caps = np.array(sorted(set(map(float, caps_mib))))
    rows = []
    for bucketing in distinct_bucketings(profile, caps.tolist()):
        equal_caps = caps[(caps >= bucketing.low_mib) & (caps <= bucketing.high_mib)]
        cap = nearest_cap(equal_caps, np.sqrt(bucketing.low_mib * bucketing.high_mib))
        rows.append(_row(profile, bucketing.buckets, cap, bucketing.low_mib, bucketing.high_mib))
    return tuple(rows)


def default_row(profile: BackwardProfile) -> CapRow:
    """Returns the buckets of DDP's default caps: 1 MiB, then 25 MiB."""
    return _row(profile, profile_buckets(profile, DdpOptions(None)), None, np.nan, np.nan)


def single_row(profile: BackwardProfile) -> CapRow:
    """Returns the one bucket of all gradients, which needs none of a student's tasks."""
    total_mib = profile.total_bytes / MIB
    return _row(profile, [range(len(profile.sizes_bytes))], total_mib, total_mib, total_mib)


def simulate_grid(
    profile: BackwardProfile,
    networks: Sequence[AllReduceModel],
    rows: Sequence[CapRow],
    cases: Circumstances,
    copy_s_per_byte: float = 0.0,
) -> Overlap:
    """Simulates the backward pass of every bucketing (rows) in every case (columns).

    ``copy_s_per_byte`` is what copying a gradient takes, into its bucket and back. Copies in are
    part of the work, copies back are exposed.
    """
    # Each network is asked once, for all bucket sizes of all rows: times is [networks, sizes]. A
    # row then picks its buckets' sizes, and a case its network: alone is [buckets, cases].
    sizes = np.unique(np.concatenate([row.sizes_bytes for row in rows]))
    times = np.array([np.atleast_1d(network.time_s(sizes.astype(float))) for network in networks])
    copied = copy_s_per_byte * np.cumsum(profile.sizes_bytes)
    scale = np.asarray(cases.compute_scale, dtype=float)
    work = profile.backward_s * scale + copied[-1]
    overlaps = []
    for row in rows:
        at = np.searchsorted(sizes, row.sizes_bytes)
        ready = np.multiply.outer(profile.ready_s[row.last], scale) + copied[row.last, None]
        overlaps.append(
            many_cases(
                work_s=work,
                ready_s=ready,
                alone_s=times[:, at].T[:, cases.network] * cases.network_scale,
                tail_s=copy_s_per_byte * np.cumsum(row.sizes_bytes[::-1])[::-1],
                compute_slowdown=cases.compute_slowdown,
            )
        )
    return Overlap(
        total_s=np.array([overlap.total_s for overlap in overlaps]),
        slowed_s=np.array([overlap.slowed_s for overlap in overlaps]),
        exposed_s=np.array([overlap.exposed_s for overlap in overlaps]),
    )


def best_rows(total_s: NDArray) -> NDArray:
    """Returns the fastest row (of rows × cases) in each case; larger caps win ties."""
    # Rows ascend by cap. ``argmax`` finds the first True, so rows are reversed to find the last.
    is_fastest = total_s <= total_s.min(axis=0) * (1 + ROUNDING)
    return len(total_s) - 1 - np.argmax(is_fastest[::-1], axis=0)


def near_interval(rows: Sequence[CapRow], total_s: NDArray, best: int) -> tuple[float, float]:
    """Returns the interval of caps (MiB) around ``best`` that stays within 1 % of it."""
    runs = near_runs(total_s, total_s[best] * NEAR)
    return next((rows[i].low_mib, rows[j].high_mib) for i, j in runs if i <= best <= j)


def _row(
    profile: BackwardProfile,
    buckets: Sequence[Sequence[int]],
    cap_mib: float | None,
    low_mib: float,
    high_mib: float,
) -> CapRow:
    if len(set(profile.kinds)) > 1:
        raise UserError("gradients of several dtypes: their buckets are not searched together")
    ends = np.array([bucket[-1] for bucket in buckets])
    sizes = np.diff(np.cumsum(profile.sizes_bytes)[ends], prepend=0)
    return CapRow(cap_mib, low_mib, high_mib, ends, sizes)
