"""What a run has left as evidence: its tables, and nothing that says what was done to it.

``config.yaml`` is not read. What a cause is judged by was timed, counted or seen; ``arms.csv`` says
which steps belong together and what a change would start from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import pandas as pd

from common.analysis import scaling_columns
from common.analysis.opened_run import given_folder
from common.analysis.step_parts import STEP, TIMED, StepParts, decompose, flags
from common.analysis.sweep_speedups import step_times_by_round, unwatched_steps
from common.errors import UserError
from common.perfmodel.tables import read_table
from common.runtime.paths import relative_to_project
from common.runtime.run_directory import read_environment

ARMS, STEPS, BUCKETS = "arms.csv", "steps.csv", "buckets.csv"
SAMPLES, PLACEMENT, FACTS = "samples.csv", "placement.csv", "facts.csv"
PROBES, COSTS, EPOCHS = "probes.csv", "costs.csv", "epochs.csv"
READY_TIMES, ALL_REDUCE = "gradient-ready-times.csv", "allreduce-samples.csv"
COLUMNS = {
    ARMS: scaling_columns.ARM_COLUMNS,
    STEPS: scaling_columns.STEP_COLUMNS,
    BUCKETS: scaling_columns.BUCKET_COLUMNS,
    SAMPLES: scaling_columns.SAMPLE_COLUMNS,
    PLACEMENT: scaling_columns.PLACEMENT_COLUMNS,
    FACTS: scaling_columns.FACT_COLUMNS,
    PROBES: scaling_columns.PROBE_COLUMNS,
    COSTS: scaling_columns.COST_COLUMNS,
    EPOCHS: scaling_columns.EPOCH_COLUMNS,
}
NEEDED = (ARMS, STEPS)


class NotJudged(Exception):
    """A cause cannot be judged; the message says what is missing."""


@dataclass(frozen=True, eq=False)
class Evidence:
    """One arm of a run.

    Attributes:
        folder: where the tables lie.
        environment: its environment record; only ``network`` and ``world_size`` are looked at.
        arm: the row of ``arms.csv``.
        tables: those that were found, by file name; of tables with arms, this arm's rows.
    """

    folder: Path
    environment: dict
    arm: pd.Series
    tables: dict[str, pd.DataFrame]

    @property
    def name(self) -> str:
        """The folder as a user would type it."""
        return relative_to_project(self.folder)

    @property
    def world_size(self) -> int:
        """Ranks that wrote steps."""
        return int(self.tables[STEPS]["rank"].nunique())

    @property
    def emulated(self) -> bool:
        """Whether the hosts share one machine."""
        return "emulated" in str(self.environment.get("network", ""))

    def need(self, *names: str) -> list[pd.DataFrame]:
        """These tables; NotJudged with the first that is missing or has no rows."""
        for name in names:
            if name not in self.tables:
                raise NotJudged(f"no {name} in {self.name}")
            if self.tables[name].empty:
                raise NotJudged(f"{name} in {self.name} has no rows of arm {self.arm['arm']}")
        return [self.tables[name] for name in names]

    @cached_property
    def measured(self) -> pd.DataFrame:
        """Steps that are no warm-up, of all kinds."""
        steps = self.tables[STEPS]
        return steps[~flags(steps["warmup"])].fillna(dict.fromkeys(STEP, 0))

    @cached_property
    def timed(self) -> pd.DataFrame:
        """Those measured in parts; NotJudged where there are none."""
        timed = self.measured[self.measured["kind"] == TIMED]
        if timed.empty:
            raise NotJudged(f"{STEPS} in {self.name} has no steps measured in parts")
        return timed

    def by_step(self, column: str) -> pd.DataFrame:
        """A column of the timed steps: a row per step, a column per rank."""
        return self.timed.pivot_table(index=STEP, columns="rank", values=column).dropna()

    @cached_property
    def parts(self) -> StepParts:
        """The mean step in parts; NotJudged where no step was measured in parts."""
        if self.timed.empty:
            raise NotJudged(f"{STEPS} in {self.name} has no steps measured in parts")
        return decompose(self.tables[STEPS], int(self.arm["arm"]), self.tables.get(BUCKETS))

    @cached_property
    def unwatched(self) -> pd.DataFrame:
        """Returns the measured rows that the run's speed is taken from (``unwatched_steps``)."""
        return unwatched_steps(self.measured)

    @cached_property
    def step_times_ms(self) -> pd.Series:
        """Returns the slowest rank's time of each unwatched step, in the order of the run."""
        return self.unwatched.groupby(STEP)["step_time_ms"].max()

    @cached_property
    def step_ms(self) -> float:
        """Returns the median over rounds of a round's median step, as a sweep's speedups do."""
        return float(step_times_by_round(self.measured)[self.arm["arm"]].median())

    @cached_property
    def noise(self) -> float:
        """The standard error of the median step, as a share of it."""
        return standard_error(self.step_times_ms) / self.step_ms

    @property
    def throughput(self) -> float:
        """Returns the samples of all ranks per second, at the median unwatched step."""
        samples = self.unwatched.groupby(STEP)["samples"].sum().median()
        return float(samples) / self.step_ms * 1e3

    @property
    def batch_per_rank(self) -> int:
        return int(self.arm["batch_per_rank"])

    @property
    def accumulation(self) -> int:
        return int(self.arm["accumulation"])


def standard_error(values: Sequence[float] | pd.Series) -> float:
    """Of the median, from the median absolute deviation: 1.2533 · 1.4826 · MAD / √n (normal)."""
    array = np.asarray(values, dtype=float)
    deviation = np.median(np.abs(array - np.median(array)))
    return float(1.2533 * 1.4826 * deviation / np.sqrt(len(array)))


def open_evidence(folder: Path | str, arm: int | None = None) -> Evidence:
    """The evidence of one arm of a run.

    Args:
        folder: a run directory, complete or not.
        arm: which of ``arms.csv``; by default the one with most ranks and no change, the first of
            several.

    Raises:
        UserError: no such folder, no ``arms.csv`` or ``steps.csv``, a table of another schema, no
            such arm, or no measured step in it.
    """
    folder = given_folder(folder)
    for name in NEEDED:
        if not (folder / name).is_file():
            raise UserError(
                f"{relative_to_project(folder)}: no {name}; a diagnosis needs a complete run of "
                "assignment 4 (benchmark.py or train_text.py)"
            )
    tables = {
        name: _read(folder / name, columns)
        for name, columns in COLUMNS.items()
        if (folder / name).is_file()
    }
    row = _choose(tables[ARMS], arm, folder)
    for name, table in tables.items():
        if "arm" in table.columns and name != ARMS:
            own = table[table["arm"] == row["arm"]]
            # Probes of another arm serve as well: times are per sample, all-reduces per byte.
            tables[name] = table if own.empty and name == PROBES else own
    evidence = Evidence(folder, read_environment(folder), row, tables)
    if evidence.measured.empty:
        raise UserError(
            f"{relative_to_project(folder / STEPS)}: arm {row['arm']} has no step after its warm-up"
        )
    return evidence


def baseline_arm(evidence: Evidence) -> int | None:
    """The arm of the same run that shows the same on one rank; None where there is none."""
    arms = evidence.tables[ARMS]
    own = evidence.arm
    regime = own["regime"] if isinstance(own["regime"], str) else ""
    regimes, changes = (arms[name].astype(object) for name in ("regime", "change"))
    change = own["change"] if isinstance(own["change"], str) else "none"
    alike = arms[
        (arms["world_size"] == 1)
        & (regimes.where(regimes.notna(), "") == regime)
        & (changes.where(changes.notna(), "none") == change)
    ]
    if regime == "strong":
        alike = alike[alike["global_batch"] == own["global_batch"]]
    else:
        alike = alike[alike["batch_per_rank"] == own["batch_per_rank"]]
    return int(alike["arm"].iloc[0]) if len(alike) else None


def _choose(arms: pd.DataFrame, arm: int | None, folder: Path) -> pd.Series:
    if arm is not None:
        found = arms[arms["arm"] == arm]
        if found.empty:
            raise UserError(
                f"{relative_to_project(folder)}: no arm {arm}; {ARMS} has "
                f"{', '.join(map(str, arms['arm']))}"
            )
        return found.iloc[0]
    unchanged = arms[arms["change"].fillna("none") == "none"]
    candidates = unchanged if len(unchanged) else arms
    return candidates.loc[candidates["world_size"].idxmax()]


def _read(path: Path, columns: Sequence[str]) -> pd.DataFrame:
    """A table of this schema; one with a header alone is a table without rows."""
    try:
        return read_table(path, columns)
    except UserError as error:
        if "no rows" in str(error):
            return pd.DataFrame(columns=list(columns))
        raise
