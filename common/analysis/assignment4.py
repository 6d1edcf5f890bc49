"""One sweep of assignment 4, opened for its notebook: speedups, parts of the step, laws.

A run directory may hold several sweeps, one per stage: of the synthetic model on the machine's own
ranks, and of a replay on more emulated hosts than the machine has cores, which gives a law points
enough to be fitted to.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import pandas as pd
import yaml
from numpy.typing import NDArray

from common.analysis.evidence import ARMS, BUCKETS, FACTS, PROBES, STEPS
from common.analysis.opened_run import given_folder, recorded_assignment
from common.analysis.scaled_prediction import predicted_steps
from common.analysis.scaling import STRONG, WEAK
from common.analysis.scaling_columns import ARM_COLUMNS, STEP_COLUMNS
from common.analysis.scaling_laws import AMDAHL, GUSTAFSON, USL, FittedLaw, fit_law
from common.analysis.step_parts import decompose_all
from common.analysis.sweep_speedups import step_times_by_round, sweep_speedups
from common.errors import UserError
from common.perfmodel.tables import read_table
from common.runtime.paths import project_root, relative_to_project
from common.runtime.run_directory import read_environment

LABEL, REPLAY = "assignment4-sweep", "replay"
LAWS = {STRONG: (AMDAHL, USL), WEAK: (GUSTAFSON, USL)}
"""The laws that speak of each regime."""
COMMAND = "uv run ddplab run assignment4"


@dataclass(frozen=True, eq=False)
class Series:
    """Arms that differ in their number of ranks only.

    Attributes:
        batch: the global batch (strong) or that of each rank (weak).
        table: rows of ``sweep_speedups`` in the order of ranks.
        rounds: [rounds, arms], the speedup in each round.
    """

    regime: str
    batch: int
    table: pd.DataFrame
    rounds: NDArray

    @property
    def label(self) -> str:
        kept = "global batch" if self.regime == STRONG else "batch per rank"
        return f"{kept} {self.batch:,}"

    @property
    def most(self) -> pd.Series:
        """The row with the most ranks."""
        return self.table.iloc[-1]

    @cached_property
    def laws(self) -> tuple[list[FittedLaw], list[str]]:
        """The laws of the regime, fitted, and why others are not."""
        fitted, refused = [], []
        for law in LAWS[self.regime]:
            try:
                fitted.append(
                    fit_law(
                        *(law, self.table["world_size"], self.table["speedup"]),
                        low=self.table["speedup_low"],
                        high=self.table["speedup_high"],
                        rounds=self.rounds,
                    )
                )
            except UserError as reason:
                refused.append(str(reason))
        return fitted, refused


@dataclass(frozen=True, eq=False)
class SweepRun:
    """One sweep.

    Attributes:
        recorded: whether these are measurements that came with the project.
        caption: hardware, date and source, for figures.
    """

    folder: Path
    recorded: bool
    caption: str
    settings: dict
    environment: dict
    arms: pd.DataFrame
    steps: pd.DataFrame
    buckets: pd.DataFrame | None
    probes: pd.DataFrame | None
    facts: pd.DataFrame | None

    @property
    def workload(self) -> str:
        """mlp, text or replay."""
        return str(self.settings.get("workload", "mlp"))

    @property
    def model(self) -> str:
        """What was trained, in words."""
        if self.facts is not None and len(self.facts):
            return str(self.facts["model"].iloc[0])
        return str(self.settings.get("model", self.workload))

    @property
    def ranks(self) -> int:
        """The most ranks of an arm."""
        return int(self.arms["world_size"].max())

    @cached_property
    def speedups(self) -> pd.DataFrame:
        """A row per arm; columns in ``sweep_speedups``."""
        return sweep_speedups(self.arms, self.steps)

    @cached_property
    def parts(self) -> pd.DataFrame:
        """A row per arm, its step in parts; columns in ``decompose_all``."""
        return decompose_all(self.arms, self.steps, self.buckets)

    def parts_in(self, regime: str) -> pd.DataFrame:
        """The same for the arms of one regime."""
        return self.parts[self.parts["regime"] == regime]

    @cached_property
    def noise_floor(self) -> float | None:
        """What steps of arms differ by that are the same but for their regime's name (median).

        Strong and weak scaling meet at the most ranks. None where no two arms are the same.
        """
        same = self.speedups.groupby(["world_size", "batch_per_rank", "change"])["step_ms"]
        apart = (same.max() / same.min() - 1)[same.size() > 1]
        return float(apart.median()) if len(apart) else None

    @cached_property
    def predictions(self) -> tuple[pd.DataFrame | None, str]:
        """Predicted steps by arm (columns in ``predicted_steps``), or why there are none."""
        try:
            return predicted_steps(self.folder, self.arms), ""
        except UserError as reason:
            return None, str(reason)

    @cached_property
    def series(self) -> list[Series]:
        """Weak ones first, then by batch; without changes and without what has no speedup."""
        table = self.speedups
        kept = table[(table["change"] == "none") & (table["refused"] == "")]
        rounds = step_times_by_round(self.steps)
        found = []
        for regime, column in ((WEAK, "batch_per_rank"), (STRONG, "global_batch")):
            for batch, rows in kept[kept["regime"] == regime].groupby(column):
                rows = rows.sort_values("world_size")
                if len(rows) > 1 and rows["world_size"].iloc[0] == 1:
                    by_round = _by_round(rows, rounds)
                    found.append(Series(regime, int(batch), rows, by_round))
        return found

    def where_from(self) -> str:
        """Whose data these are, as Markdown."""
        what = f"{self.caption}. {self.model}"
        if self.recorded:
            return f"> **Recorded data, not yours.** {what}. `{COMMAND}` measures here."
        return f"> Measured in this run: {what}."


@dataclass(frozen=True, eq=False)
class ScalingLab:
    """The sweeps of a run.

    Attributes:
        sweep: the synthetic model on this machine's ranks.
        replay: a replay on emulated hosts, or None.
        left_out: why ``replay`` is not of this run; empty where it is.
    """

    sweep: SweepRun
    replay: SweepRun | None
    left_out: str


def open_assignment4(run_dir: str | Path | None = None) -> ScalingLab:
    """The sweeps of a run; by default the newest complete one, or else recorded ones.

    Raises UserError for no such directory, or none with a complete sweep.
    """
    folder = _choose(run_dir)
    sweeps = [_read(path) for path in _sweeps(folder)]
    if not sweeps:
        raise UserError(
            f"{relative_to_project(folder)}: no complete sweep (benchmark.py --sweep) in it"
        )
    own = [sweep for sweep in sweeps if sweep.workload == "mlp"] or sweeps
    replays = [sweep for sweep in sweeps if sweep.workload == REPLAY]
    if replays:
        return ScalingLab(own[-1], max(replays, key=lambda sweep: sweep.ranks), "")
    reason = read_environment(folder).get("emulated_hosts_left_out")
    reason = str(reason or "this run measured no replay on emulated hosts")
    recorded = [_read(path) for path in _sweeps(_recorded())]
    replays = [sweep for sweep in recorded if sweep.workload == REPLAY]
    return ScalingLab(own[-1], replays[-1] if replays else None, reason)


def open_sweep(run_dir: str | Path | None = None) -> SweepRun:
    """The sweep of the synthetic model alone; as ``open_assignment4``."""
    return open_assignment4(run_dir).sweep


def _recorded() -> Path:
    return recorded_assignment("assignment4")


def _choose(run_dir: str | Path | None) -> Path:
    if run_dir:
        return given_folder(run_dir)
    runs = (project_root() / "outputs" / "assignment4").glob("*/environment.json")
    complete = [run.parent for run in runs if read_environment(run.parent)["status"] == "complete"]
    with_sweep = [run for run in complete if _sweeps(run)]
    newest = max(with_sweep, key=_started, default=None)
    return newest or given_folder(_recorded())


def _sweeps(folder: Path) -> list[Path]:
    """Folders of complete sweeps in a run or in its stages, the oldest first."""
    found = [path.parent for pattern in ("", "*/", "*/*/") for path in folder.glob(pattern + ARMS)]
    return sorted(filter(_is_sweep, found), key=_started)


def _is_sweep(folder: Path) -> bool:
    environment = read_environment(folder)
    return environment["status"] == "complete" and environment.get("label") == LABEL


def _started(folder: Path) -> tuple[str, str]:
    return read_environment(folder).get("start_time", ""), str(folder)


def _read(folder: Path) -> SweepRun:
    environment = read_environment(folder)
    recorded = folder.resolve().is_relative_to(project_root() / "data")
    below = folder.resolve().is_relative_to(project_root())
    source = relative_to_project(folder) if below else folder.name
    config = folder / "config.yaml"
    caption = (
        f"{environment['hardware']}; {environment['start_time'][:10]}; "
        f"{'recorded' if recorded else 'run'} {source}"
    )
    return SweepRun(
        folder=folder,
        recorded=recorded,
        caption=caption,
        settings=yaml.safe_load(config.read_text()) or {} if config.is_file() else {},
        environment=environment,
        arms=read_table(folder / ARMS, ARM_COLUMNS),
        steps=read_table(folder / STEPS, STEP_COLUMNS),
        **{name: _beside(folder / f"{name}.csv") for name in _names((BUCKETS, PROBES, FACTS))},
    )


def _names(tables: Iterable[str]) -> list[str]:
    return [table.removesuffix(".csv") for table in tables]


def _beside(path: Path) -> pd.DataFrame | None:
    if not path.is_file():
        return None
    table = pd.read_csv(path)
    return None if table.empty else table


def _by_round(rows: pd.DataFrame, rounds: pd.DataFrame) -> NDArray:
    """[rounds, arms]: speedups of each round; rounds without one of the arms are left out."""
    times = rounds[rows["arm"].tolist()].dropna().to_numpy()
    shares = rows["global_batch"].to_numpy() / rows["global_batch"].iloc[0]
    return times[:, :1] / times * np.asarray(shares)
