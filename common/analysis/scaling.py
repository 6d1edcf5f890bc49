"""Speedups, and when there is one: the same work on both sides, counted and not assumed.

A run is N times as fast as another only if both did the same. ``why_not_comparable`` says what
differs, ``speedup`` raises it. Where ranks went through the same samples, an epoch of one run is
not an epoch of the other: then there is a speedup per sample, and none per epoch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from common.analysis.scaling_run import STRONG, WEAK, RunIdentity, ScalingRun
from common.analysis.speedup_intervals import ratio_interval
from common.analysis.sweep_speedups import sweep_speedups as sweep_speedups  # speedups of a sweep
from common.errors import UserError

SAME = {
    **{"data": "data set", "model": "model", "precision": "precision"},
    **{"input_shape": "shape of a sample"},
}
"""What two runs have to agree in whatever the regime, and what it is called."""
BATCHES = {STRONG: ("global_batch", "global batch"), WEAK: ("batch_per_rank", "batch per rank")}
NOT_COUNTED = "samples per epoch not counted"
SAMPLES_APART = 0.01
"""Numbers of samples this close are the same: a sampler fills up, or drops, the last batch."""


@dataclass(frozen=True)
class Speedup:
    """How many times as fast one configuration is as another.

    Attributes:
        low, high: 95 % interval of ``value``; NaN where there is none.
        over: what the interval is taken over.
        ranks: of the faster side, over those of the base.
    """

    value: float
    low: float
    high: float
    over: str
    ranks: float

    @property
    def efficiency(self) -> float:
        """The speedup as a share of what so many ranks could give at best."""
        return self.value / self.ranks


def why_not_comparable(base: RunIdentity, run: RunIdentity, regime: str) -> str | None:
    """The first reason why ``run`` has no speedup over ``base``; None where it has one.

    Args:
        regime: ``strong``, the same global batch, or ``weak``, the same batch per rank.

    Raises ValueError for another regime.
    """
    if regime not in BATCHES:
        raise ValueError(f"regime {regime!r} is neither {STRONG} nor {WEAK}")
    field, name = BATCHES[regime]
    fields = SAME | {field: name}
    different = _first_difference(base, run, fields) or _other_processor(base, run)
    if different:
        return different
    if base.distinct_per_epoch is None or run.distinct_per_epoch is None:
        return NOT_COUNTED
    repeated = _repeated(base) or _repeated(run)
    if repeated:
        return repeated
    if not _same_count(base.distinct_per_epoch, run.distinct_per_epoch, run.world_size):
        return (
            f"distinct samples per epoch differ ({base.distinct_per_epoch:,} on "
            f"{base.world_size}, {run.distinct_per_epoch:,} on {run.world_size} ranks)"
        )
    unknown = [shown for one, shown in fields.items() if getattr(run, one) is None]
    return f"{unknown[0]} is not recorded" if unknown else None


def _first_difference(base: RunIdentity, run: RunIdentity, fields: dict[str, str]) -> str | None:
    for field, name in fields.items():
        values = getattr(base, field), getattr(run, field)
        if None not in values and values[0] != values[1]:
            return f"{name} differs ({values[0]} and {values[1]})"
        if values.count(None) == 1:
            return f"{name} is recorded for one of the two only"
    return None


def _repeated(run: RunIdentity) -> str | None:
    """Whether samples were computed more than once in an epoch, as a sentence."""
    distinct, processed = run.distinct_per_epoch, run.processed_per_epoch
    if processed is None or _same_count(distinct, processed, run.world_size):
        return None
    return (
        f"{run.world_size} ranks computed {processed:,} samples an epoch, {distinct:,} different "
        f"ones: each {processed / distinct:.1f} times, so an epoch is not one pass over the data"
    )


def _same_count(one: int, other: int, world_size: int) -> bool:
    return abs(one - other) <= max(SAMPLES_APART * max(one, other), world_size - 1)


def regime_of(base: RunIdentity, run: RunIdentity) -> str:
    """Strong where the global batch was kept, weak where the batch per rank was; else strong."""
    weak = base.batch_per_rank is not None and base.batch_per_rank == run.batch_per_rank
    return WEAK if weak and base.global_batch != run.global_batch else STRONG


def speedup(
    base_runs: Sequence[ScalingRun], runs: Sequence[ScalingRun], regime: str, warmup: int = 1
) -> Speedup:
    """How many times as fast ``runs`` go through the samples as ``base_runs``.

    Args:
        base_runs, runs: repetitions of one configuration each.
        regime: ``strong`` or ``weak``.
        warmup: so many first epochs are left out.

    Raises UserError with the reason where the two cannot be compared.
    """
    _check_repeats(base_runs)
    _check_repeats(runs)
    reason = why_not_comparable(base_runs[0].identity, runs[0].identity, regime)
    if reason:
        raise UserError(f"{_both(base_runs, runs)}: not comparable: {reason}")
    counts = [side[0].identity.distinct_per_epoch for side in (base_runs, runs)]
    return _speedup(base_runs, runs, warmup, counts[1] / counts[0])


def printed_speedup(
    base_runs: Sequence[ScalingRun], runs: Sequence[ScalingRun], warmup: int = 1
) -> Speedup:
    """The ratio of epoch times, whatever an epoch is: what studies print that count nothing.

    Raises UserError where even the data set or the model differ.
    """
    _check_same(base_runs, runs)
    return _speedup(base_runs, runs, warmup, 1.0)


def per_sample_speedup(
    base_runs: Sequence[ScalingRun], runs: Sequence[ScalingRun], warmup: int = 1
) -> Speedup:
    """The ratio of samples per second, repeated ones counted each time.

    Counts of the runs themselves go first; else what is known from elsewhere.

    Raises UserError where the data set or the model differ, or nobody knows the samples.
    """
    _check_same(base_runs, runs)
    counts = [processed_per_epoch(side[0]) for side in (base_runs, runs)]
    for side, count in zip((base_runs, runs), counts, strict=True):
        if count is None:
            raise UserError(f"{side[0].name}: nobody knows its samples per epoch")
    return _speedup(base_runs, runs, warmup, counts[1] / counts[0])


def processed_per_epoch(run: ScalingRun) -> int | None:
    """Samples that all ranks computed in an epoch: counted, else as known from elsewhere."""
    if run.identity.processed_per_epoch is not None:
        return run.identity.processed_per_epoch
    return run.stated.processed_per_epoch if run.stated else None


def distinct_per_epoch(run: ScalingRun) -> int | None:
    """Different samples that were computed in an epoch: counted, else as known from elsewhere."""
    if run.identity.distinct_per_epoch is not None:
        return run.identity.distinct_per_epoch
    return run.stated.distinct_per_epoch if run.stated else None


def _check_same(base_runs: Sequence[ScalingRun], runs: Sequence[ScalingRun]) -> None:
    _check_repeats(base_runs)
    _check_repeats(runs)
    both = base_runs[0].identity, runs[0].identity
    reason = _first_difference(*both, SAME) or _other_processor(*both)
    if reason:
        raise UserError(f"{_both(base_runs, runs)}: not comparable: {reason}")


def _other_processor(base: RunIdentity, run: RunIdentity) -> str | None:
    """What is different about what ranks compute with, where that is known of both."""
    if None in (base.processor, run.processor) or base.processor == run.processor:
        return None
    return f"processor differs ({base.processor} and {run.processor})"


def _check_repeats(runs: Sequence[ScalingRun]) -> None:
    if not runs:
        raise UserError("no speedup can be computed: one of the two sides has no run")
    for run in runs[1:]:
        if run.identity != runs[0].identity:
            raise UserError(f"{runs[0].name} and {run.name} are not repetitions of one run")


def _both(base_runs: Sequence[ScalingRun], runs: Sequence[ScalingRun]) -> str:
    return f"{base_runs[0].name} and {runs[0].name}"


def _speedup(
    base_runs: Sequence[ScalingRun], runs: Sequence[ScalingRun], warmup: int, samples_ratio: float
) -> Speedup:
    sides = [[_times(run, warmup) for run in side] for side in (base_runs, runs)]
    base_s, run_s = (np.mean(np.concatenate(side)) for side in sides)
    low, high, over = ratio_interval(*sides)
    return Speedup(
        value=float(base_s / run_s) * samples_ratio,
        low=low * samples_ratio,
        high=high * samples_ratio,
        over=over,
        ranks=runs[0].identity.world_size / base_runs[0].identity.world_size,
    )


def _times(run: ScalingRun, warmup: int) -> NDArray:
    times = run.epoch_times_s(warmup)
    if not len(times):
        raise UserError(f"{run.name}: all of its {len(run.epochs)} epochs are warm-up")
    return times
