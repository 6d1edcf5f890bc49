"""Training runs on micro-batches: what each rank recorded of each step, read and checked."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pandas as pd

from common.analysis.comparable import require_same, require_same_settings
from common.analysis.runs import OfRun, Run
from common.analysis.step_parts import flags
from common.csv_tables import numbers, read_table
from common.errors import UserError
from common.runtime.paths import project_root, relative_to_project
from common.runtime.wording import counted
from common.samples import slowest_rank
from common.tables import MICRO_BATCH_COLUMNS

FIRST_RANK = "metrics/rank0.csv"
"""The table that every training run has."""
TIMES = ("compute_time_ms", "waiting_time_ms", "communication_time_ms", "planning_time_ms")
ORDER = (
    "static",
    "dynamic",
    "dynamic_tokens_sq",
    "dynamic_calibrated",
    "karmarkar_karp",
    "length_grouped",
    "token_budget",
    "packed_largest_first",
    "packed_karmarkar_karp",
)
"""The order of modes in tables and figures."""
OWN_BATCHES = ("length_grouped", "token_budget")
"""Modes that form global batches of their own, of other samples than the rest."""
NAMES = {
    "dynamic_tokens_sq": "dynamic, tokens²",
    "dynamic_calibrated": "dynamic, calibrated",
    "karmarkar_karp": "Karmarkar–Karp",
    "length_grouped": "length-grouped",
    "token_budget": "token budget",
    "control": "equal lengths (control)",
    "not_told": "dynamic, not told",
    "told": "dynamic, told",
    "packed_largest_first": "packed, largest first",
    "packed_karmarkar_karp": "packed, Karmarkar–Karp",
}
"""Names of modes in tables and figures, where they differ from the mode's own."""
AGREEING = {
    "dataset": "data set",
    "data_source": "data source",
    "train_texts": "number of texts",
    "max_train_samples": "max_train_samples",
    "loss_mean": "loss_mean",
    "lr": "lr",
    "weight_decay": "weight_decay",
    "warmup_steps": "warmup_steps",
    "dropout": "dropout",
    "model_name": "model",
    "vocabulary": "vocabulary",
    "parameters": "number of parameters",
    "max_length": "max_length",
    "global_batch": "global batch",
    "seed": "seed",
    "precision": "precision",
    "slow_rank": "slow_rank",
}
"""Settings in which compared runs agree, and their names in error messages."""
RANKS = {"world_size": "number of ranks", "device": "device", "hardware": "hardware"}
"""Fields of the environment record in which compared runs agree, and their names."""


@dataclass(frozen=True, eq=False)
class MicroBatchRun(OfRun):
    """One complete training run in one mode.

    Attributes:
        metrics: A row per step and rank with ``MICRO_BATCH_COLUMNS``, warm-up included.
    """

    metrics: pd.DataFrame

    @property
    def mode(self) -> str:
        """Returns the mode that the run was trained in."""
        return self.settings["mode"]

    @cached_property
    def measured(self) -> pd.DataFrame:
        """Returns the rows that count: all but those of warm-up steps."""
        return self.metrics[~self.metrics["warmup"]]

    @cached_property
    def slowest(self) -> pd.Series:
        """Returns the slowest rank's step time in ms, by step."""
        return slowest_rank(self.measured, "step_time_ms", by=["step"])

    @cached_property
    def loss(self) -> pd.Series:
        """Returns the mean loss over the global batch, by step; empty where it was not recorded."""
        return self._by_step("losses.csv", "loss")

    @cached_property
    def accuracy(self) -> pd.Series:
        """Returns the accuracy on the validation texts, by step; empty without evaluations."""
        return self._by_step("evaluations.csv", "accuracy")

    @property
    def peak_memory_mb(self) -> float:
        """Returns the largest peak memory of a step on any rank; NaN where it was not measured."""
        return float(self.measured["peak_mem_mb"].max())

    def over_ranks(self, column: str) -> pd.Series:
        """Returns the population standard deviation over the ranks of a step, by step."""
        return self.measured.groupby("step")[column].std(ddof=0)

    def on_steps(self, steps: pd.Index) -> MicroBatchRun:
        """Returns the same run with these steps only."""
        return MicroBatchRun(self.opened, self.metrics[self.metrics["step"].isin(steps)])

    def _by_step(self, name: str, column: str) -> pd.Series:
        if not self.opened.has(name):
            return pd.Series(dtype=float, name=column)
        table = self.opened.table(name)
        return table.set_index("step")[column] if column in table else pd.Series(dtype=float)


def mode_name(mode: str) -> str:
    """Returns the name of a mode in tables and figures."""
    return NAMES.get(mode, mode)


def in_order(modes: Iterable[str]) -> list[str]:
    """Returns each mode once, in the order of figures; unknown ones last."""
    order = {mode: index for index, mode in enumerate(ORDER)}
    return sorted(dict.fromkeys(modes), key=lambda mode: order.get(mode, len(order)))


def find_run(named: str | Path) -> Path:
    """Finds the run directory of a path (from here or from the project's root) or of a run id.

    A run id is looked for below outputs/, and below each assignment's folder there.

    Raises UserError where there is none.
    """
    if not str(named):
        raise UserError("no run directory was named; a path, or a run id below outputs/")
    outputs = project_root() / "outputs"
    folders = [Path(named), project_root() / named, outputs / named]
    folders += sorted(outputs.glob(f"*/{Path(named).name}")) if len(Path(named).parts) == 1 else []
    for folder in folders:
        if folder.is_dir():
            return folder
    raise UserError(f"{named}: no such run directory, and no run of this id below outputs/")


def read_run(run: Run) -> MicroBatchRun:
    """Reads the tables of a complete training run.

    Raises UserError for a folder that is no training run of assignment 3, a run that is not
    complete, and a table that lacks a column, a rank or a step.
    """
    name = relative_to_project(run.folder)
    for needed in ("environment.json", "config.yaml"):
        if not run.has(needed):
            raise UserError(f"{name}: not a run directory (no {needed})")
    status = run.environment["status"]
    if status != "complete":
        reason = f": {run.environment['reason']}" if run.environment.get("reason") else ""
        raise UserError(
            f"{name}: this run is not complete ({status}{reason}); only complete runs are analysed"
        )
    ranks = range(run.environment["world_size"])
    paths = [run.folder / "metrics" / f"rank{rank}.csv" for rank in ranks]
    if "mode" not in run.settings or not run.has(FIRST_RANK):
        raise UserError(f"{name}: not a training run of assignment 3 (no {FIRST_RANK} or no mode)")
    metrics = pd.concat([_read_rank(path) for path in paths], ignore_index=True)
    ranks_of_step = metrics.groupby("step")["rank"].nunique()
    lacking = ranks_of_step[ranks_of_step < len(paths)]
    if not lacking.empty:
        raise UserError(
            f"{name}: step {lacking.index[0]} is there for {lacking.iloc[0]} of {len(paths)} ranks"
        )
    training = MicroBatchRun(run, metrics.sort_values(["step", "rank"], ignore_index=True))
    if training.measured.empty:
        raise UserError(f"{name}: all of its {ranks_of_step.size} steps are warm-up")
    return training


def check_comparable(first: MicroBatchRun, second: MicroBatchRun) -> None:
    """Raises UserError with the first reason why two runs cannot be compared.

    They must have the same data set, texts, model, global batches, precision, ranks, hardware and
    network.
    """
    if first.folder.resolve() == second.folder.resolve():
        raise UserError(f"{relative_to_project(first.folder)}: compared with itself; name two runs")
    runs = (first, second)
    advice = "these runs cannot be compared"
    require_same_settings([(run.folder.name, run.settings) for run in runs], AGREEING, advice)
    require_same_settings([(run.folder.name, run.environment) for run in runs], RANKS, advice)
    require_same((run.folder.name, run.environment) for run in runs)
    if common_steps(first, second).empty:
        raise UserError(f"{_both(first, second)} have no measured step in common")
    if same_batches(first, second):
        _same_tokens(first, second)


def same_batches(first: MicroBatchRun, second: MicroBatchRun) -> bool:
    """Returns True if both modes leave the samples of each global batch as they are."""
    return not {first.mode, second.mode} & set(OWN_BATCHES)


def common_steps(first: MicroBatchRun, second: MicroBatchRun) -> pd.Index:
    """Returns the steps that both runs measured."""
    return first.slowest.index.intersection(second.slowest.index)


def what_text(settings: Mapping, ranks: int) -> str:
    """Returns data, model and batch: ``sst2, model small, 32 texts a step on 2 ranks``."""
    texts = settings.get("global_batch", "?")
    model = settings.get("model_name", "?")
    data = dataset_name(settings)
    return f"{data}, model {model}, {texts} texts a step on {counted(ranks, 'rank')}"


def dataset_name(settings: Mapping) -> str:
    """Returns the data set of a run; for synthetic texts, the one whose lengths they have."""
    if settings.get("dataset") == "synthetic":
        return f"texts as long as {settings.get('synthetic_like', '?')}'s"
    return str(settings.get("dataset", "?"))


def _read_rank(path: Path) -> pd.DataFrame:
    table = read_table(path, MICRO_BATCH_COLUMNS)
    name = relative_to_project(path)
    for column in ("step", "rank", "padded_tokens", "tokens", *TIMES):
        table[column] = numbers(table, column, name, at_least=0)
    for column in ("local_batch", "step_time_ms"):
        table[column] = numbers(table, column, name, above=0)
    table["peak_mem_mb"] = pd.to_numeric(table["peak_mem_mb"], errors="coerce")
    table["warmup"] = flags(table["warmup"])
    return table[list(MICRO_BATCH_COLUMNS)].astype({"step": int, "rank": int})


def _same_tokens(first: MicroBatchRun, second: MicroBatchRun) -> None:
    """Raises UserError where a step holds different numbers of tokens, so different samples."""
    sums = [run.metrics.groupby("step")["tokens"].sum() for run in (first, second)]
    tokens, theirs = (by_step.loc[common_steps(first, second)] for by_step in sums)
    differ = tokens[tokens != theirs].index
    if len(differ):
        step = differ[0]
        raise UserError(
            f"{_both(first, second)}: step {step} has {tokens[step]:,.0f} tokens in one and "
            f"{theirs[step]:,.0f} in the other: their global batches are not of the same samples"
        )


def _both(first: MicroBatchRun, second: MicroBatchRun) -> str:
    return f"{relative_to_project(first.folder)} and {relative_to_project(second.folder)}"
