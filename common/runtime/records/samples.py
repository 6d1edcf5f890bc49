"""Counts which samples reached which rank, from their identities."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def sample_rows(
    everyone: Sequence[NDArray[np.int64]], *, arm: int, epoch: int, data_samples: int | None
) -> list[dict]:
    """Returns the rows of ``samples.csv`` (SAMPLE_COLUMNS) of an epoch, one per rank.

    Args:
        everyone: identities of each rank's samples in their order, by rank.
        arm, epoch: keys of the rows.
        data_samples: size of the data set, None where it is endless.
    """
    # Each rank's identities are made unique first, so that in the ranks' joint list the count
    # of an identity is the number of ranks that had it: above 1 it is shared.
    distinct = [np.unique(ids) for ids in everyone]
    values, ranks = np.unique(np.concatenate(distinct), return_counts=True)
    several = values[ranks > 1]
    return [
        {
            "arm": arm,
            "epoch": epoch,
            "rank": rank,
            "processed": len(ids),
            "distinct": len(distinct[rank]),
            "shared": int(np.isin(distinct[rank], several, assume_unique=True).sum()),
            "distinct_all_ranks": len(values),
            "data_samples": data_samples,
            "order": f"{zlib.crc32(ids.tobytes()):08x}",
        }
        for rank, ids in enumerate(everyone)
    ]
