"""A measured sweep over bucket caps, and what a prediction of it is worth."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import pandas as pd

from common.analysis.runs import Run
from common.csv_tables import numbers, read_table
from common.errors import UserError
from common.judged import FIRST_PAGE_ROUNDS, NOT_WITNESSED, Fastest, Judged, fastest, rival_of
from common.perfmodel.buckets import DdpOptions, cap_label
from common.perfmodel.ddp.bucketings import profile_buckets
from common.perfmodel.ddp.profile import BackwardProfile
from common.samples import (
    Interval,
    median_standard_error,
    paired_gain,
    paired_ratio,
    per_round,
    slowest_rank,
)

KEYS = ["bucket_cap_mib", "round", "iteration"]
BUCKETS = ["num_buckets", "first_bucket_bytes", "last_bucket_bytes"]
BUCKET_BYTES = "bucket_bytes"
"""All buckets' bytes in order, blank-separated; not in runs from before 2026-11-25."""
DEFAULT_NAME = "DDP's default (1, 25 MiB)"
"""Name of DDP's default in tables and figures. Its first bucket has 1 MiB, others 25; as that is no
single cap, it is no case of an evaluation and stands beside the caps."""
TIMES = ["forward_time_ms", "backward_time_ms", "step_time_ms"]


@dataclass(frozen=True)
class BucketSweep:
    """Raw DDP times as one row per step, a step's time being its slowest rank's.

    Attributes:
        steps: columns bucket_cap_mib (NaN is DDP's default), round, iteration, num_buckets,
            first_bucket_bytes, last_bucket_bytes, bucket_bytes (not in older runs) and the three
            times in ms.
        world_size: number of ranks.
        machine: state of the machine meanwhile, as ``judged.Judged`` takes it.
    """

    steps: pd.DataFrame
    world_size: int
    machine: str = NOT_WITNESSED

    def summary(self, column: str = "backward_time_ms") -> pd.DataFrame:
        """Tabulates buckets, median time and quartiles, by ascending cap."""
        groups = self.steps.groupby("bucket_cap_mib", dropna=False)
        quantiles = groups[column].quantile([0.25, 0.5, 0.75]).unstack()
        quantiles.columns = ["q25_ms", "median_ms", "q75_ms"]
        table = quantiles.assign(num_buckets=groups["num_buckets"].first())
        return table.reset_index().sort_values("bucket_cap_mib", ignore_index=True)

    def default(self) -> pd.Series | None:
        """Returns the row of ``summary`` of DDP's default; None where it was not measured."""
        table = self.summary()
        rows = table[table["bucket_cap_mib"].isna()]
        return None if rows.empty else rows.iloc[0]

    def rounds(self) -> pd.DataFrame:
        """Returns the median backward pass (ms) of each round, by distinct bucketing.

        A row per round; a column per bucketing, named by its smallest cap (MiB), and one, NaN, for
        DDP's default where it was measured.
        """
        bucketings = self.steps["bucket_cap_mib"].map(self.smallest_alike())
        steps = self.steps.assign(bucketing=bucketings)
        step = ["bucket_cap_mib", "iteration"]
        return per_round(steps, "backward_time_ms", "bucketing", step=step)

    def gain_over_default(self, cap_mib: float, scope: str = "") -> Judged:
        """Judges the share of the default's backward pass that a cap saves, if both were measured.

        Args:
            cap_mib: smallest cap of a distinct bucketing, chosen before anything was measured.
            scope: model, ranks and network of the measurement.
        """
        chosen, default = self.rounds().reindex(columns=[cap_mib, np.nan]).to_numpy().T
        gain = paired_gain(chosen, default)
        return Judged(gain, 0.0, scope, machine=self.machine, least_rounds=FIRST_PAGE_ROUNDS)

    def accuracy_of(self, predict: Callable[[float], float], scope: str = "") -> Accuracy:
        """Holds predicted seconds of the backward pass, by cap in MiB, against the sweep's medians.

        Caps that gave the same buckets are one case. Raises UserError if no cap was measured.
        """
        if self.steps["bucket_cap_mib"].isna().all():
            raise UserError("no cap was both predicted and measured")
        distinct = self.distinct()
        summary = distinct.summary()
        predicted_s = {cap: predict(cap) for cap in summary["bucket_cap_mib"]}
        predicted_ms, measured_ms = np.array([*predicted_s.values()]) * 1e3, summary["median_ms"]
        table = summary[["bucket_cap_mib", "num_buckets"]].assign(
            predicted_ms=predicted_ms,
            measured_ms=measured_ms,
            error=predicted_ms / measured_ms - 1,
        )
        return Accuracy(
            table=table,
            rounds=self.rounds()[[*predicted_s]],
            noise_floor=distinct.noise_floor(),
            predicted_best_mib=predicted_fastest_cap(predicted_s, predicted_s),
            scope=scope,
            machine=self.machine,
        )

    def noise_floor(self) -> float:
        """Computes the median over caps of |A/B − 1|; A, B are medians of two halves of the rounds.

        What two measurements of the same thing differ by; NaN with fewer than two rounds. It
        describes a sweep, and decides nothing: what is told from noise, intervals say. Rounds go to
        the halves in pairs, as a round and the next visit the caps in opposite order.
        """
        pair = 2 if self.steps["round"].nunique() >= 4 else 1
        is_even = self.steps["round"] // pair % 2 == 0
        first, second = (
            self.steps[half].groupby("bucket_cap_mib", dropna=False)["backward_time_ms"].median()
            for half in (is_even, ~is_even)
        )
        return float((first / second - 1).abs().median())

    def standard_errors(self) -> pd.Series:
        """Returns by cap the standard error of its median, relative (``median_standard_error``)."""
        steps = self.steps.set_index(["round", "iteration"])["backward_time_ms"]
        groups = steps.groupby(self.steps["bucket_cap_mib"].to_numpy(), dropna=False)
        return groups.agg(lambda times: median_standard_error(times.unstack().to_numpy()))

    def measured_s(self) -> dict[float, float]:
        """Computes the median backward time in seconds by explicit cap in MiB."""
        table = self.summary().dropna(subset="bucket_cap_mib")
        return dict(zip(table["bucket_cap_mib"], table["median_ms"] / 1e3, strict=True))

    def check_buckets(self, profile: BackwardProfile) -> None:
        """Raises UserError where DDP's buckets were not those of the profile's model."""
        columns = bucket_columns(self.steps)
        caps = self.steps.drop_duplicates("bucket_cap_mib")[["bucket_cap_mib", *columns]]
        for cap, *recorded in caps.itertuples(index=False):
            options = DdpOptions(None if pd.isna(cap) else cap)
            buckets = profile_buckets(profile, options)
            sizes = [int(profile.sizes_bytes[bucket].sum()) for bucket in buckets]
            expected = [len(sizes), sizes[0], sizes[-1], " ".join(map(str, sizes))]
            if recorded == expected[: len(recorded)]:
                continue
            what = " of other sizes than the gradients given make"
            if recorded[:3] != expected[:3]:
                what = (
                    f", the first of {recorded[1]:,} bytes; the gradients given make "
                    f"{len(sizes)}, the first of {sizes[0]:,}"
                )
            raise UserError(
                f"at a cap of {cap_label(options.bucket_cap_mib)} MiB DDP made {recorded[0]} "
                f"buckets{what}: another model or DDP options"
            )

    def smallest_alike(self) -> dict[float, float]:
        """Maps each explicit cap to the smallest cap (MiB) that gave the same buckets."""
        explicit = self.steps.dropna(subset="bucket_cap_mib")
        buckets = explicit.groupby(bucket_columns(explicit))
        smallest = buckets["bucket_cap_mib"].transform("min")
        return dict(zip(explicit["bucket_cap_mib"], smallest, strict=True))

    def widths(self) -> dict[float, float]:
        """Maps each cap of ``distinct`` to the largest explicit cap (MiB) that gave its buckets."""
        return {smallest: cap for cap, smallest in sorted(self.smallest_alike().items())}

    def distinct(self) -> BucketSweep:
        """Joins caps that gave the same buckets to one case, under the smallest of them."""
        explicit = self.steps.dropna(subset="bucket_cap_mib")
        joined = explicit["bucket_cap_mib"].map(self.smallest_alike())
        return replace(self, steps=explicit.assign(bucket_cap_mib=joined))


def read_sweep(path: Path | str) -> BucketSweep:
    """Reads ``ddp-times.csv``. Raises UserError for a table that cannot be one."""
    table = read_table(path, [*KEYS, *BUCKETS, *TIMES, "rank"])
    for column in TIMES:
        numbers(table, column, path, above=0)
    ranks = set(table["rank"])
    if ranks != set(range(len(ranks))):
        raise UserError(f"{path}: ranks are {sorted(ranks)}; expected 0 to {len(ranks) - 1}")
    counts = table.groupby(KEYS, dropna=False)["rank"].nunique()
    if (counts < len(ranks)).any():
        cap, round_, iteration = counts.idxmin()
        label = cap_label(None if pd.isna(cap) else cap)
        raise UserError(
            f"{path}: not all {len(ranks)} ranks are there at cap {label} MiB, round {round_}, "
            f"iteration {iteration}"
        )
    folder = Path(path).parent
    return BucketSweep(slowest_steps(table), len(ranks), Run(folder, folder).machine_state)


def slowest_steps(table: pd.DataFrame) -> pd.DataFrame:
    """Reduces one row per step and rank to one per step: its times are its slowest rank's."""
    columns = bucket_columns(table)
    if BUCKET_BYTES in columns:  # a column of single buckets is read as numbers
        table = table.assign(bucket_bytes=table[BUCKET_BYTES].astype(str))
    return slowest_rank(table, TIMES, by=[*KEYS, *columns], sort=False).reset_index()


def bucket_columns(table: pd.DataFrame) -> list[str]:
    """Returns the columns that tell bucketings apart: all sizes where a table has them."""
    return [*BUCKETS, BUCKET_BYTES] if BUCKET_BYTES in table else BUCKETS


@dataclass(frozen=True, eq=False)
class Accuracy:
    """A prediction held against a sweep.

    Attributes:
        table: per distinct bucketing: bucket_cap_mib (its smallest cap), num_buckets,
            predicted_ms, measured_ms and error (predicted / measured − 1).
        rounds: median backward pass (ms), a row per round, a column per bucketing of ``table``.
        noise_floor: noise floor of the sweep.
        predicted_best_mib: cap of ``table`` that is predicted to be fastest.
        scope, machine: model, ranks and network; state of the machine (``judged.Judged``).
    """

    table: pd.DataFrame
    rounds: pd.DataFrame
    noise_floor: float
    predicted_best_mib: float
    scope: str = ""
    machine: str = NOT_WITNESSED

    @property
    def median_error(self) -> float:
        """Returns the median of |error|."""
        return float(self.table["error"].abs().median())

    @property
    def worst_error(self) -> float:
        """Returns the largest |error|."""
        return float(self.table["error"].abs().max())

    @cached_property
    def best(self) -> Fastest | None:
        """Returns the fastest cap, and those that are tied with it; None of a single one."""
        return fastest(self.rounds, **self.conditions)

    @cached_property
    def worst(self) -> Fastest | None:
        """Returns the slowest cap, and those that are tied with it; None of a single one."""
        return fastest(1 / self.rounds, **self.conditions)

    @property
    def measured_best_mib(self) -> float | None:
        """Returns the fastest cap; None where it is not told from all others."""
        if self.best is None:
            return float(self.table["bucket_cap_mib"].iloc[0])
        return self.best.arm if self.best.lead.is_settled else None

    @cached_property
    def worst_over_best(self) -> Judged:
        """Judges the slowest cap's time over the fastest's, which any two caps could be."""
        if self.best is None:
            nothing = Interval(1.0, np.nan, np.nan, rounds=len(self.rounds))
            return Judged(nothing, **self.conditions)
        times = self.rounds[[self.worst.arm, self.best.arm]].to_numpy().T
        pairs = math.comb(len(self.rounds.columns), 2)
        return Judged(paired_ratio(*times, claims=pairs), **self.conditions)

    @cached_property
    def regret(self) -> Judged:
        """Judges what following the prediction costs (``regret_of``)."""
        return regret_of(self.rounds, self.predicted_best_mib, **self.conditions)

    @cached_property
    def error(self) -> Judged:
        """Judges the median of |error|.

        Each bucketing's error has an interval over rounds; the ends of this one are the medians of
        theirs. It is wrong only where half of them are, however they depend on each other: at most
        twice as often as a single one (Markov's inequality), for which they are made wider.
        """
        errors = self._errors(claims=min(2, len(self.table))).values()
        ends = np.array([(error.low, -error.high) for error in errors])
        lows = np.maximum(ends.max(axis=1), 0)
        low, high = np.median([lows, np.abs(ends).max(axis=1)], axis=1)
        rounds = min(error.rounds for error in errors)
        over_rounds = Interval(self.median_error, float(low), float(high), rounds=rounds)
        return Judged(over_rounds, 0.0, **self.conditions)

    @property
    def conditions(self) -> dict[str, object]:
        """Returns scope, state of the machine and least rounds, as ``Judged`` takes them."""
        return {"scope": self.scope, "machine": self.machine, "least_rounds": FIRST_PAGE_ROUNDS}

    @cached_property
    def errors(self) -> dict[float, Judged]:
        """Judges each bucketing's predicted time over the measured one, minus 1.

        The intervals of all bucketings hold at once.
        """
        errors = self._errors(claims=len(self.table))
        return {cap: Judged(error, 0.0, **self.conditions) for cap, error in errors.items()}

    def _errors(self, *, claims: int) -> dict[float, Interval]:
        """Estimates each bucketing's predicted time over that of the rounds, minus 1."""
        predicted_ms = self.table["predicted_ms"]
        return {
            cap: paired_ratio(np.full(len(times), predicted), times, claims=claims).map(
                lambda ratio: ratio - 1
            )
            for predicted, (cap, times) in zip(predicted_ms, self.rounds.items(), strict=True)
        }

    @property
    def errors_by_round(self) -> pd.Series:
        """Returns the median of |error| of each round."""
        predicted_ms = self.table["predicted_ms"].to_numpy()
        return (predicted_ms / self.rounds - 1).abs().median(axis=1)


def regret_of(rounds: pd.DataFrame, chosen_mib: float, **conditions: object) -> Judged:
    """Judges what a cap costs, as a share of a faster cap's time.

    The cap was chosen before the sweep, so all others may be held against it at once: it is beaten
    where one of them is told to be faster. Where none looks faster it is 0.

    Args:
        rounds: a row per round, a column per cap (MiB).
        chosen_mib: the cap.
        conditions: further fields of ``Judged``.
    """
    rival = rival_of(rounds, chosen_mib, **conditions)
    if rival is None:
        nothing = Interval(0.0, np.nan, np.nan, rounds=len(rounds))
        return Judged(nothing, null=0.0, **conditions)
    lost = rival.interval.map(lambda ratio: float(np.maximum(0.0, 1 / ratio - 1)))
    return replace(rival, interval=lost, null=0.0)


def predicted_fastest_cap(predicted_s: Mapping[float, float], caps: Iterable[float]) -> float:
    """Chooses the cap that is predicted to be fastest; of equal ones the largest."""
    return min(sorted(caps, reverse=True), key=lambda cap: predicted_s[cap])
