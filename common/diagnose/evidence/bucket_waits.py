"""Backward passes that wait for each bucket: none is on its way while gradients are computed.

DDP asks each all-reduce for its future as soon as it is launched. Some process groups make the
backward pass wait there until the all-reduce is over, as torch's ProcessGroupNCCL2 does
(``WorkNCCL::getFuture`` in torch 2.15). A bucket is then ready only after the one before is back,
and what was waited for it counts as computation: gradients are ready late.

A quick exchange looks alike, as it is back before the next bucket is full. What tells the two apart
is the time until the last gradient: passes that wait take longer than by themselves.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from common.analysis.step_parts import TIMED, flags

WAITING = "ProcessGroupNCCL2"
"""A class whose ``get_future`` makes the current stream wait: torch 2.15's for "nccl"."""
NOT_WAITING = ("ProcessGroupGloo", "ProcessGroupNCCL")
"""Classes whose ``get_future`` returns at once. Passes may be longer beside their all-reduces, too,
but because they share cores or a GPU."""
IN_TURN = 0.9
"""Least share of the buckets that are ready after the one before is back; hiccups shift marks."""
LONGER = 0.65
"""A pass that waits is longer by all of the exchanges before its last; one that does not by what
they take from it: 0.52 times that on an H200 of which they held 24 multiprocessors. Passes that
waited were longer by 0.8 times (two cores) and 1.24 times that (H200)."""
VISIT = ["round", "step", "rank"]


@dataclass(frozen=True, eq=False)
class BucketWaits:
    """Times that backward passes wait for buckets other than the last.

    Attributes:
        by_step: ``waited_ms``, and ``shared_ms`` of it that no rank was late for, by VISIT.
        buckets: number of buckets of a pass.
        in_turn: share of the buckets that were ready after the one before was back.
        longer: time that passes take longer than by themselves, over what they wait; NaN where that
            was not measured.
        group: class of the process group; empty where it is not known.
    """

    by_step: pd.DataFrame
    buckets: int
    in_turn: float
    longer: float
    group: str

    @property
    def is_known(self) -> bool:
        """Returns True where the class of the process group is known to wait."""
        return self.group == WAITING

    @property
    def waited_ms(self) -> float:
        """Returns the ms of a step: the median over steps of the mean rank's."""
        return float(self.by_step["waited_ms"].groupby(VISIT[:2]).mean().median())

    def counted_as_exchange(self, steps: pd.DataFrame) -> pd.DataFrame:
        """Returns ``steps.csv`` with the waits taken off the backward pass.

        They are communication as far as no rank was late for the bucket, and waiting beyond. Steps
        without marks have the median of their rank.
        """
        steps = steps.copy()
        timed = steps["kind"] == TIMED
        places = pd.MultiIndex.from_frame(steps.loc[timed, VISIT].fillna({"round": 0}))
        waits = self.by_step.reindex(places).set_axis(steps.index[timed])
        usual = self.by_step.groupby("rank").median()
        waits = waits.fillna(usual.reindex(steps.loc[timed, "rank"]).set_axis(waits.index))
        waited = waits["waited_ms"].clip(upper=steps.loc[timed, "backward_time_ms"])
        shared = waits["shared_ms"].clip(upper=waited)
        steps.loc[timed, "backward_time_ms"] -= waited
        steps.loc[timed, "communication_time_ms"] += shared
        steps.loc[timed, "waiting_time_ms"] += waited - shared
        return steps


def bucket_waits(
    steps: pd.DataFrame,
    buckets: pd.DataFrame | None,
    probes: pd.DataFrame | None,
    group: str,
    batch: int,
) -> BucketWaits | None:
    """Finds passes that wait for each bucket; None where they do not, or it is not known.

    Args:
        steps, buckets, probes: the tables of an arm.
        group: class of the process group; empty where it is not known.
        batch: samples of a micro-batch.
    """
    if group in NOT_WAITING or buckets is None or buckets.empty:
        return None
    rows = buckets.fillna({"round": 0}).sort_values([*VISIT, "bucket"])
    passes = rows.groupby(VISIT)
    rows = rows.assign(
        took_ms=rows["done_time_ms"] - rows["ready_time_ms"],
        follows=rows["ready_time_ms"] >= passes["done_time_ms"].shift(),
        later=passes.cumcount(),
        sent_bytes=passes["size_bytes"].transform("sum"),
    )
    later_buckets = rows[rows["later"] > 0]
    if later_buckets.empty or later_buckets["follows"].mean() < IN_TURN:
        return None
    before = rows[passes.cumcount(ascending=False) > 0]
    least_ms = before.groupby(["round", "step", "bucket"])["took_ms"].transform("min")
    by_step = (
        before.assign(waited_ms=before["took_ms"], shared_ms=least_ms)
        .groupby(VISIT)
        .agg({"waited_ms": "sum", "shared_ms": "sum", "sent_bytes": "first"})
    )
    timed = steps[(steps["kind"] == TIMED) & ~flags(steps["warmup"])]
    exchanges = (timed["exchanged_bytes"].median() / by_step["sent_bytes"].median()).round()
    by_step = by_step[["waited_ms", "shared_ms"]] * max(1.0, exchanges)
    waits = BucketWaits(
        by_step=by_step,
        buckets=int(rows["later"].max()) + 1,
        in_turn=float(later_buckets["follows"].mean()),
        longer=_longer_ms(timed, probes, batch) / by_step["waited_ms"].mean(),
        group=group,
    )
    if np.isnan(waits.longer):
        return waits if waits.is_known else None
    return waits if waits.longer > LONGER else None


def _longer_ms(timed: pd.DataFrame, probes: pd.DataFrame | None, batch: int) -> float:
    """Returns what a step's backward passes take longer than by themselves; NaN if unknown.

    The machine's drift since the probes is seen in forward passes, beside which nothing runs.
    """
    if probes is None or probes.empty:
        return float("nan")
    passes = probes[flags(probes["together"]) & (probes["batch_per_rank"] == batch)]
    columns = ["forward_time_ms", "backward_time_ms"]
    alone = passes.groupby("rank")[columns].median()
    in_step = timed.groupby("rank")[[*columns, "micro_batches"]].median()
    passes_ms = in_step[columns].div(in_step["micro_batches"], axis=0)
    drift = (passes_ms["forward_time_ms"] / alone["forward_time_ms"]).min()
    longer_ms = passes_ms["backward_time_ms"] - drift * alone["backward_time_ms"]
    return float((longer_ms * in_step["micro_batches"]).mean())
