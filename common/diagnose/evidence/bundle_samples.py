"""Samples that reached the ranks of a watched script, and whether each rank has its own data."""

from __future__ import annotations

import zlib

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from common.diagnose.evidence.bundle import Bundle
from common.runtime.records.samples import sample_rows


def samples_of(bundle: Bundle) -> pd.DataFrame:
    """Makes ``samples.csv``: of each epoch, which samples reached which rank.

    Where ranks have data of their own, as from a list for each, no sample is another rank's.
    """
    identities, facts = bundle.of("identities"), bundle.of("facts")
    sizes = pd.to_numeric(facts["data_samples"], errors="coerce") if len(facts) else pd.Series([])
    if identities.empty:
        return pd.DataFrame()
    ranks, are_apart = bundle.about["rank"].nunique(), have_own_data(identities)
    size = None
    if sizes.notna().any():
        size = int(sizes.sum() if are_apart else sizes.max())
    by_epoch: dict[int, list[NDArray]] = {}
    for epoch, group in identities.groupby("epoch"):
        if group["rank"].nunique() == ranks:
            by_rank = {int(row["rank"]): np.array(row["samples"]) for _, row in group.iterrows()}
            by_epoch[int(epoch)] = [
                by_rank[rank] * ranks + number if are_apart else by_rank[rank]
                for number, rank in enumerate(sorted(by_rank))
            ]
    noted = {  # an earlier watch noted neither
        name: name in identities and bool(identities[name].eq(True).any())
        for name in ("is_hashed", "by_weight")
    }
    if size is None and noted["is_hashed"]:
        by_epoch = {epoch: first_passes(everyone) for epoch, everyone in by_epoch.items()}
    orders = _orders(by_epoch)
    rows = [
        row | {"order": orders.get((epoch, row["rank"]))}
        for epoch, everyone in by_epoch.items()
        for row in sample_rows(everyone, arm=0, epoch=epoch, data_samples=size)
    ]
    return pd.DataFrame(rows).assign(**noted)


def first_passes(everyone: list[NDArray]) -> list[NDArray]:
    """Cuts each rank's samples of a stream where one of the ranks first meets a sample again.

    A stream may go through its data several times and be one epoch for the loader. In a later pass
    a rank may well have what was another one's before.

    Args:
        everyone: identities of each rank's samples in their order.
    """
    ends = []
    for identities in everyone:
        _, first = np.unique(identities, return_index=True)
        again = np.setdiff1d(np.arange(len(identities)), first)
        ends.append(again[0] if len(again) else len(identities))
    return [identities[: min(ends)] for identities in everyone]


def have_own_data(identities: pd.DataFrame) -> bool:
    """Returns True if ranks have different samples under equal indices.

    A part of the samples, such as the label, tells if it stays the same where a rank meets a sample
    again; images that are changed at random do not. If some part of what ranks share agrees more
    often than half-way from chance to always, they share the samples.

    Args:
        identities: rows of ``identities``; an earlier watch noted no checksums, which tell nothing.
    """
    if "checksums" not in identities:
        return False
    rows = [
        (row["rank"], index, part, checksum)
        for _, row in identities.dropna(subset="checksums").iterrows()
        for index, *checksums in row["checksums"]
        for part, checksum in enumerate(checksums)
    ]
    seen = pd.DataFrame(rows, columns=["rank", "index", "part", "checksum"]).drop_duplicates()
    agree: list[bool] = []
    for _, of_part in seen.groupby("part"):
        shared = of_part.groupby("index")["checksum"].agg(["size", "nunique"])
        shared = shared[shared["size"] > 1]
        by_chance = float((of_part["checksum"].value_counts(normalize=True) ** 2).sum())
        if len(shared) and by_chance < 1 and not of_part.duplicated(["rank", "index"]).any():
            agree.append((shared["nunique"] == 1).mean() > (1 + by_chance) / 2)
    return bool(agree) and not any(agree)


def _orders(by_epoch: dict[int, list[NDArray]]) -> dict[tuple[int, int], str]:
    """Returns a checksum of each rank's order in an epoch, by (epoch, rank).

    The window begins in the middle of its first epoch, and ends in that of its last. So the first
    has none, and the others' are of as many samples as each of them has. Samples in ascending order
    were not to be shuffled: they have none.
    """
    orders: dict[tuple[int, int], str] = {}
    for rank in range(max(map(len, by_epoch.values()), default=0)):
        begun = {epoch: by_epoch[epoch][rank] for epoch in sorted(by_epoch)[1:]}
        length = min(map(len, begun.values()), default=0)
        for epoch, ids in begun.items():
            if length > 1 and not (np.diff(ids[:length]) > 0).all():
                orders[epoch, rank] = f"{zlib.crc32(ids[:length].tobytes()):08x}"
    return orders
