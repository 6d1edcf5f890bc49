"""All modes measured on the same global batches: ratios to static, step by step.

Maps of titles say how a notebook shows them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pandas as pd

from common.analysis.micro_batches.training_runs import dataset_name, in_order, mode_name
from common.analysis.runs import OfRun, Run, caption_of
from common.analysis.show import RATIO, interval_format, judged_format, ratio_table
from common.analysis.step_parts import flags
from common.csv_tables import numbers, read_table
from common.errors import UserError
from common.judged import FIRST_PAGE_ROUNDS, Fastest, Judged, compared, fastest
from common.runtime.paths import relative_to_project
from common.samples import DRAWS, Interval, mean_ratio, slowest_rank, welch
from common.tables import CALIBRATION_COLUMNS, MODE_COLUMNS

MODE_TIMES, CALIBRATION, SLOW_RANK = "mode-times.csv", "calibration.csv", "slow-rank.csv"
SLOW_RANK_COLUMNS = (
    "mode",
    "step",
    "rank",
    "step_time_ms",
    "slow_factor",
    "estimated_factor",
)
CONTROL, STATIC, DYNAMIC = "control", "static", "dynamic"
PAYS_FROM = 0.95
"""Upper bound on the ratio to static of a step that is called a gain."""

INTERVAL = ("95 % interval", interval_format())
"""Title of ``judged``; static, which is compared with itself, has none."""
VERDICTS = {
    "mode": ("mode", mode_name),
    "differs": "differs from static",
    "tied": "tied with the fastest",
    "ratio": "step over static",
    "judged": INTERVAL,
    "over_dynamic": ("over dynamic", judged_format()),
}
"""Titles of ``ModeComparison.summary``: what is told apart."""
MODES = {
    "mode": ("mode", mode_name),
    "mean_ms": "mean step (ms)",
    "p95_ms": "P95 (ms)",
    "ratio": "mean",
    "p95_ratio": "P95",
    "paired_median": "median",
    "compute_ratio": "computed",
    "padded_ratio": "promised",
    "planning_ms": ("plan (ms)", "{:.2f}"),
    "waiting": "waiting",
}
"""Titles of ``ModeComparison.summary``."""
PER_TEXT = {
    "mode": ("mode", mode_name),
    "differs": "differs from static",
    "same_batch": "same texts a step",
    "texts": ("texts a step", "{:.1f}"),
    "ratio": "time per text over static",
    "judged": INTERVAL,
    "over_dynamic": ("over dynamic", judged_format()),
}
"""Titles of ``ModeComparison.per_sample``."""
DATA_SETS = {
    "dataset": "data",
    "dynamic.differs": "differs from static",
    "pays": "pays",
    "steps": "steps",
    "dynamic.padded_ratio": "promised",
    "dynamic.compute_ratio": "computation",
    "dynamic.ratio": "step",
    "dynamic.judged": INTERVAL,
    "dynamic.p95_ratio": "P95",
}
"""Titles of comparisons that have a mode dynamic, a row per data set."""


@dataclass(frozen=True, eq=False)
class ModeComparison(OfRun):
    """Steps of every mode, measured in turns on the same ranks.

    Attributes:
        times: A row per step, mode and rank, with ``MODE_COLUMNS``.
        calibration: Measured times of passes over batch size and longest text, by rank, or None.
        slow_rank: Steps with one rank slowed on purpose, or None.
    """

    times: pd.DataFrame
    calibration: pd.DataFrame | None = None
    slow_rank: pd.DataFrame | None = None

    @property
    def caption(self) -> str:
        """Returns hardware, date and this comparison's own folder, for figures."""
        return caption_of(self.environment, self.opened.folder)

    @property
    def dataset(self) -> str:
        """Returns the data set's name."""
        return dataset_name(self.settings)

    @property
    def like(self) -> str:
        """Returns the name of the data set whose lengths these texts have."""
        synthetic = self.settings.get("dataset") == "synthetic"
        return str(self.settings.get("synthetic_like" if synthetic else "dataset", "?"))

    @property
    def ranks(self) -> int:
        """Returns the world size."""
        return int(self.times["rank"].max()) + 1

    @property
    def modes(self) -> list[str]:
        """Returns the modes that share static's global batches, static first."""
        same = self.times[self.times["same_batch"] & (self.times["mode"] != CONTROL)]
        return in_order(same["mode"])

    @property
    def own_batch_modes(self) -> list[str]:
        """Returns the modes that form batches of their own."""
        other = self.times[~self.times["same_batch"] & (self.times["mode"] != CONTROL)]
        return in_order(other["mode"])

    def slowest(self, column: str = "step_time_ms") -> pd.DataFrame:
        """Returns the slowest rank's value: a row per step, a column per mode of ``modes``."""
        rows = self.times[self.times["mode"].isin(self.modes)]
        by_step = slowest_rank(rows, column, by=["step", "mode"]).unstack("mode")
        return by_step[self.modes].dropna()

    def ratios(self) -> pd.DataFrame:
        """Returns ``slowest`` over static's on the same global batch: paired, by step."""
        slowest = self.slowest()
        return slowest.div(slowest[STATIC], axis=0)

    @property
    def conditions(self) -> dict[str, object]:
        """Returns scope, state of the machine and least rounds, as ``Judged`` takes them."""
        model, precision = (self.settings.get(name, "") for name in ("model_name", "precision"))
        network = self.environment.get("network") or self.environment.get("backend", "")
        scope = (self.dataset, model, f"{self.ranks} ranks", network, precision)
        return {
            "scope": ", ".join(filter(None, scope)),
            "machine": self.opened.machine_state,
            "least_rounds": FIRST_PAGE_ROUNDS,
        }

    @property
    def claims(self) -> int:
        """Returns the number of intervals that hold at once.

        They are those of all pairs of modes on the same batches, as any mode may turn out to be the
        fastest, which the others are compared with; and those of modes with their own batches, each
        over static and, where it was measured, over dynamic.
        """
        count, bases = len(self.modes), 2 if DYNAMIC in self.modes else 1
        return count * (count - 1) // 2 + bases * len(self.own_batch_modes)

    def step_time_ratios_to(self, base: str) -> dict[str, Judged]:
        """Returns each other mode's mean step over ``base``'s, paired by global batch."""
        times = self.slowest()
        return compared(times, base, claims=self.claims, ratio=mean_ratio, **self.conditions)

    @cached_property
    def judged(self) -> dict[str, Judged]:
        """Returns each mode's mean step over static's, paired by global batch; per text for modes
        that form batches of their own, whose steps have no counterpart."""
        return self.step_time_ratios_to(STATIC) | self._per_text_over(STATIC)

    @cached_property
    def over_dynamic(self) -> dict[str, Judged]:
        """Returns the same over dynamic's steps; empty without dynamic."""
        if DYNAMIC not in self.modes:
            return {}
        return self.step_time_ratios_to(DYNAMIC) | self._per_text_over(DYNAMIC)

    def _per_text_over(self, base: str) -> dict[str, Judged]:
        steps = self._texts_and_times
        return {
            mode: Judged(
                _rate_ratio(steps.loc[mode], steps.loc[base], self.claims), **self.conditions
            )
            for mode in self.own_batch_modes
        }

    @cached_property
    def fastest(self) -> Fastest | None:
        """Returns the fastest of ``modes``, and those that are tied with it."""
        times = self.slowest()
        return fastest(times, claims=self.claims, ratio=mean_ratio, **self.conditions)

    @cached_property
    def _texts_and_times(self) -> pd.DataFrame:
        """Returns the slowest rank's step_time_ms, and global_batch, by mode and step."""
        return slowest_rank(self.times, ["step_time_ms", "global_batch"], by=["mode", "step"])

    @cached_property
    def summary(self) -> pd.DataFrame:
        """Returns a row per mode of ``modes``; times are those of the slowest rank.

        Columns: mean_ms, p95_ms; ratio (mean over static's mean) with ratio_low and ratio_high
        (``judged``, a column too), p95_ratio; paired_median (of the ratios step by step);
        compute_ratio; padded_ratio (promised by the plan: the largest number of padded tokens of
        a rank, over static's); planning_ms (mean time that a step was held up by planning);
        waiting (share of all ranks' step time); differs (the verdict; None for static itself);
        tied (with the mode that looks fastest); over_dynamic (None for dynamic itself).
        """
        slowest, compute = self.slowest(), self.slowest("compute_time_ms")
        padded = self.slowest("padded_tokens")
        table = pd.DataFrame(
            {
                "mean_ms": slowest.mean(),
                "p95_ms": slowest.quantile(0.95),
                **self._ratio_columns(self.modes),
                "p95_ratio": slowest.quantile(0.95) / slowest[STATIC].quantile(0.95),
                "paired_median": self.ratios().median(),
                "compute_ratio": compute.mean() / compute[STATIC].mean(),
                "padded_ratio": padded.mean() / padded[STATIC].mean(),
            },
            index=pd.Index(self.modes, name="mode"),
        )
        table["planning_ms"] = self.times.groupby("mode")["planning_time_ms"].mean()
        table["waiting"] = self.waiting
        tied = self.fastest.tied if self.fastest else self.modes
        table["tied"] = table.index.isin(tied)
        table["over_dynamic"] = [self.over_dynamic.get(mode) for mode in table.index]
        return table

    def _ratio_columns(self, modes: Sequence[str]) -> dict[str, pd.Series]:
        """Returns ratio, its ends, differs and judged by mode; 1 and None of static."""
        table = ratio_table(self.judged, verdict="differs").reindex(modes)
        table.loc[STATIC, RATIO] = 1.0
        return dict(table.items())

    @property
    def dynamic(self) -> pd.Series | None:
        """Returns the row of mode dynamic in ``summary``; None where it was not measured."""
        return self.summary.loc[DYNAMIC] if DYNAMIC in self.modes else None

    @property
    def pays(self) -> bool:
        """Returns True if dynamic gains enough to be called a gain, by ``PAYS_FROM``."""
        ratio = self.judged.get(DYNAMIC)
        return ratio is not None and ratio.is_settled and ratio.estimate < PAYS_FROM

    @property
    def steps(self) -> int:
        """Returns the number of global batches that all modes were measured on."""
        return len(self.ratios())

    @cached_property
    def waiting(self) -> pd.Series:
        """Returns the share of all ranks' step time spent waiting for slower ranks, by mode."""
        sums = self.times.groupby("mode")[["waiting_time_ms", "step_time_ms"]].sum()
        return sums["waiting_time_ms"] / sums["step_time_ms"]

    @cached_property
    def noise_floor(self) -> float:
        """Returns the median relative difference between two random halves of static's steps.

        Global batches differ, so this is the noise of unpaired means; paired ratios have less.
        """
        times = self.slowest()[STATIC].to_numpy()
        # Each row of order is a permutation of the steps; its first and second half are compared.
        order = np.random.default_rng(0).random((DRAWS, len(times))).argsort(axis=1)
        half = len(times) // 2
        if half == 0:
            return float("nan")
        first, second = times[order[:, :half]].mean(axis=1), times[order[:, half:]].mean(axis=1)
        return float(np.median(np.abs(first / second - 1)))

    @cached_property
    def per_sample(self) -> pd.DataFrame:
        """Returns every mode per text, including those with batches of their own.

        Columns: same_batch, texts (a step, mean), ratio (to static), ratio_low, ratio_high, differs
        and judged, over_dynamic (of own batches).
        """
        modes = [*self.modes, *self.own_batch_modes]
        groups = self.times.groupby("mode")
        table = pd.DataFrame(
            {"same_batch": groups["same_batch"].first(), "texts": groups["global_batch"].mean()}
        ).loc[modes]
        over_dynamic = [
            self.over_dynamic.get(mode) if mode in self.own_batch_modes else None for mode in modes
        ]
        return table.assign(**self._ratio_columns(modes), over_dynamic=over_dynamic)


def read_comparison(run: Run) -> ModeComparison:
    """Reads the comparison of modes of a run, and what was calibrated and slowed beside it.

    Raises UserError for a table without a column, or without steps of static.
    """
    path = run.folder / MODE_TIMES
    name = relative_to_project(path)
    run.require(MODE_TIMES)
    times = read_table(path, MODE_COLUMNS)
    for column in ("step_time_ms", "global_batch"):
        times[column] = numbers(times, column, name, above=0)
    times["same_batch"] = flags(times["same_batch"])
    if STATIC not in set(times["mode"]):
        raise UserError(f"{name}: no steps of mode static, which the others are compared with")
    return ModeComparison(
        opened=run,
        times=times,
        calibration=_beside(run, CALIBRATION, CALIBRATION_COLUMNS),
        slow_rank=_beside(run, SLOW_RANK, SLOW_RANK_COLUMNS),
    )


def by_step(values: pd.Series, sizes: pd.Series) -> pd.Series:
    """Returns a number for each step, of which the mean is the sum of values over that of sizes.

    How far it is off that ratio is the linear part of the step's error, so intervals of means are
    those of the ratio.

    Source: Cochran, Sampling Techniques, 3rd edition, chapter 6 (ratio estimators), 1977.
    """
    ratio = values.sum() / sizes.sum()
    return ratio + (values - ratio * sizes) / sizes.mean()


def _rate_ratio(steps: pd.DataFrame, base: pd.DataFrame, claims: int) -> Interval:
    """Estimates the ratio of two times per text, of steps that have no counterpart.

    Args:
        steps, base: a row per step with step_time_ms and global_batch.
        claims: number of intervals that hold all at once.
    """
    logs = []
    for rows in (steps, base):
        rates = by_step(rows["step_time_ms"], rows["global_batch"])
        # The logarithm to first order, so that the mean is that of the rate.
        logs.append(np.log(rates.mean()) + rates / rates.mean() - 1)
    return welch(*logs, claims=claims).map(np.exp)


def _beside(run: Run, name: str, columns: Sequence[str]) -> pd.DataFrame | None:
    return read_table(run.folder / name, columns) if run.has(name) else None
