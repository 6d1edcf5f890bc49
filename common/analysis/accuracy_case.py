"""One case of the accuracy study, a model on a network: what predicts it and what was measured.

It is predicted from its own calibration: the backward pass without DDP and the moments of its
gradients, all-reduces one after another and several at once, DDP's copies, and how all-reduces
without pause and the backward pass beside them slow each other. None of that is a bucketing. Beside
that model stand predictors with less in them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from common.analysis.sweep import BucketSweep
from common.perfmodel.calibration import calibrated_model
from common.perfmodel.collectives import MeasuredAllReduce
from common.perfmodel.model import DdpModel
from common.perfmodel.profile import NO_COSTS, BackwardProfile, DdpCosts
from common.perfmodel.samples import AllReduceSamples, OverlapSamples

MODES = ("sequential", "in_flight")


@dataclass(frozen=True, eq=False)
class Contention:
    """How all-reduces without pause and the computation beside them slow each other, by size.

    Attributes:
        sizes_bytes: of the messages.
        lost_s: the computation that an all-reduce of each size takes.
        slower: how many times longer the all-reduce takes.
    """

    sizes_bytes: NDArray
    lost_s: NDArray
    slower: NDArray


def contention_of(networks: Sequence[pd.DataFrame]) -> list[Contention]:
    """The contention on each network of one job, from its rows of overlap.csv.

    What a message takes from computation is processor time, in which the rate of a link has no
    part: it is the median over the job's networks. How much slower it becomes is its network's own.
    """
    found = [OverlapSamples.of(rows.assign(rank=0)).costs() for rows in networks]
    lost_s = np.median([costs.lost_compute[1] for costs in found], axis=0)
    return [
        Contention(np.asarray(costs.slowdowns[0]), lost_s, np.asarray(costs.slowdowns[1]))
        for costs in found
    ]


@dataclass(frozen=True, eq=False)
class JudgedCase:
    """One case: what predicts it, and what it is held against.

    Attributes:
        facts: its row of cases.csv.
        profile: gradients, at the speed of the rounds without DDP.
        curve: all-reduces one after another.
        crowded: several at once, the time of each.
        contention: None where computation is a sleep, as long whatever runs beside it.
        copies_s: DDP's copies in and out of all gradients, by the byte from all cases on as many
            hosts, as neither network nor model have a part in that.
        local_s, around_s: backward pass without DDP; DDP's forward pass, which broadcasts buffers,
            and the update.
        judged: steps of DDP.
    """

    facts: pd.Series
    profile: BackwardProfile
    curve: MeasuredAllReduce
    crowded: MeasuredAllReduce
    contention: Contention | None
    copies_s: float
    local_s: float
    around_s: float
    judged: BucketSweep

    @property
    def name(self) -> str:
        return str(self.facts["case"])

    @property
    def costs(self) -> DdpCosts:
        """Copies and contention."""
        return self.with_contention(self.contention)

    def with_contention(self, contention: Contention | None) -> DdpCosts:
        """The case's copies with this contention."""
        per_byte = self.copies_s / 2 / self.profile.total_bytes
        copies = replace(NO_COSTS, copy_in_s_per_byte=per_byte, copy_out_s_per_byte=per_byte)
        if contention is None:
            return copies
        sizes = tuple(map(float, contention.sizes_bytes))
        return replace(
            copies,
            lost_compute=(sizes, tuple(contention.lost_s.tolist())),
            slowdowns=(sizes, tuple(contention.slower.tolist())),
        )

    @property
    def model(self) -> DdpModel:
        """Predicts the case."""
        return calibrated_model(
            self.profile,
            self.curve,
            self.costs,
            crowded=self.crowded,
            backend="gloo",
            added_latency_s=float(self.facts["added_latency_ms"]) / 1e3,
        )


def case_of(
    facts: pd.Series,
    steps: pd.DataFrame,
    gradients: pd.DataFrame,
    all_reduces: pd.DataFrame,
    contention: Contention | None,
    copies_s: float,
) -> JudgedCase:
    """From the rows of one case in the study's tables, its contention and what copies take.

    Of steps without DDP there may be more, from the same ranks in the same minutes.
    """
    local, forward = (steps[steps["role"] == role] for role in ("local", "forward"))
    local_s = float(local["backward_time_ms"].median()) / 1e3
    update_ms = local["step_time_ms"] - local["forward_time_ms"] - local["backward_time_ms"]
    around_s = float(forward["forward_time_ms"].median() + update_ms.median()) / 1e3
    ranks = int(facts["hosts"])
    curve, crowded = (
        AllReduceSamples.of(own.assign(rank=ranks - 1)).curve()
        for own in (all_reduces[all_reduces["mode"] == mode] for mode in MODES)
    )
    profile = _profile(gradients, local_s)
    judged = BucketSweep(steps[steps["role"] == "judged"], ranks)
    judged.check_buckets(profile)
    return JudgedCase(
        facts=facts,
        profile=profile,
        curve=curve,
        crowded=crowded,
        contention=contention,
        copies_s=copies_s,
        local_s=local_s,
        around_s=around_s,
        judged=judged,
    )


def _profile(gradients: pd.DataFrame, local_s: float) -> BackwardProfile:
    ordered = gradients.sort_values("ready_index")
    ready_s = ordered["ready_time_ms"].to_numpy() / 1e3
    profile = BackwardProfile(
        names=tuple(f"gradient {index}" for index in ordered["ready_index"]),
        sizes_bytes=ordered["size_bytes"].to_numpy(np.int64),
        ready_s=ready_s,
        backward_s=float(ready_s[-1]),
        kinds=tuple(ordered["dtype"]),
        registration=tuple(ordered["registration_index"]),
    )
    return profile.scaled(compute=local_s / profile.backward_s)
