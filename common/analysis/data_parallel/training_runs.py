"""The training runs of assignment 1: found by what they trained, and compared where they agree."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import pandas as pd

from common.analysis import runs
from common.analysis.comparable import require_same, require_same_settings
from common.errors import UserError
from common.perfmodel.fsdp.communication import EXERCISES
from common.perfmodel.one_device.workload import Workload
from common.runtime.paths import relative_to_project
from common.runtime.wording import counted
from common.samples import slowest_rank

ASSIGNMENT = "assignment1"
COMMAND = "uv run ddplab run assignment1"
"""Measures everything that this package reads."""
NO_LEARNING = "the run that is shown has none of so many steps; `--preset laptop` has one"
STEPS, MEMORY, TIMES = "training-steps.csv", "memory.csv", "strategy-times.csv"
ORDER = ("single", "local", "DDP", "FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", *EXERCISES)
"""The order of strategies in tables and figures."""
NAMES = {"single": "one device", "local": "no communication"}
"""Names of strategies in figures, where these are not their own."""
AGREEING = (
    "model",
    "vocab_size",
    "seq_len",
    "global_batch_size",
    "num_steps",
    "precision",
    "tf32",
    "data",
    "data_tokens",
    "optimizer",
    "lr",
    "min_lr",
    "warmup_steps",
    "weight_decay",
    "grad_clip",
    "seed",
    "device",
)
"""Settings in which compared runs must agree."""
ADVICE = "these runs cannot be compared; give a directory with runs that agree"
SETTINGS = (
    "{model}, sequence {seq_len}, global batch {global_batch_size}, {num_steps} steps, {precision}"
)
"""The settings that a reader is shown beside the caption."""


@dataclass(frozen=True, eq=False)
class TrainingRun(runs.OfRun):
    """One complete training run: its settings, and the tables of its steps and memory."""

    @property
    def steps(self) -> pd.DataFrame:
        """Returns training-steps.csv: a row per step and rank."""
        return self.opened.table(STEPS)

    @property
    def memory(self) -> pd.DataFrame:
        """Returns memory.csv: a row per rank; empty in runs without it."""
        return self.opened.table(MEMORY) if self.opened.has(MEMORY) else pd.DataFrame()

    @property
    def strategy(self) -> str:
        """Returns the name of the strategy, such as ``FULL_SHARD``."""
        return self.settings["strategy"]

    @property
    def key(self) -> tuple[str, int]:
        """Returns strategy and ranks, in which compared runs differ."""
        return self.strategy, self.ranks

    @property
    def accumulation(self) -> int:
        """Returns the micro-batches of a rank in a step."""
        sequences = self.settings["micro_batch_size"] * self.ranks
        return max(1, self.settings["global_batch_size"] // sequences)

    @property
    def workload(self) -> Workload:
        """Returns the computation of one rank in a step."""
        precision = self.settings["precision"]
        return Workload.of(
            self.settings,
            batch_size=self.settings["micro_batch_size"],
            gradient_accumulation=self.accumulation,
            precision="float32" if precision == "float64" else precision,
        )

    @cached_property
    def loss(self) -> pd.Series:
        """Returns the mean loss over all ranks, by step (from 0), in nats per token."""
        return self.steps.groupby("step")["loss"].first()

    @property
    def entropy_nats(self) -> float | None:
        """Returns the lower bound of the loss on this text, where that is known."""
        return self.settings.get("entropy_nats")

    def step_times_ms(self) -> pd.DataFrame:
        """Returns the slowest rank's time by step, without steps that a profiler made slow.

        Columns: step, step_time_ms.
        """
        slowed = self.steps.groupby("step")["profiled"].transform("max").astype(bool)
        plain = self.steps[~slowed]
        return slowest_rank(plain, "step_time_ms", by=["step"]).reset_index()

    def __str__(self) -> str:
        return f"{strategy_name(self.strategy)} on {counted(self.ranks, 'rank')}"


@dataclass(frozen=True, eq=False)
class Training:
    """The runs of a comparison, in the order of ``ORDER``, and the run that learned longest.

    Attributes:
        folder: the folder that was named or chosen.
        compared: one run per strategy and number of ranks, with the same settings otherwise.
        learning: a run apart from these, of more steps, on text of known entropy; or None.
        left_out: why ``learning`` is recorded and not of the reader's own run; empty where it is.
    """

    folder: Path
    compared: tuple[TrainingRun, ...]
    learning: TrainingRun | None
    left_out: str = ""

    @property
    def largest(self) -> TrainingRun:
        """Returns the first compared run on most ranks."""
        return max(self.compared, key=lambda run: run.ranks)

    @property
    def recorded(self) -> bool:
        """Returns True if these measurements came with the project."""
        return runs.is_recorded(self.folder)

    @property
    def caption(self) -> str:
        """Returns hardware, date and source of the run on most ranks, for figures."""
        return self.largest.caption

    @property
    def origin(self) -> str:
        """Returns whose data the compared runs are, as Markdown."""
        settings = SETTINGS.format(**self.compared[0].settings)
        return runs.origin(f"{self.caption}. {settings}", self.recorded, COMMAND)

    @property
    def learning_origin(self) -> str:
        """Returns whose data the long run is, as Markdown."""
        return runs.origin(self.learning.caption, self.recorded, COMMAND, self.left_out)

    def named(self) -> list[tuple[str, TrainingRun]]:
        """Returns the compared runs by name, with the ranks where a strategy ran on several."""
        strategies = [run.strategy for run in self.compared]
        named = []
        for run in self.compared:
            ranks = f" × {run.ranks}" if strategies.count(run.strategy) > 1 else ""
            named.append((f"{strategy_name(run.strategy)}{ranks}", run))
        return named


def open_training(run_dir: str | Path | None = None) -> Training:
    """Opens the training runs in a run directory.

    By default the newest complete run below outputs/assignment1 with training runs and a comparison
    of strategies, or else recorded measurements. A directory with the runs of cluster jobs does as
    well: runs are told apart by their settings, not by their folders' names.

    Raises:
        UserError: no such directory, no complete training run in it, or runs that differ in more
            than strategy and ranks.
    """
    folder = runs.choose_folder(run_dir, ASSIGNMENT, (STEPS, TIMES))
    learning, compared = split_learning(read_runs(folder))
    return Training(folder, compare(compared), learning)


def open_learning(run_dir: str | Path | None = None) -> Training:
    """Opens a run directory in which one run learned for long, else the recorded measurements.

    Raises UserError as ``open_training`` does, and where no such run is recorded either.
    """
    training = open_training(run_dir)
    if training.learning is None and not training.recorded:
        training = replace(
            open_training(runs.recorded_assignment(ASSIGNMENT)), left_out=NO_LEARNING
        )
    if training.learning is None:
        raise UserError(f"{relative_to_project(training.folder)}: no run that learned for long")
    return training


def read_runs(folder: Path) -> list[TrainingRun]:
    """Returns all complete training runs in ``folder`` and below, the newest first.

    Those on emulated hosts count only where there are no others. Raises UserError where there is
    none, or one has no settings.
    """
    for places in (("", "*/"), ("emulated-*/*/",)):
        if complete := runs.complete_runs(folder, STEPS, places):
            for opened in complete:
                opened.require(STEPS)
            return [TrainingRun(opened) for opened in reversed(complete)]
    raise UserError(f"{relative_to_project(folder)}: no complete training run (none with {STEPS})")


def split_learning(trained: Sequence[TrainingRun]) -> tuple[TrainingRun | None, list[TrainingRun]]:
    """Returns the run that learned for long, if there is one, and all that are to be compared.

    It is the newest of the most steps, on text of known entropy, and by itself: had several
    strategies these settings, they would be a comparison.
    """
    longest = max(trained, key=lambda run: run.settings["num_steps"])
    compared = [run for run in trained if differing(longest, run)]
    keys = {run.key for run in trained if not differing(longest, run)}
    shorter = all(run.settings["num_steps"] < longest.settings["num_steps"] for run in compared)
    if compared and shorter and len(keys) == 1 and longest.entropy_nats is not None:
        return longest, compared
    return None, list(trained)


def compare(trained: Iterable[TrainingRun]) -> tuple[TrainingRun, ...]:
    """Returns the newest run of each strategy and number of ranks, in order.

    ``trained`` has the newest first. Raises UserError naming a setting, the device or the network,
    in which two of them differ.
    """
    newest: dict[tuple[str, int], TrainingRun] = {}
    for run in trained:
        newest.setdefault(run.key, run)
    require_same_settings(
        [(run.folder.name, run.settings) for run in newest.values()],
        {name: name for name in AGREEING},
        ADVICE,
    )
    require_same(((run.folder.name, run.environment) for run in newest.values()), ADVICE)
    return tuple(sorted(newest.values(), key=lambda run: (ORDER.index(run.strategy), run.ranks)))


def differing(first: TrainingRun, second: TrainingRun) -> list[str]:
    """Returns the settings in which two runs must agree to be compared, and do not."""
    return [name for name in AGREEING if first.settings.get(name) != second.settings.get(name)]


def strategy_name(strategy: str) -> str:
    """Returns the name of a strategy in figures."""
    return NAMES.get(strategy, strategy)
