"""The training runs of assignment 1: found by what they trained, and compared where they may be."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path

import pandas as pd
import yaml

from common.analysis.comparable import require_same
from common.analysis.opened_run import given_folder, recorded_assignment
from common.errors import UserError
from common.perfmodel.workload import Workload
from common.runtime.paths import project_root, relative_to_project
from common.runtime.run_directory import newest_complete_run, read_environment

STEPS, MEMORY, TIMES = "training-steps.csv", "memory.csv", "strategy-times.csv"
ORDER = ("single", "local", "DDP", "FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD")
NAMES = {"single": "one device", "local": "no communication"}
"""What a strategy is called in figures, where that is not its own name."""
AGREEING = (
    *("model", "vocab_size", "seq_len", "global_batch_size", "num_steps", "precision", "tf32"),
    *("data", "data_tokens", "optimizer", "lr", "min_lr", "warmup_steps", "weight_decay"),
    *("grad_clip", "seed", "device"),
)
"""Settings in which runs agree that are to be compared."""
ADVICE = "these runs cannot be compared; give a directory with runs that agree"


@dataclass(frozen=True, eq=False)
class TrainingRun:
    """One complete training run: its settings, and what it noted of every step and rank."""

    folder: Path
    settings: dict
    environment: dict
    steps: pd.DataFrame
    memory: pd.DataFrame

    @classmethod
    def read(cls, folder: Path) -> TrainingRun:
        """The run in ``folder``. Raises UserError where config.yaml is missing."""
        config = folder / "config.yaml"
        if not config.is_file():
            raise UserError(f"{relative_to_project(folder)}: has {STEPS} but no config.yaml")
        memory = folder / MEMORY
        return cls(
            folder=folder,
            settings=yaml.safe_load(config.read_text()),
            environment=read_environment(folder),
            steps=pd.read_csv(folder / STEPS),
            memory=pd.read_csv(memory) if memory.is_file() else pd.DataFrame(),
        )

    @property
    def strategy(self) -> str:
        return self.settings["strategy"]

    @property
    def ranks(self) -> int:
        return int(self.environment["world_size"])

    @property
    def key(self) -> tuple[str, int]:
        """What tells compared runs apart."""
        return self.strategy, self.ranks

    @property
    def accumulation(self) -> int:
        """Micro-batches of a rank in a step."""
        each = self.settings["micro_batch_size"] * self.ranks
        return max(1, self.settings["global_batch_size"] // each)

    @property
    def workload(self) -> Workload:
        """What one rank computes in a step."""
        known = {field.name for field in fields(Workload)} & set(self.settings)
        values = {name: self.settings[name] for name in known}
        if values.get("precision") == "float64":
            values["precision"] = "float32"
        return Workload(
            **values
            | {
                "batch_size": self.settings["micro_batch_size"],
                "gradient_accumulation": self.accumulation,
            }
        )

    @cached_property
    def loss(self) -> pd.Series:
        """The mean loss over all ranks, by step (from 0), in nats per token."""
        return self.steps.groupby("step")["loss"].first()

    @property
    def entropy_nats(self) -> float | None:
        """The least loss a model can have on the text, where that is known."""
        return self.settings.get("entropy_nats")

    def step_times_ms(self) -> pd.DataFrame:
        """The slowest rank's time by step, without steps that a profiler made slow.

        Columns: step, step_time_ms.
        """
        slowed = self.steps.groupby("step")["profiled"].transform("max").astype(bool)
        plain = self.steps[~slowed]
        return plain.groupby("step")["step_time_ms"].max().reset_index()

    def __str__(self) -> str:
        return f"{strategy_name(self.strategy)} on {ranks_text(self.ranks)}"


@dataclass(frozen=True, eq=False)
class Training:
    """The runs of a comparison, in the order of ``ORDER``, and the run that learned longest.

    Attributes:
        recorded: whether these are measurements that came with the project.
        caption: hardware, date and source, for figures.
        compared: one run per strategy and number of ranks, with the same settings otherwise.
        learning: a run apart from these, of more steps, on text of known entropy; or None.
    """

    folder: Path
    recorded: bool
    compared: tuple[TrainingRun, ...]
    learning: TrainingRun | None

    @property
    def caption(self) -> str:
        largest = max(self.compared, key=lambda run: run.ranks)
        return caption_of(largest.environment, self.folder)

    def names(self) -> list[str]:
        """What the compared runs are called: with their ranks where a strategy ran on several."""
        strategies = [run.strategy for run in self.compared]
        return [
            strategy_name(run.strategy)
            + (f" × {run.ranks}" if strategies.count(run.strategy) > 1 else "")
            for run in self.compared
        ]

    def where_from(self) -> str:
        """Whose data these are, as Markdown."""
        what = (
            "{model}, sequence {seq_len}, global batch {global_batch_size}, {num_steps} steps, "
            "{precision}"
        ).format(**self.compared[0].settings)
        if self.recorded:
            return (
                f"> **Recorded data, not yours.** {self.caption}. {what}. "
                "`uv run ddplab run assignment1` measures here."
            )
        return f"> Measured in this run: {self.caption}. {what}."


def open_training(run_dir: str | Path | None = None) -> Training:
    """The training runs in a run directory.

    By default the newest complete run below outputs/assignment1 with training runs and a comparison
    of strategies, or else recorded measurements. A directory with the runs of cluster jobs does as
    well: runs are told apart by their settings, not by their folders' names.

    Raises:
        UserError: no such directory, no complete training run in it, or runs that differ in more
            than strategy and ranks.
    """
    folder = choose_folder(run_dir)
    runs = read_runs(folder)
    learning, others = split_learning(runs)
    return Training(folder, is_recorded(folder), compare(others), learning)


def open_learning(run_dir: str | Path | None = None) -> Training:
    """The same where it has a run that learned for long, else the recorded measurements.

    Raises UserError as ``open_training`` does, and where no such run is recorded either.
    """
    training = open_training(run_dir)
    if training.learning is None and not training.recorded:
        training = open_training(recorded_folder())
    if training.learning is None:
        raise UserError(f"{relative_to_project(training.folder)}: no run that learned for long")
    return training


def read_runs(folder: Path) -> list[TrainingRun]:
    """All complete training runs in ``folder`` and below, the newest first.

    Those on emulated hosts count only where there are no others.

    Raises UserError where there is none.
    """
    tables = [folder / STEPS, *folder.glob(f"*/{STEPS}")]
    for found in (tables, list(folder.glob(f"emulated-*/*/{STEPS}"))):
        complete = [
            TrainingRun.read(table.parent)
            for table in found
            if table.is_file() and read_environment(table.parent)["status"] == "complete"
        ]
        if complete:
            return sorted(complete, key=_age, reverse=True)
    raise UserError(f"{relative_to_project(folder)}: no complete training run (none with {STEPS})")


def split_learning(runs: Sequence[TrainingRun]) -> tuple[TrainingRun | None, list[TrainingRun]]:
    """The run that learned for long, if there is one, and all that are to be compared.

    It is the newest of the most steps, on text of known entropy, and by itself: had several
    strategies these settings, they would be a comparison.
    """
    longest = max(runs, key=lambda run: run.settings["num_steps"])
    alike = [run for run in runs if not differing(longest, run)]
    others = [run for run in runs if differing(longest, run)]
    shorter = all(run.settings["num_steps"] < longest.settings["num_steps"] for run in others)
    alone = len({run.key for run in alike}) == 1
    if others and shorter and alone and longest.entropy_nats is not None:
        return longest, others
    return None, list(runs)


def compare(runs: Iterable[TrainingRun]) -> tuple[TrainingRun, ...]:
    """The newest run of each strategy and number of ranks, in order.

    Args:
        runs: the newest first.

    Raises UserError naming a setting, the device or the network, in which two of them differ.
    """
    newest: dict[tuple[str, int], TrainingRun] = {}
    for run in runs:
        newest.setdefault(run.key, run)
    first, *others = newest.values()
    for other in others:
        for name in differing(first, other):
            raise UserError(
                f"{name} differs between {first.folder.name} ({first.settings.get(name)}) and "
                f"{other.folder.name} ({other.settings.get(name)}): {ADVICE}"
            )
    require_same(((run.folder.name, run.environment) for run in newest.values()), ADVICE)
    return tuple(sorted(newest.values(), key=lambda run: (ORDER.index(run.strategy), run.ranks)))


def differing(one: TrainingRun, other: TrainingRun) -> list[str]:
    """The settings in which two runs must agree to be compared, and do not."""
    return [name for name in AGREEING if one.settings.get(name) != other.settings.get(name)]


def _age(run: TrainingRun) -> tuple[str, float]:
    return run.environment.get("start_time", ""), (run.folder / STEPS).stat().st_mtime_ns


def strategy_name(strategy: str) -> str:
    """What figures call it."""
    return NAMES.get(strategy, strategy)


def ranks_text(ranks: int) -> str:
    """``1 rank``, ``2 ranks``."""
    return f"{ranks} rank{'s' if ranks != 1 else ''}"


def recorded_folder() -> Path:
    """Where the recorded runs of assignment 1 are."""
    return recorded_assignment("assignment1")


def is_recorded(folder: Path) -> bool:
    """Whether these measurements came with the project."""
    return folder.resolve().is_relative_to(project_root() / "data")


def choose_folder(run_dir: str | Path | None) -> Path:
    """The run directory that was named, else the newest one, else the recorded measurements.

    Raises UserError where there is none.
    """
    if run_dir:
        return given_folder(run_dir)
    newest = newest_complete_run(project_root() / "outputs" / "assignment1", (STEPS, TIMES))
    return newest or given_folder(recorded_folder())


def caption_of(environment: Mapping, folder: Path) -> str:
    """Hardware, date and source from a run's environment record, where it is part of ``folder``."""
    below = folder.resolve().is_relative_to(project_root())
    source = relative_to_project(folder) if below else folder.name
    kind = "recorded" if is_recorded(folder) else "run"
    return f"{environment['hardware']}; {environment['start_time'][:10]}; {kind} {source}"
