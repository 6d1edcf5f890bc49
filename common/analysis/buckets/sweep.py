"""A measured sweep over bucket caps, and what a prediction of it is worth."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from common.csv_tables import numbers, read_table
from common.errors import UserError
from common.perfmodel.buckets import DdpOptions, cap_label
from common.perfmodel.ddp.best_cap import regret
from common.perfmodel.ddp.bucketings import profile_buckets
from common.perfmodel.ddp.profile import BackwardProfile
from common.samples import median_standard_error, per_round, slowest_rank

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
    """

    steps: pd.DataFrame
    world_size: int

    def summary(self, column: str = "backward_time_ms") -> pd.DataFrame:
        """Tabulates buckets, median time, quartiles and number of samples, by ascending cap."""
        groups = self.steps.groupby("bucket_cap_mib", dropna=False)
        quantiles = groups[column].quantile([0.25, 0.5, 0.75]).unstack()
        quantiles.columns = ["q25_ms", "median_ms", "q75_ms"]
        table = quantiles.assign(
            num_buckets=groups["num_buckets"].first(), samples=groups[column].size()
        )
        return table.reset_index().sort_values("bucket_cap_mib", ignore_index=True)

    def default(self) -> pd.Series | None:
        """Returns the row of ``summary`` of DDP's default; None where it was not measured."""
        table = self.summary()
        rows = table[table["bucket_cap_mib"].isna()]
        return None if rows.empty else rows.iloc[0]

    def gains_over_default(self, cap_mib: float) -> list[float]:
        """Returns, by round, 1 − T(cap) / T(default) of the rounds' median backward passes.

        Empty where the default was not measured.
        """
        by_round = per_round(self.steps, "backward_time_ms", "bucket_cap_mib")
        chosen, default = by_round.reindex(columns=[cap_mib, np.nan]).to_numpy().T
        gains = 1 - chosen / default
        return gains[~np.isnan(gains)].tolist()

    def accuracy_of(self, predict: Callable[[float], float]) -> Accuracy:
        """Holds predicted seconds of the backward pass, by cap in MiB, against the sweep."""
        return evaluate(self, {cap: predict(cap) for cap in self.distinct().measured_s()})

    def noise_floor(self, column: str = "backward_time_ms") -> float:
        """Computes the median over caps of |A/B − 1|; A, B are medians of two halves of the rounds.

        What two measurements of the same thing differ by; NaN with fewer than two rounds. Rounds
        go to the halves in pairs, as a round and the next visit the caps in opposite order.
        """
        pair = 2 if self.steps["round"].nunique() >= 4 else 1
        even = self.steps["round"] // pair % 2 == 0
        halves = [
            self.steps[half].groupby("bucket_cap_mib", dropna=False)[column].median()
            for half in (even, ~even)
        ]
        if halves[1].empty:
            return float("nan")
        return float((halves[0] / halves[1] - 1).abs().median())

    def standard_errors(self) -> pd.Series:
        """Returns by cap the standard error of its median, relative (``median_standard_error``)."""
        errors = {}
        for cap, steps in self.steps.groupby("bucket_cap_mib", dropna=False):
            times = steps.pivot(
                index="round", columns="iteration", values="backward_time_ms"
            ).to_numpy()
            errors[cap] = median_standard_error(times)
        return pd.Series(errors)

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
            label = cap_label(options.bucket_cap_mib)
            if recorded[:3] != expected[:3]:
                raise UserError(
                    f"at a cap of {label} MiB DDP made {recorded[0]} buckets, the first of "
                    f"{recorded[1]:,} bytes; the gradients given make {len(buckets)}, the first of "
                    f"{sizes[0]:,}: another model or DDP options"
                )
            if recorded != expected[: len(recorded)]:
                raise UserError(
                    f"at a cap of {label} MiB DDP made {recorded[0]} buckets of other sizes than "
                    "the gradients given make: another model or DDP options"
                )

    def smallest_alike(self) -> dict[float, float]:
        """Maps each explicit cap to the smallest cap (MiB) that gave the same buckets."""
        explicit = self.steps.dropna(subset="bucket_cap_mib")
        buckets = explicit.groupby(bucket_columns(explicit))
        smallest = buckets["bucket_cap_mib"].transform("min")
        return dict(zip(explicit["bucket_cap_mib"], smallest, strict=True))

    def widths(self) -> dict[float, float]:
        """Maps each cap of ``distinct`` to the largest explicit cap (MiB) that gave its buckets."""
        widths: dict[float, float] = {}
        for cap, smallest in sorted(self.smallest_alike().items()):
            widths[smallest] = cap
        return widths

    def distinct(self) -> BucketSweep:
        """Joins caps that gave the same buckets to one case, under the smallest of them."""
        explicit = self.steps.dropna(subset="bucket_cap_mib")
        joined = explicit["bucket_cap_mib"].map(self.smallest_alike())
        return BucketSweep(explicit.assign(bucket_cap_mib=joined), self.world_size)


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
    return BucketSweep(slowest_steps(table), len(ranks))


def slowest_steps(table: pd.DataFrame) -> pd.DataFrame:
    """Reduces one row per step and rank to one per step: its times are its slowest rank's."""
    columns = bucket_columns(table)
    if BUCKET_BYTES in columns:  # a column of single buckets is read as numbers
        table = table.assign(bucket_bytes=table[BUCKET_BYTES].astype(str))
    return slowest_rank(table, TIMES, by=[*KEYS, *columns], sort=False).reset_index()


def bucket_columns(table: pd.DataFrame) -> list[str]:
    """Returns the columns that tell bucketings apart: all sizes where a table has them."""
    return [*BUCKETS, BUCKET_BYTES] if BUCKET_BYTES in table else BUCKETS


@dataclass(frozen=True)
class Accuracy:
    """A prediction held against a sweep.

    Attributes:
        table: per distinct bucketing: bucket_cap_mib (its smallest cap), num_buckets,
            predicted_ms, measured_ms and error (predicted / measured − 1).
        median_error, worst_error: median and largest |error|.
        noise_floor: noise floor of the sweep.
        predicted_best_mib, measured_best_mib: the fastest of these caps.
        regret: what following the prediction costs, as a fraction of the best measured time.
    """

    table: pd.DataFrame
    median_error: float
    worst_error: float
    noise_floor: float
    predicted_best_mib: float
    measured_best_mib: float
    regret: float

    @property
    def regret_is_clear(self) -> bool:
        """Returns True if the regret can be told from noise; of a single round, it never can."""
        return self.regret > self.noise_floor


def evaluate(sweep: BucketSweep, predicted_s: Mapping[float, float]) -> Accuracy:
    """Compares predicted backward times (seconds by cap in MiB) with a sweep's medians.

    Caps that gave the same buckets are one case. Raises UserError if no cap is in both.
    """
    sweep = sweep.distinct()
    measured = sweep.measured_s()
    caps = [cap for cap in measured if cap in predicted_s]
    if not caps:
        raise UserError("no cap was both predicted and measured")
    summary = sweep.summary().set_index("bucket_cap_mib").loc[caps]
    table = pd.DataFrame(
        {
            "bucket_cap_mib": caps,
            "num_buckets": summary["num_buckets"].to_numpy(),
            "predicted_ms": [predicted_s[cap] * 1e3 for cap in caps],
            "measured_ms": summary["median_ms"].to_numpy(),
        }
    )
    table["error"] = table["predicted_ms"] / table["measured_ms"] - 1
    predicted_best = predicted_fastest(predicted_s, caps)
    return Accuracy(
        table=table,
        median_error=float(table["error"].abs().median()),
        worst_error=float(table["error"].abs().max()),
        noise_floor=sweep.noise_floor(),
        predicted_best_mib=predicted_best,
        measured_best_mib=min(caps, key=lambda cap: measured[cap]),
        regret=regret({cap: measured[cap] for cap in caps}, predicted_best),
    )


def predicted_fastest(predicted_s: Mapping[float, float], caps: Iterable[float]) -> float:
    """Chooses the cap that is predicted to be fastest; of equal ones the largest."""
    return min(sorted(caps, reverse=True), key=lambda cap: predicted_s[cap])


def exposed_record(path: Path | str) -> pd.Series:
    """Reads exposed communication by cap, in ms, from DDP's record (``ddp-overlap-times.csv``).

    Communication minus its overlap with computation: from a rank's last gradient until all buckets
    are reduced and copied back. A rank whose computation ends early waits in there for the others;
    the one with the least waits for nobody, so a step's is the least over ranks. The median over
    steps.
    """
    times = ["communication_time_ms", "overlap_time_ms"]
    table = read_table(path, [*KEYS, "rank", *times])
    exposed = table["communication_time_ms"] - table["overlap_time_ms"]
    by_step = exposed.groupby([table[key] for key in KEYS]).min()
    return by_step.groupby("bucket_cap_mib").median()


def local_backward_s(path: Path | str) -> float:
    """Reads the median backward time (s) without DDP in a sweep's rounds (``local-times.csv``)."""
    table = read_table(path, ["round", "iteration", "rank", "backward_time_ms"])
    slowest = slowest_rank(table, "backward_time_ms", by=["round", "iteration"])
    return float(slowest.median()) / 1e3
