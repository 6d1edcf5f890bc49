"""One sweep of assignment 4, opened for its notebook: speedups, parts of the step, laws.

A run directory may hold several sweeps, one per stage: of the synthetic model on the machine's own
ranks, and of a replay on more emulated hosts than the machine has cores, which gives a law points
enough to be fitted to.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from common.analysis.runs import (
    DEPTHS,
    OfRun,
    Run,
    complete_runs,
    given_folder,
    origin,
    recorded_assignment,
)
from common.analysis.scaling.laws import FittedLaw, fit_law
from common.analysis.scaling.prediction import predicted_steps, prediction_errors
from common.analysis.scaling.training_run import STRONG, WEAK
from common.analysis.step_parts import decompose_all, parts_by_round
from common.analysis.sweep_speedups import speedups_by_round, sweep_speedups
from common.diagnose.evidence.evidence import (
    ARMS,
    ASSIGNMENT,
    BUCKETS,
    FACTS,
    STEPS,
    choose_run,
    read_tables,
)
from common.errors import UserError
from common.exercises.scaling_fit import AMDAHL, GUSTAFSON, USL
from common.judged import Judged
from common.runtime.paths import relative_to_project
from common.runtime.wording import counted

LABEL, MLP, REPLAY = "assignment4-sweep", "mlp", "replay"
LAWS = {STRONG: (AMDAHL, USL), WEAK: (GUSTAFSON, USL)}
"""The laws that speak of each regime."""
COMMAND = "uv run ddplab run assignment4"
REPLAYING = "`assignments/assignment4/README.md` has the command that measures one"


@dataclass(frozen=True, eq=False)
class Series:
    """Arms that differ in their number of ranks only.

    Attributes:
        batch: Global batch (strong) or batch of each rank (weak).
        table: Rows of ``sweep_speedups`` in the order of ranks.
        rounds: Speedup in each round, [rounds, arms].
    """

    regime: str
    batch: int
    table: pd.DataFrame
    rounds: NDArray

    @property
    def label(self) -> str:
        kept = "global batch" if self.regime == STRONG else "batch per rank"
        return f"{kept} {self.batch:,}"

    @cached_property
    def laws(self) -> tuple[list[FittedLaw], list[tuple[str, str]]]:
        """Returns the laws of the regime, fitted; and the names of others with the reason."""
        fitted, refused = [], []
        for law in LAWS[self.regime]:
            try:
                fitted.append(
                    fit_law(
                        law,
                        self.table["world_size"],
                        self.table["speedup"],
                        low=self.table["speedup_low"],
                        high=self.table["speedup_high"],
                        rounds=self.rounds,
                    )
                )
            except UserError as reason:
                refused.append((law.name, str(reason)))
        return fitted, refused

    def law_errors(self, law: FittedLaw) -> list[Judged]:
        """Judges how far a law is off the speedup on each number of ranks above 1, as a share."""
        return [
            row.judged.map(
                lambda speedup, n=row.world_size: float(law.predict([n])[0]) / speedup - 1, null=0.0
            )
            for row in self.table.itertuples()
            if row.world_size > 1
        ]


@dataclass(frozen=True, eq=False)
class SweepRun(OfRun):
    """One sweep, with the tables that it measured, by file name."""

    tables: Mapping[str, pd.DataFrame]

    @property
    def origin(self) -> str:
        """Returns whose data these are, as Markdown."""
        return origin(f"{self.caption}. {self.model}", self.opened.recorded, COMMAND)

    @property
    def workload(self) -> str:
        """Returns mlp, text or replay."""
        return workload_of(self.opened)

    @property
    def model(self) -> str:
        """Returns what was trained, in words."""
        facts = self.tables.get(FACTS)
        if facts is not None and len(facts):
            return str(facts["model"].iloc[0])
        return str(self.opened.settings.get("model", self.workload))

    @property
    def arms(self) -> pd.DataFrame:
        """Returns ``arms.csv``."""
        return self.tables[ARMS]

    @property
    def steps(self) -> pd.DataFrame:
        """Returns ``steps.csv``."""
        return self.tables[STEPS]

    @property
    def ranks(self) -> int:
        """Returns the most ranks of an arm."""
        return int(self.arms["world_size"].max())

    @cached_property
    def speedups(self) -> pd.DataFrame:
        """Returns a row per arm; columns in ``sweep_speedups``."""
        return sweep_speedups(self.arms, self.steps, self.opened.machine_state)

    @cached_property
    def parts(self) -> pd.DataFrame:
        """Returns a row per arm, its step in parts; columns in ``decompose_all``."""
        return decompose_all(self.arms, self.steps, self._watched)

    @cached_property
    def parts_by_round(self) -> pd.DataFrame:
        """Returns ``parts`` of each round, with the column round."""
        return parts_by_round(self.arms, self.steps, self._watched)

    @property
    def _watched(self) -> pd.DataFrame | None:
        buckets = self.tables.get(BUCKETS)
        return buckets if buckets is not None and len(buckets) else None

    @cached_property
    def noise_floor(self) -> float | None:
        """Returns how much arms differ that run the same step under two regimes' names (median).

        Strong and weak scaling meet at the most ranks. None where no two arms are the same.
        """
        same = self.speedups.groupby(["world_size", "batch_per_rank", "change"])["step_ms"]
        apart = (same.max() / same.min() - 1)[same.size() > 1]
        return float(apart.median()) if len(apart) else None

    @cached_property
    def predictions(self) -> tuple[pd.DataFrame | None, str]:
        """Returns predicted steps by arm (see ``predicted_steps``), or why there are none."""
        try:
            return predicted_steps(self.opened, self.tables), ""
        except UserError as reason:
            return None, str(reason)

    @property
    def errors(self) -> pd.DataFrame | None:
        """Returns predicted beside measured steps (``prediction_errors``); None without any."""
        predicted, _ = self.predictions
        return None if predicted is None else prediction_errors(self.parts, predicted)

    @property
    def exchanges(self) -> pd.DataFrame:
        """Returns ``parts`` of the arms on several ranks whose buckets were watched."""
        return self.parts[self.parts["world_size"] > 1].dropna(subset="total_ratio")

    @cached_property
    def series(self) -> list[Series]:
        """Returns the series, weak ones first, then by batch.

        Without changes and without what has no speedup.
        """
        table = self.speedups
        kept = table[(table["change"] == "none") & (table["refused"] == "")]
        rounds = speedups_by_round(self.arms, self.steps)
        series = []
        for regime, column in ((WEAK, "batch_per_rank"), (STRONG, "global_batch")):
            for batch, rows in kept[kept["regime"] == regime].groupby(column):
                rows = rows.sort_values("world_size")
                if len(rows) > 1 and rows["world_size"].iloc[0] == 1:
                    by_round = rounds[rows["arm"].tolist()].dropna()
                    series.append(Series(regime, int(batch), rows, by_round.to_numpy()))
        return series


ARM = ["world_size", "batch_per_rank", "regime", "change"]
"""Columns that name an arm."""


def arm_name(world_size: float, batch_per_rank: float, regime: object, change: object) -> str:
    """Returns an arm's name from its columns: ``2 ranks, batch 64 each (weak)``."""
    per_rank = "" if world_size == 1 else " each"
    which = f" ({regime})" if isinstance(regime, str) and regime else ""
    changed = "" if change in ("none", np.nan) else f", {change}"
    return (
        f"{counted(int(world_size), 'rank')}, batch {batch_per_rank:,.0f}{per_rank}{changed}{which}"
    )


@dataclass(frozen=True, eq=False)
class ScalingLab:
    """The sweeps of a run.

    Attributes:
        sweep: Sweep of the synthetic model on this machine's ranks.
        replay: Sweep of a replay on emulated hosts, or None.
        left_out: Reason why ``replay`` is not of this run; empty where it is.
    """

    sweep: SweepRun
    replay: SweepRun | None
    left_out: str

    @property
    def replay_origin(self) -> str:
        """Returns whose replay this is, or why there is none, as Markdown."""
        if self.replay is None:
            return f"> No replay to show: {self.left_out}."
        what = f"{self.replay.caption}. {self.replay.model}"
        if not self.replay.opened.recorded:
            return origin(what, recorded=False)
        left_out = "; ".join(filter(None, [self.left_out, REPLAYING]))
        return origin(what, recorded=True, left_out=left_out)


def open_assignment4(run_dir: str | Path | None = None) -> ScalingLab:
    """Opens the sweeps of a run; by default the newest complete one, or else recorded ones.

    Raises UserError for no such directory, or none with a complete sweep.
    """
    folder = given_folder(choose_run(run_dir, find_sweeps))
    sweeps = find_sweeps(folder)
    if not sweeps:
        raise UserError(
            f"{relative_to_project(folder)}: no complete sweep (benchmark.py --sweep) in it"
        )
    synthetic = [run for run in sweeps if workload_of(run) == MLP] or sweeps
    sweep, replays = _open(synthetic[-1]), _replays(sweeps)
    if replays:
        return ScalingLab(sweep, max(replays, key=lambda replay: replay.ranks), "")
    reason = Run(folder, folder).environment.get("emulated_hosts_left_out")
    reason = str(reason or "this run measured no replay on emulated hosts")
    recorded = _replays(find_sweeps(recorded_assignment(ASSIGNMENT)))
    return ScalingLab(sweep, recorded[-1] if recorded else None, reason)


def find_sweeps(folder: Path) -> list[Run]:
    """Finds the complete sweeps in a run or in its stages, the oldest first."""
    runs = complete_runs(folder, ARMS, DEPTHS)
    sweeps = [run.folder for run in runs if run.environment.get("label") == LABEL]
    return [Run(sweep, sweep) for sweep in sweeps]  # its own folder is what captions name


def workload_of(opened: Run) -> str:
    """Returns what a sweep measured: mlp, text or replay."""
    return str(opened.settings.get("workload", MLP))


def _replays(sweeps: Sequence[Run]) -> list[SweepRun]:
    return [_open(run) for run in sweeps if workload_of(run) == REPLAY]


def _open(opened: Run) -> SweepRun:
    return SweepRun(opened, read_tables(opened.folder, with_rows=(ARMS, STEPS)))
