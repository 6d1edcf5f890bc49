"""Training runs on micro-batches: what each rank noted of each step, read, checked and compared."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pandas as pd
import yaml

from common.analysis.assignment1 import ranks_text
from common.analysis.comparable import require_same
from common.errors import UserError
from common.perfmodel.tables import numbers, read_table
from common.runtime.paths import project_root, relative_to_project
from common.runtime.run_directory import read_environment

COLUMNS = (
    *("step", "rank", "local_batch", "max_seq_len_in_batch", "padded_tokens", "step_time_ms"),
    *("peak_mem_mb", "throughput_samples_per_s", "throughput_tokens_per_s", "tokens"),
    *("compute_time_ms", "waiting_time_ms", "communication_time_ms", "planning_time_ms"),
    *("planning_work_ms", "halvings", "warmup"),
)
"""Columns of ``metrics/rank<r>.csv``."""
TIMES = ("compute_time_ms", "waiting_time_ms", "communication_time_ms", "planning_time_ms")
ORDER = (
    *("static", "dynamic", "dynamic_tokens_sq", "dynamic_calibrated", "karmarkar_karp"),
    *("length_grouped", "token_budget", "packed_largest_first", "packed_karmarkar_karp"),
)
"""The order of modes in tables and figures."""
OWN_BATCHES = ("length_grouped", "token_budget")
"""Modes that make up global batches of their own, of other samples than the rest."""
NAMES = {
    **{"dynamic_tokens_sq": "dynamic, tokens²", "dynamic_calibrated": "dynamic, calibrated"},
    **{"karmarkar_karp": "Karmarkar–Karp", "length_grouped": "length-grouped"},
    **{"token_budget": "token budget", "control": "equal lengths (control)"},
    **{"not_told": "dynamic, not told", "told": "dynamic, told"},
    **{"packed_largest_first": "packed, largest first"},
    **{"packed_karmarkar_karp": "packed, Karmarkar–Karp"},
}
"""What figures call a mode, where that is not its own name."""
AGREEING = {
    **{"dataset": "data set", "data_source": "data source", "train_texts": "number of texts"},
    **{"max_train_samples": "max_train_samples", "loss_mean": "loss_mean", "lr": "lr"},
    **{"weight_decay": "weight_decay", "warmup_steps": "warmup_steps", "dropout": "dropout"},
    **{"model_name": "model", "vocabulary": "vocabulary", "parameters": "number of parameters"},
    **{"max_length": "max_length", "global_batch": "global batch", "seed": "seed"},
    **{"precision": "precision", "slow_rank": "slow_rank"},
}
"""Settings in which compared runs agree, and what they are called."""


@dataclass(frozen=True, eq=False)
class MicroBatchRun:
    """One complete training run in one mode.

    Attributes:
        metrics: a row per step and rank with ``COLUMNS``, warm-up included.
    """

    folder: Path
    settings: dict
    environment: dict
    metrics: pd.DataFrame

    @property
    def mode(self) -> str:
        return self.settings["mode"]

    @property
    def ranks(self) -> int:
        return int(self.environment["world_size"])

    @cached_property
    def measured(self) -> pd.DataFrame:
        """The rows that count: without the first steps, which are warm-up."""
        return self.metrics[~self.metrics["warmup"]]

    @cached_property
    def slowest(self) -> pd.Series:
        """The slowest rank's step time in ms, by step."""
        return self.measured.groupby("step")["step_time_ms"].max()

    @cached_property
    def loss(self) -> pd.Series:
        """The mean loss over the global batch, by step; empty where it was not noted."""
        return self._table("losses.csv", "loss")

    @cached_property
    def accuracy(self) -> pd.Series:
        """Accuracy on the validation texts, by step; empty where it was not evaluated."""
        return self._table("evaluations.csv", "accuracy")

    def over_ranks(self, column: str) -> pd.Series:
        """Standard deviation over the ranks of a step (divided by their number), by step."""
        return self.measured.groupby("step")[column].std(ddof=0)

    def on_steps(self, steps: pd.Index) -> MicroBatchRun:
        """The same run with these steps only."""
        kept = self.metrics[self.metrics["step"].isin(steps)]
        return MicroBatchRun(self.folder, self.settings, self.environment, kept)

    def _table(self, name: str, column: str) -> pd.Series:
        path = self.folder / name
        if not path.is_file():
            return pd.Series(dtype=float, name=column)
        table = pd.read_csv(path)
        return table.set_index("step")[column] if column in table else pd.Series(dtype=float)


def mode_name(mode: str) -> str:
    """What figures call a mode."""
    return NAMES.get(mode, mode)


def in_order(modes: Iterable[str]) -> list[str]:
    """Each mode once, in the order of figures; unknown ones last."""
    known = {mode: place for place, mode in enumerate(ORDER)}
    return sorted(dict.fromkeys(modes), key=lambda mode: known.get(mode, len(known)))


def find_run(named: str | Path) -> Path:
    """The run directory of a path (from here or from the project's root) or of a run id.

    A run id is looked for below outputs/, and below each assignment's folder there.

    Raises UserError where there is none.
    """
    if not str(named):
        raise UserError("no run directory was named; a path, or a run id below outputs/")
    outputs = project_root() / "outputs"
    places = [Path(named), project_root() / named, outputs / named]
    places += sorted(outputs.glob(f"*/{Path(named).name}")) if len(Path(named).parts) == 1 else []
    for place in places:
        if place.is_dir():
            return place
    raise UserError(f"{named}: no such run directory, and no run of this id below outputs/")


def read_run(folder: Path) -> MicroBatchRun:
    """The complete training run in ``folder``.

    Raises UserError for a folder that is no training run of assignment 3, a run that is not
    complete, and a table that lacks a column, a rank or a step.
    """
    shown = relative_to_project(folder)
    for needed in ("environment.json", "config.yaml"):
        if not (folder / needed).is_file():
            raise UserError(f"{shown}: not a run directory (no {needed})")
    environment = read_environment(folder)
    if environment["status"] != "complete":
        reason = f": {environment['reason']}" if environment.get("reason") else ""
        raise UserError(
            f"{shown}: this run is not complete ({environment['status']}{reason}); "
            "only complete runs are analysed"
        )
    settings = yaml.safe_load((folder / "config.yaml").read_text()) or {}
    paths = [folder / "metrics" / f"rank{rank}.csv" for rank in range(environment["world_size"])]
    if "mode" not in settings or not paths[0].is_file():
        raise UserError(
            f"{shown}: not a training run of assignment 3 (no metrics/rank0.csv or no mode)"
        )
    metrics = pd.concat([_read_rank(path) for path in paths], ignore_index=True)
    ranks_of_step = metrics.groupby("step")["rank"].nunique()
    lacking = ranks_of_step[ranks_of_step < len(paths)]
    if not lacking.empty:
        raise UserError(
            f"{shown}: step {lacking.index[0]} is there for {lacking.iloc[0]} of {len(paths)} ranks"
        )
    metrics = metrics.sort_values(["step", "rank"], ignore_index=True)
    run = MicroBatchRun(folder, settings, environment, metrics)
    if run.measured.empty:
        raise UserError(f"{shown}: all of its {ranks_of_step.size} steps are warm-up")
    return run


def check_comparable(one: MicroBatchRun, other: MicroBatchRun) -> None:
    """Raise UserError with the first reason why two runs cannot be compared.

    They must have the same data set, texts, model, global batches, precision, ranks, hardware and
    network.
    """
    if one.folder.resolve() == other.folder.resolve():
        raise UserError(f"{relative_to_project(one.folder)}: compared with itself; name two runs")
    for key, name in AGREEING.items():
        _agree(name, one, one.settings.get(key), other, other.settings.get(key))
    for key, name in (
        ("world_size", "number of ranks"),
        ("device", "device"),
        ("hardware", "hardware"),
    ):
        _agree(name, one, one.environment.get(key), other, other.environment.get(key))
    require_same((run.folder.name, run.environment) for run in (one, other))
    if common_steps(one, other).empty:
        raise UserError(f"{_both(one, other)} have no measured step in common")
    if same_batches(one, other):
        _same_tokens(one, other)


def same_batches(one: MicroBatchRun, other: MicroBatchRun) -> bool:
    """Whether both modes leave the samples of each global batch as they are."""
    return not {one.mode, other.mode} & set(OWN_BATCHES)


def common_steps(one: MicroBatchRun, other: MicroBatchRun) -> pd.Index:
    """The steps that both runs measured."""
    return one.slowest.index.intersection(other.slowest.index)


def _read_rank(path: Path) -> pd.DataFrame:
    table = read_table(path, COLUMNS)
    shown = relative_to_project(path)
    for column in ("step", "rank", "padded_tokens", "tokens", *TIMES):
        table[column] = numbers(table, column, shown, at_least=0)
    for column in ("local_batch", "step_time_ms"):
        table[column] = numbers(table, column, shown, above=0)
    table["peak_mem_mb"] = pd.to_numeric(table["peak_mem_mb"], errors="coerce")
    table["warmup"] = table["warmup"].astype(str).str.lower().isin(["true", "1"])
    return table[[*COLUMNS]].astype({"step": int, "rank": int})


def _same_tokens(one: MicroBatchRun, other: MicroBatchRun) -> None:
    """Refuse runs whose steps hold different numbers of tokens: these are not the same samples."""
    sums = [run.metrics.groupby("step")["tokens"].sum() for run in (one, other)]
    first, second = (found.loc[common_steps(one, other)] for found in sums)
    differ = first[first != second].index
    if len(differ):
        step = differ[0]
        raise UserError(
            f"{_both(one, other)}: step {step} has {first[step]:,.0f} tokens in one and "
            f"{second[step]:,.0f} in the other: their global batches are not of the same samples"
        )


def _agree(name: str, one: MicroBatchRun, value: object, other: MicroBatchRun, its: object) -> None:
    if value != its:
        raise UserError(
            f"{name} differs between {one.folder.name} ({value}) and {other.folder.name} ({its}): "
            "these runs cannot be compared"
        )


def _both(one: MicroBatchRun, other: MicroBatchRun) -> str:
    return f"{relative_to_project(one.folder)} and {relative_to_project(other.folder)}"


def caption(environment: Mapping, folder: Path) -> str:
    """Hardware, date and source of a run, for figures."""
    below = folder.resolve().is_relative_to(project_root())
    source = relative_to_project(folder) if below else folder.name
    kind = "recorded" if folder.resolve().is_relative_to(project_root() / "data") else "run"
    return f"{environment['hardware']}; {environment['start_time'][:10]}; {kind} {source}"


def what_text(settings: Mapping, ranks: int) -> str:
    """Data, model and batch of a run: ``sst2, model small, 32 texts a step on 2 ranks``."""
    texts = settings.get("global_batch", "?")
    model = settings.get("model_name", "?")
    data = dataset_name(settings)
    return f"{data}, model {model}, {texts} texts a step on {ranks_text(ranks)}"


def dataset_name(settings: Mapping) -> str:
    """The data set of a run; of texts that only have its lengths, that as well."""
    if settings.get("dataset") == "synthetic":
        return f"texts as long as {settings.get('synthetic_like', '?')}'s"
    return str(settings.get("dataset", "?"))
