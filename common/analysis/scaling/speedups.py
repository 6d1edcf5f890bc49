"""Speedups of training runs: when there is one, what it is, and how far it can be trusted.

A run is N times as fast as another only if both did the same work, and work is counted here, not
assumed. ``why_not_comparable`` says what differs, ``speedup`` raises it. Where ranks went through
the same samples, an epoch of one run is not an epoch of the other: then there is a speedup per
sample, and none per epoch. Intervals come from repeated runs, or else from the epochs of a run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from common.analysis.scaling.training_run import STRONG, WEAK, RunIdentity, ScalingRun
from common.errors import UserError
from common.judged import FIRST_PAGE_ROUNDS, Judged
from common.samples import Interval, middle, resampled, welch

SAME = {
    "data": "data set",
    "model": "model",
    "precision": "precision",
    "input_shape": "shape of a sample",
}
"""Fields in which two runs must agree whatever the regime, with their titles."""
BATCHES = {STRONG: ("global_batch", "global batch"), WEAK: ("batch_per_rank", "batch per rank")}
NOT_COUNTED = "samples per epoch not counted"
SAMPLES_APART = 0.01
"""Numbers of samples this close are the same: a sampler fills up, or drops, the last batch."""

FEW = 8
"""Number of values from which on a bootstrap is trusted."""
OVER_RUNS, OVER_EPOCHS, NO_INTERVAL = "repeated runs", "epochs", "nothing: a single epoch"


@dataclass(frozen=True)
class Speedup:
    """Speedup of one configuration over another.

    Attributes:
        low, high: 95 % interval of ``value``; NaN where there is none.
        over: Source of the interval, such as repeated runs.
        ranks: Ranks of the faster side over those of the base.
        repeats: Number of runs of the side that has fewer.
    """

    value: float
    low: float
    high: float
    over: str
    ranks: float
    repeats: int = 1

    @property
    def judged(self) -> Judged:
        """Returns the speedup as it may be said: runs are its repetitions.

        Epochs of one run do not know by how much runs differ: an interval over them settles
        nothing.
        """
        ends = (self.low, self.high) if self.over == OVER_RUNS else (np.nan, np.nan)
        interval = Interval(self.value, *ends, rounds=self.repeats)
        return Judged(interval, least_rounds=FIRST_PAGE_ROUNDS)

    @property
    def efficiency(self) -> float:
        """Returns the speedup over the number of ranks."""
        return self.value / self.ranks

    @property
    def interval(self) -> str:
        """Returns the interval in words: ``3.45 to 3.53, over epochs``."""
        if np.isnan(self.low):
            return "none: a single epoch"
        runs = self.repeats if self.over == OVER_RUNS else None
        ends = Interval(self.value, self.low, self.high, rounds=runs)
        return f"{ends.text(unit='run')}, over {self.over}"

    def __str__(self) -> str:
        """Returns it in words: ``3.49x (3.45 to 3.53, over epochs), efficiency 87.3 %``."""
        interval = "" if np.isnan(self.low) else f" ({self.interval})"
        return f"{self.value:.2f}x{interval}, efficiency {self.efficiency:.1%}".replace("%", " %")


def why_not_comparable(base: RunIdentity, run: RunIdentity, regime: str) -> str | None:
    """Returns the first reason why ``run`` has no speedup over ``base``; None where it has one.

    ``regime`` is ``strong``, the same global batch, or ``weak``, the same batch per rank.
    """
    field, name = BATCHES[regime]
    fields = SAME | {field: name}
    if different := _first_difference(base, run, fields):
        return different
    if base.distinct_per_epoch is None or run.distinct_per_epoch is None:
        return NOT_COUNTED
    if repeated := _repeated(base) or _repeated(run):
        return repeated
    if not _same_count(base.distinct_per_epoch, run.distinct_per_epoch, run.world_size):
        return (
            f"distinct samples per epoch differ ({base.distinct_per_epoch:,} on "
            f"{base.world_size}, {run.distinct_per_epoch:,} on {run.world_size} ranks)"
        )
    unknown = [name for field, name in fields.items() if getattr(run, field) is None]
    return f"{unknown[0]} is not recorded" if unknown else None


def _first_difference(
    base: RunIdentity, run: RunIdentity, fields: Mapping[str, str] = SAME
) -> str | None:
    """Returns the first difference in these fields, or in processors where both are known."""
    for field, name in fields.items():
        values = getattr(base, field), getattr(run, field)
        if None not in values and values[0] != values[1]:
            return f"{name} differs ({values[0]} and {values[1]})"
        if values.count(None) == 1:
            return f"{name} is recorded for one of the two only"
    if None in (base.processor, run.processor) or base.processor == run.processor:
        return None
    return f"processor differs ({base.processor} and {run.processor})"


def _repeated(run: RunIdentity) -> str | None:
    """Returns a sentence where samples were computed more than once in an epoch, else None."""
    distinct, processed = run.distinct_per_epoch, run.processed_per_epoch
    if processed is None or _same_count(distinct, processed, run.world_size):
        return None
    return (
        f"{run.world_size} ranks computed {processed:,} samples an epoch, {distinct:,} different "
        f"ones: each {processed / distinct:.1f} times, so an epoch is not one pass over the data"
    )


def _same_count(first: int, second: int, world_size: int) -> bool:
    return abs(first - second) <= max(SAMPLES_APART * max(first, second), world_size - 1)


def regime_of(base: RunIdentity, run: RunIdentity) -> str:
    """Returns weak where only the batch per rank was kept, else strong."""
    weak = base.batch_per_rank is not None and base.batch_per_rank == run.batch_per_rank
    return WEAK if weak and base.global_batch != run.global_batch else STRONG


def speedup(
    base_runs: Sequence[ScalingRun], runs: Sequence[ScalingRun], regime: str, warmup: int = 1
) -> Speedup:
    """Computes how many times as fast ``runs`` go through the samples as ``base_runs``.

    Both are repetitions of one configuration; ``warmup`` is the number of first epochs that are
    left out. Raises UserError with the reason where the two cannot be compared.
    """
    _check(base_runs, runs, partial(why_not_comparable, regime=regime))
    base, other = (side[0].identity.distinct_per_epoch for side in (base_runs, runs))
    return _speedup(base_runs, runs, warmup, other / base)


def printed_speedup(
    base_runs: Sequence[ScalingRun], runs: Sequence[ScalingRun], warmup: int = 1
) -> Speedup:
    """Computes the ratio of epoch times, whatever an epoch is, as studies print that count nothing.

    Raises UserError where even the data set or the model differ.
    """
    _check(base_runs, runs, _first_difference)
    return _speedup(base_runs, runs, warmup, 1.0)


def per_sample_speedup(
    base_runs: Sequence[ScalingRun], runs: Sequence[ScalingRun], warmup: int = 1
) -> Speedup:
    """Computes the ratio of samples per second, repeated samples counted each time.

    Counts of the runs themselves go first; else what is known from elsewhere.

    Raises UserError where the data set or the model differ, or nobody knows the samples.
    """
    _check(base_runs, runs, _first_difference)
    counts = [side[0].processed_per_epoch for side in (base_runs, runs)]
    for side, count in zip((base_runs, runs), counts, strict=True):
        if count is None:
            raise UserError(f"{side[0].name}: nobody knows its samples per epoch")
    return _speedup(base_runs, runs, warmup, counts[1] / counts[0])


def _check(
    base_runs: Sequence[ScalingRun],
    runs: Sequence[ScalingRun],
    why_not: Callable[[RunIdentity, RunIdentity], str | None],
) -> None:
    """Raises UserError where a side is not one run and its repetitions, or there is a reason."""
    for side in (base_runs, runs):
        if not side:
            raise UserError("no speedup can be computed: one of the two sides has no run")
        for run in side[1:]:
            if run.identity != side[0].identity:
                raise UserError(f"{side[0].name} and {run.name} are not repetitions of one run")
    base, other = base_runs[0], runs[0]
    if reason := why_not(base.identity, other.identity):
        raise UserError(f"{base.name} and {other.name}: not comparable: {reason}")


def _speedup(
    base_runs: Sequence[ScalingRun], runs: Sequence[ScalingRun], warmup: int, samples_ratio: float
) -> Speedup:
    base, other = ([_times(run, warmup) for run in side] for side in (base_runs, runs))
    base_s, other_s = np.mean(np.concatenate(base)), np.mean(np.concatenate(other))
    interval, over = ratio_interval(base, other)
    return Speedup(
        value=float(base_s / other_s) * samples_ratio,
        low=interval.low * samples_ratio,
        high=interval.high * samples_ratio,
        over=over,
        ranks=runs[0].identity.world_size / base_runs[0].identity.world_size,
        repeats=min(len(base_runs), len(runs)),
    )


def _times(run: ScalingRun, warmup: int) -> NDArray:
    times = run.epoch_times_s(warmup)
    if not len(times):
        raise UserError(f"{run.name}: all of its {len(run.epochs)} epochs are warm-up")
    return times


def ratio_interval(base: list[NDArray], other: list[NDArray]) -> tuple[Interval, str]:
    """Estimates base time over the other's, and says what its interval is taken over.

    Repeated runs on both sides: Welch's t on the logarithms of the runs' means, since a bootstrap
    of two or three values is far too narrow. Else over epochs, which do not know how much runs
    differ: a bootstrap, or Welch's t where they are few.
    Each side has the times of each repetition.
    """
    if len(base) > 1 and len(other) > 1:
        logs = ([np.log(np.mean(run)) for run in side] for side in (base, other))
        return welch(*logs).map(np.exp), OVER_RUNS
    first, second = np.concatenate(base), np.concatenate(other)
    if len(first) < 2 or len(second) < 2:
        return Interval(np.nan, np.nan, np.nan), NO_INTERVAL
    if min(len(first), len(second)) < FEW:
        return welch(np.log(first), np.log(second)).map(np.exp), OVER_EPOCHS
    # The published intervals are those of 2000 draws.
    draws = np.random.default_rng(0)
    means = [resampled(side, draws=2000, seed=draws).mean(axis=1) for side in (first, second)]
    low, high = middle(means[0] / means[1])
    return Interval(first.mean() / second.mean(), low, high), OVER_EPOCHS
