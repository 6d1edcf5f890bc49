"""A calibration: all samples that a prediction is made of, and the model that they make.

Gradients of passes without DDP, all-reduces one after another and several at once, DDP's copies,
and passes beside all-reduces; none of them is a bucketing. A diagnosis makes its model
(``calibrated_model``) of what its run measured.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from common.perfmodel.collectives import AllReduceModel, MeasuredAllReduce
from common.perfmodel.ddp.profile import NO_COSTS, BackwardProfile, DdpCosts
from common.perfmodel.model import DdpModel
from common.perfmodel.samples import IN_FLIGHT, AllReduceSamples, OverlapSamples, ReadySamples
from common.perfmodel.tables import (
    crowded_samples,
    read_all_reduce_samples,
    read_overlap_samples,
    read_ready_samples,
)
from common.samples import resampled

PASSES, ALL_REDUCES, OVERLAP = "backward passes", "all-reduces", "passes beside all-reduces"
SOURCES = (PASSES, ALL_REDUCES, OVERLAP)
"""The measurements of a calibration."""


def calibrated_model(
    profile: BackwardProfile,
    network: AllReduceModel,
    costs: DdpCosts = NO_COSTS,
    *,
    crowded: AllReduceModel | None = None,
    backend: str | None = None,
    added_latency_s: float = 0.0,
    gradient_as_bucket_view: bool = False,
) -> DdpModel:
    """Returns the model of one system.

    Args:
        crowded: seconds per all-reduce while several are in flight, where measured.
        backend: decides how many all-reduces are in flight; one where it is not known, and where
            latency is added, as the hook that adds it takes up buckets one by one.
        gradient_as_bucket_view: as for DDP, of the runs that are predicted; nothing is copied back.
    """
    in_flight = 1 if added_latency_s else IN_FLIGHT.get(backend or "", 1)
    return DdpModel(
        profile,
        network,
        costs.as_bucket_view() if gradient_as_bucket_view else costs,
        in_flight=in_flight,
        crowded_network=crowded if in_flight > 1 else None,
        added_latency_s=added_latency_s,
    )


@dataclass(frozen=True, eq=False)
class Calibration:
    """All samples that a prediction is made of.

    Attributes:
        crowded: several all-reduces in flight, where that was measured.
        overlap: DDP's costs where they were measured; else ``costs`` are taken as they are.
        backend, added_latency_s, gradient_as_bucket_view: as for ``calibrated_model``.
    """

    ready: ReadySamples
    all_reduce: AllReduceSamples
    crowded: AllReduceSamples | None = None
    overlap: OverlapSamples | None = None
    costs: DdpCosts = NO_COSTS
    backend: str | None = None
    added_latency_s: float = 0.0
    gradient_as_bucket_view: bool = False

    def model(self) -> DdpModel:
        """Returns the model from all samples, by which the prediction itself is made."""
        return self._model()

    def drawn(self, generator: np.random.Generator, sources: tuple[str, ...] = SOURCES) -> DdpModel:
        """Returns the model from as many samples drawn with replacement.

        Only members of ``sources`` are drawn: backward passes one by one; all-reduces and DDP's
        costs by round, as a round shares the machine's state, and all-reduces within it.
        """
        # Bootstrap (Efron 1979): the unit that is drawn is one whose errors are independent of the
        # next one's. That is a pass for gradients, and a round for everything that shares rounds.
        passes = rounds = None
        if PASSES in sources:
            [passes] = resampled(range(self.ready.passes), draws=1, seed=generator)
        if OVERLAP in sources and self.overlap:
            [rounds] = resampled(range(self.overlap.rounds), draws=1, seed=generator)

        def curve(samples: AllReduceSamples) -> MeasuredAllReduce:
            return samples.drawn(generator) if ALL_REDUCES in sources else samples.curve()

        return self._model(curve, passes, rounds)

    def _model(
        self,
        curve: Callable[[AllReduceSamples], MeasuredAllReduce] = AllReduceSamples.curve,
        passes: NDArray | None = None,
        overlap_rounds: NDArray | None = None,
    ) -> DdpModel:
        return calibrated_model(
            self.ready.profile(passes),
            curve(self.all_reduce),
            self.overlap.costs(overlap_rounds) if self.overlap else self.costs,
            crowded=curve(self.crowded) if self.crowded else None,
            backend=self.backend,
            added_latency_s=self.added_latency_s,
            gradient_as_bucket_view=self.gradient_as_bucket_view,
        )


def read_calibration(
    ready_times: Path | str,
    all_reduce: Path | str,
    overlap: Path | str | None = None,
    *,
    backend: str | None = None,
    added_latency_s: float = 0.0,
    gradient_as_bucket_view: bool = False,
) -> Calibration:
    """Reads ``gradient-ready-times.csv``, ``allreduce-samples.csv`` and ``overlap-times.csv``.

    Raises UserError for a table that cannot be one of these.
    """
    return Calibration(
        ready=read_ready_samples(ready_times),
        all_reduce=read_all_reduce_samples(all_reduce),
        crowded=crowded_samples(all_reduce),
        overlap=read_overlap_samples(overlap, backend) if overlap else None,
        backend=backend,
        added_latency_s=added_latency_s,
        gradient_as_bucket_view=gradient_as_bucket_view,
    )
