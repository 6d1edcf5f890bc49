"""Sweeps over bucket caps, made up for tests from their times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd

from common.analysis.buckets.sweep import BucketSweep
from common.judged import NOT_WITNESSED

MIB = 2**20


def bucket_sweep(
    times_ms: Mapping[float | None, Sequence[float]],
    buckets: Mapping[float | None, int],
    *,
    iterations: int = 1,
    machine: str = NOT_WITNESSED,
) -> BucketSweep:
    """Makes a sweep of two ranks whose gradients have 8 MiB.

    Args:
        times_ms: by cap (None: DDP's default), a time for each round.
        buckets: by cap, the number of its buckets, all of one size.
        iterations: steps of a round, which all take as long.
        machine: state of the machine meanwhile.
    """
    rows = [
        {
            "bucket_cap_mib": np.nan if cap is None else cap,
            "round": round_,
            "iteration": iteration,
            "num_buckets": buckets[cap],
            "first_bucket_bytes": 8 * MIB // buckets[cap],
            "last_bucket_bytes": 8 * MIB // buckets[cap],
            "backward_time_ms": time_ms,
        }
        for cap, rounds in times_ms.items()
        for round_, time_ms in enumerate(rounds)
        for iteration in range(iterations)
    ]
    return BucketSweep(pd.DataFrame(rows), 2, machine)
