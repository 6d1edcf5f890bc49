"""One case of the accuracy study, a model on a network: what predicts it and what was measured.

It is predicted from its own calibration, the one that ``ddplab predict`` and ``tune`` make: none of
it is a bucketing. Beside that model stands the same with a longer calibration, and predictors with
less in them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from common.analysis.buckets.sweep import BucketSweep
from common.perfmodel.buckets import cap_label
from common.perfmodel.calibration import calibrated_model
from common.perfmodel.collectives import MeasuredAllReduce
from common.perfmodel.ddp.profile import BackwardProfile, DdpCosts, SecondsBySize
from common.perfmodel.model import DdpModel
from common.perfmodel.samples import AllReduceSamples, OverlapSamples

MODES = ("sequential", "in_flight")


@dataclass(frozen=True, eq=False)
class JudgedCase:
    """One case: what predicts it, and what it is held against.

    Attributes:
        facts: row of cases.csv.
        profile: gradients, without DDP.
        curve: all-reduces one after another.
        crowded: all-reduces while several run, the time of each.
        costs: DDP's copies and contention, of this case alone.
        longer: costs from all cases that can tell: copies by the byte from all on as many hosts,
            what a message takes from computation from all networks of the model.
        local_s, around_s: backward pass without DDP; DDP's forward pass, which broadcasts buffers,
            and the update.
        witness_s: the backward pass without DDP while bucketings were judged; in studies whose
            calibration went on meanwhile it is ``local_s``.
        judged: steps of DDP.
        predictions: rows of predictions.csv, written before anything was judged; None in older
            studies, whose predictions are made when they are read.
    """

    facts: pd.Series
    profile: BackwardProfile
    curve: MeasuredAllReduce
    crowded: MeasuredAllReduce
    costs: DdpCosts
    longer: DdpCosts
    local_s: float
    around_s: float
    witness_s: float
    judged: BucketSweep
    predictions: pd.DataFrame | None = None

    @property
    def name(self) -> str:
        return str(self.facts["case"])

    @property
    def model(self) -> DdpModel:
        """Predicts the case."""
        return calibrated_model(
            self.profile,
            self.curve,
            self.costs,
            crowded=self.crowded,
            backend=self.facts.get("backend", "gloo"),
            added_latency_s=float(self.facts["added_latency_ms"]) / 1e3,
        )

    @property
    def model_of_witness(self) -> DdpModel:
        """Predicts the case on the machine as fast as it was while bucketings were judged."""
        profile = self.profile.scaled(compute=self.witness_s / self.local_s)
        return replace(self.model, profile=profile)

    def predicted_s(self) -> dict[float | None, float]:
        """Predicts the seconds of each judged bucketing; None is DDP's default."""
        if self.predictions is None:
            caps = caps_of(self.judged)
            return {cap: self.model.backward_s(cap) for cap in caps}
        rows = self.predictions[["bucket_cap_mib", "predicted_ms"]].itertuples(index=False)
        return {None if pd.isna(cap) else cap: ms / 1e3 for cap, ms in rows}


def caps_of(sweep: BucketSweep) -> list[float | None]:
    """Lists the caps of a sweep, ascending; None is DDP's default, and last."""
    caps = sweep.summary()["bucket_cap_mib"]
    return [None if pd.isna(cap) else float(cap) for cap in caps]


def lost_to_messages(networks: Sequence[pd.DataFrame]) -> SecondsBySize | None:
    """Computes the computation lost to a message of each size, from one job's rows of overlap.csv.

    That is processor time, in which the rate of a link has no part: the median over the job's
    networks. None where nothing was run beside all-reduces.
    """
    by_network = [case_costs(rows).lost_compute for rows in networks]
    if not by_network or None in by_network:
        return None
    sizes = by_network[0][0]
    return sizes, tuple(np.median([seconds for _, seconds in by_network], axis=0).tolist())


def case_costs(overlap: pd.DataFrame, backend: str | None = None) -> DdpCosts:
    """Computes DDP's copies and contention from the rows of overlap.csv of one case."""
    return OverlapSamples.of(overlap.assign(rank=0), backend).costs()


def case_of(
    facts: pd.Series, tables: dict[str, pd.DataFrame], lost: SecondsBySize | None, copies_s: float
) -> JudgedCase:
    """Makes a case from its rows in the study's tables, by the tables' names.

    Of steps without DDP there may be more, from the same ranks in the same minutes.

    Args:
        lost: Computation lost to messages, from all networks of the job.
        copies_s: DDP's copies of all gradients, from all cases.
    """
    steps, all_reduces = tables["steps.csv"], tables["all-reduces.csv"]
    by_role = dict(list(steps.groupby("role")))
    local, forward = by_role["local"], by_role["forward"]
    predictions = tables.get("predictions.csv")
    if predictions is not None:  # its caps have more digits than those of the steps
        caps = [
            cap if pd.isna(cap) else float(cap_label(cap)) for cap in predictions["bucket_cap_mib"]
        ]
        predictions = predictions.assign(bucket_cap_mib=caps)
    local_s = _median_s(local, "backward_time_ms")
    update_ms = local["step_time_ms"] - local["forward_time_ms"] - local["backward_time_ms"]
    around_s = _median_s(forward, "forward_time_ms") + float(update_ms.median()) / 1e3
    ranks = int(facts["hosts"])
    curve, crowded = (
        AllReduceSamples.of(all_reduces[all_reduces["mode"] == mode].assign(rank=ranks - 1)).curve()
        for mode in MODES
    )
    profile = _profile(tables["gradients.csv"])
    if predictions is None:  # calibrated while it was judged: as fast as steps were all along
        profile = profile.scaled(compute=local_s / profile.backward_s)
    judged = BucketSweep(by_role["judged"], ranks)
    judged.check_buckets(profile)
    costs = case_costs(tables["overlap.csv"], facts.get("backend"))
    per_byte = copies_s / 2 / profile.total_bytes
    return JudgedCase(
        facts=facts,
        profile=profile,
        curve=curve,
        crowded=crowded,
        costs=costs,
        longer=DdpCosts(
            copy_in_s_per_byte=per_byte,
            copy_out_s_per_byte=per_byte,
            lost_compute=lost,
            delays=costs.delays,  # which are the network's
        ),
        local_s=local_s,
        around_s=around_s,
        witness_s=_median_s(by_role.get("witness", local), "backward_time_ms"),
        judged=judged,
        predictions=predictions,
    )


def _median_s(steps: pd.DataFrame, column: str) -> float:
    return float(steps[column].median()) / 1e3


def _profile(gradients: pd.DataFrame) -> BackwardProfile:
    ordered = gradients.sort_values("ready_index")
    ready_s = ordered["ready_time_ms"].to_numpy() / 1e3
    return BackwardProfile(
        names=tuple(f"gradient {index}" for index in ordered["ready_index"]),
        sizes_bytes=ordered["size_bytes"].to_numpy(np.int64),
        ready_s=ready_s,
        backward_s=float(ready_s[-1]),
        kinds=tuple(ordered["dtype"]),
        registration=tuple(ordered["registration_index"]),
    )
