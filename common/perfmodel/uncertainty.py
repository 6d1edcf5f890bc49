"""A band around a prediction: what else might have come out of the same measurements.

A prediction is made of medians of samples. Drawing as many samples again from those that there
are, with replacement, and predicting from them, many times over, shows how far chance carries it
(the bootstrap: Efron 1979). Backward passes are drawn one by one; all-reduces and DDP's costs by
round, as samples of one round share the state the machine was in, and all-reduces within it.

The band is that of the *prediction*. It knows nothing of what the model leaves out, nor of what
one DDP instance differs by from the next: a measured median may lie outside.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from common.errors import UserError
from common.perfmodel.buckets import DdpOptions
from common.perfmodel.collectives import MeasuredAllReduce
from common.perfmodel.model import DdpModel
from common.perfmodel.profile import NO_COSTS, BackwardProfile, DdpCosts
from common.perfmodel.samples import AllReduceSamples, OverlapSamples, ReadySamples
from common.perfmodel.simulator import profile_buckets
from common.perfmodel.tables import (
    read_all_reduce_samples,
    read_overlap_samples,
    read_ready_samples,
)


@dataclass(frozen=True, eq=False)
class MeasuredSamples:
    """All samples that a prediction is made of.

    Attributes:
        ready: gradient-ready times.
        all_reduce: all-reduces one after another.
        overlap: DDP's costs where they were measured; else ``costs`` are taken as they are.
        costs: what is predicted with where there is no ``overlap``.
        added_latency_s: what every bucket waited in addition.
        in_flight: all-reduces under way at a time.
    """

    ready: ReadySamples
    all_reduce: AllReduceSamples
    overlap: OverlapSamples | None = None
    costs: DdpCosts = NO_COSTS
    added_latency_s: float = 0.0
    in_flight: int = 1

    def model(self) -> DdpModel:
        """Returns the model from all samples, by which the prediction itself is made."""
        costs = self.overlap.costs() if self.overlap else self.costs
        return self._of(self.ready.profile(), self.all_reduce.curve(), costs)

    def drawn(self, generator: np.random.Generator) -> DdpModel:
        """Returns the model from as many samples drawn with replacement."""
        passes = self.ready.passes
        profile = self.ready.profile(generator.integers(passes, size=passes))
        sizes, rounds, iterations = self.all_reduce.time_s.shape
        curve = self.all_reduce.curve(
            generator.integers(rounds, size=rounds),
            generator.integers(iterations, size=(sizes, rounds, iterations)),
        )
        costs = self.costs
        if self.overlap:
            costs = self.overlap.costs(
                generator.integers(self.overlap.rounds, size=self.overlap.rounds)
            )
        return self._of(profile, curve, costs)

    def _of(self, profile: BackwardProfile, curve: MeasuredAllReduce, costs: DdpCosts) -> DdpModel:
        return DdpModel(
            profile,
            curve,
            costs,
            in_flight=self.in_flight,
            added_latency_s=self.added_latency_s,
        )


def read_samples(
    ready_times: Path | str,
    all_reduce: Path | str,
    overlap: Path | str | None = None,
    *,
    costs: DdpCosts = NO_COSTS,
    added_latency_s: float = 0.0,
) -> MeasuredSamples:
    """Samples from ``gradient-ready-times.csv``, ``allreduce-samples.csv``, ``overlap-times.csv``.

    Raises UserError for a table that cannot be one of these.
    """
    return MeasuredSamples(
        read_ready_samples(ready_times),
        read_all_reduce_samples(all_reduce),
        read_overlap_samples(overlap) if overlap else None,
        costs,
        added_latency_s,
    )


@dataclass(frozen=True, eq=False)
class PredictionBands:
    """A prediction and its band for each cap.

    Attributes:
        table: by cap: ``bucket_cap_mib`` (NaN is DDP's default), ``predicted_ms`` (from all
            samples), ``median_ms``, ``low_ms`` and ``high_ms`` (of the drawn ones), and
            ``best_share``: in which share of the draws no other cap was faster.
        drawn_s: T of every draw [draws, caps].
        level: share of the draws inside a band.
    """

    table: pd.DataFrame
    drawn_s: NDArray
    level: float

    def difference(self, one: int, other: int) -> tuple[float, float]:
        """The band of T(one) / T(other) − 1, caps by their rows in the table.

        Both come from the same draws, so what they share cancels: two caps may differ for sure
        though their bands overlap.
        """
        ratios = self.drawn_s[:, one] / self.drawn_s[:, other] - 1
        return tuple(map(float, np.quantile(ratios, _ends(self.level))))


def prediction_bands(
    samples: MeasuredSamples,
    caps_mib: Sequence[float | None],
    *,
    draws: int = 200,
    seed: int = 0,
    level: float = 0.9,
) -> PredictionBands:
    """Predict T at each cap, with the band between the quantiles (1 ± level)/2 of the draws.

    The same seed gives the same band. Raises UserError without caps or with fewer than 2 draws.
    """
    if not len(caps_mib):
        raise UserError("no caps to predict")
    if draws < 2 or not 0 < level < 1:
        raise UserError(f"{draws} draws, level {level:g}: at least 2 draws, a level inside 0 and 1")
    generator = np.random.default_rng(seed)
    model = samples.model()
    bucketings = [profile_buckets(model.profile, DdpOptions(cap)) for cap in caps_mib]
    distinct = {
        str([bucket[-1] for bucket in buckets]): cap
        for buckets, cap in zip(bucketings, caps_mib, strict=True)
    }
    place = {key: index for index, key in enumerate(distinct)}
    of_cap = [place[str([bucket[-1] for bucket in buckets])] for buckets in bucketings]

    def times(one: DdpModel) -> list[float]:
        return [one.backward_s(cap) for cap in distinct.values()]

    predicted = np.array(times(model))[of_cap]
    drawn = np.array([times(samples.drawn(generator)) for _ in range(draws)])[:, of_cap]
    low, median, high = np.quantile(drawn, [_ends(level)[0], 0.5, _ends(level)[1]], axis=0)
    table = pd.DataFrame(
        {
            "bucket_cap_mib": [np.nan if cap is None else float(cap) for cap in caps_mib],
            "predicted_ms": predicted * 1e3,
            "median_ms": median * 1e3,
            "low_ms": low * 1e3,
            "high_ms": high * 1e3,
            "best_share": (drawn <= drawn.min(axis=1, keepdims=True)).mean(axis=0),
        }
    )
    return PredictionBands(table, drawn, level)


def _ends(level: float) -> tuple[float, float]:
    return (1 - level) / 2, (1 + level) / 2
