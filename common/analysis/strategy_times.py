"""How long a step takes under each strategy, and what a rank sends in it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import yaml

from common.analysis.assignment1 import (
    ORDER,
    TIMES,
    Training,
    caption_of,
    choose_folder,
    is_recorded,
    open_training,
)
from common.errors import UserError
from common.perfmodel.architecture import GPT2Config
from common.perfmodel.communication import (
    Collective,
    step_collectives,
    step_control_bytes,
    step_wire_bytes,
)
from common.perfmodel.tables import read_table
from common.runtime.paths import relative_to_project
from common.runtime.run_directory import find_table, read_environment

COLUMNS = (
    *("strategy", "accumulation", "round", "iteration", "rank", "step_time_ms", "sent_bytes"),
)
EXCHANGING = ("DDP", "FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD")


@dataclass(frozen=True, eq=False)
class StrategyTimes:
    """Steps of one run under each strategy.

    Attributes:
        folder: where the table lies.
        caption: hardware, date and source, for figures.
        rotated: whether strategies took turns in one process group; else these are steps of
            training runs, one run after another.
        settings: model, micro_batch_size, seq_len, precision, bucket_cap_mb.
        times: raw samples, ``COLUMNS``.
    """

    folder: Path
    caption: str
    recorded: bool
    rotated: bool
    settings: dict
    environment: dict
    times: pd.DataFrame

    @property
    def ranks(self) -> int:
        return int(self.environment["world_size"])

    @property
    def backend(self) -> str:
        return self.environment["backend"]

    @property
    def accumulations(self) -> list[int]:
        return sorted(self.times["accumulation"].unique().tolist())

    @property
    def config(self) -> GPT2Config:
        own = GPT2Config.named(self.settings["model"])
        vocab_size = self.settings.get("vocab_size") or own.vocab_size
        return GPT2Config.named(self.settings["model"], vocab_size=vocab_size)

    def tokens_per_step(self, accumulation: int) -> int:
        """Of all ranks together."""
        each = self.settings["micro_batch_size"] * self.settings["seq_len"]
        return each * self.ranks * accumulation

    def summary(self) -> pd.DataFrame:
        """A row per accumulation and strategy: how long a step takes; a step is its slowest rank's.

        Columns: accumulation, strategy, step_ms (median), q25_ms, q75_ms, noise (range of the
        rounds' medians, as a share of the median; NaN for a single round), tokens_per_s, speedup
        (over ``single`` in the same round, so that drift cancels: median over rounds; NaN without
        it), speedup_low and speedup_high (least and greatest).
        """
        keys = ["accumulation", "strategy"]
        steps = self.times.groupby([*keys, "round", "iteration"])["step_time_ms"].max()
        quartiles = steps.groupby(keys).quantile([0.25, 0.5, 0.75]).unstack()
        table = quartiles.set_axis(["q25_ms", "step_ms", "q75_ms"], axis=1)
        rounds = steps.groupby([*keys, "round"]).median()
        spread = rounds.groupby(keys).agg(lambda found: found.max() - found.min())
        several = rounds.groupby(keys).size() > 1
        table["noise"] = (spread / table["step_ms"]).where(several)
        table = table.reset_index()
        tokens = table["accumulation"].map(self.tokens_per_step)
        table["tokens_per_s"] = tokens / table["step_ms"] * 1e3
        return _ordered(table.merge(_speedups_by_round(rounds), how="left", on=keys))

    def collectives(self, strategy: str, accumulation: int) -> list[Collective]:
        """What a step of the strategy exchanges; blocks in half precision where that was set."""
        half = self.settings["precision"] == "bfloat16" and strategy not in ("DDP", "single")
        hybrid = strategy == "HYBRID_SHARD"
        return step_collectives(
            self.config,
            strategy,
            self.ranks,
            accumulation=accumulation,
            shard_size=self.settings.get("shard_size") if hybrid else None,
            parameter_bytes=2 if half else 4,
            root_parameter_bytes=4,
            bucket_cap_mb=self.settings.get("bucket_cap_mb"),
        )

    def sent(self) -> pd.DataFrame:
        """What a rank sends in a step: a row per accumulation and strategy that exchanges anything.

        Columns: accumulation, strategy, collectives (a step), predicted_bytes (payload and
        headers), measured_bytes (median step of the rank that sends most; NaN where the sockets do
        not tell, or NCCL's data takes other ways), error, ratio_to_ddp (measured where it is
        known, else predicted).
        """
        rows = []
        for (accumulation, strategy), own in self.times.groupby(["accumulation", "strategy"]):
            if strategy not in EXCHANGING:
                continue
            found = self.collectives(strategy, accumulation)
            predicted = sum(f(found, self.backend) for f in (step_wire_bytes, step_control_bytes))
            measured = float("nan")
            if self.backend == "gloo":
                measured = own.groupby("rank")["sent_bytes"].median().max()
            count = sum(collective.count for collective in found)
            rows.append((accumulation, strategy, count, predicted, measured))
        columns = ["accumulation", "strategy", "collectives", "predicted_bytes", "measured_bytes"]
        table = _ordered(pd.DataFrame(rows, columns=columns))
        table["error"] = table["predicted_bytes"] / table["measured_bytes"] - 1
        told = table["measured_bytes"].fillna(table["predicted_bytes"])
        ddp = told[table["strategy"] == "DDP"].set_axis(
            table["accumulation"][table["strategy"] == "DDP"]
        )
        return table.assign(ratio_to_ddp=told / table["accumulation"].map(ddp))


def open_strategies(run_dir: str | Path | None = None) -> StrategyTimes:
    """The comparison of strategies in a run directory, else the steps of its training runs.

    By default as ``open_training``. Raises UserError where there is neither.
    """
    folder = choose_folder(run_dir)
    path = find_table(folder, TIMES)
    if path is None:
        return from_training(open_training(folder))
    return read_strategies(path, folder)


def read_strategies(path: Path, folder: Path) -> StrategyTimes:
    """The comparison in the table ``path``, a part of the run in ``folder``.

    Raises UserError for a table that is none, or without a run's records beside it.
    """
    config = path.parent / "config.yaml"
    if not config.is_file():
        raise UserError(f"{relative_to_project(path.parent)}: has {path.name} but no config.yaml")
    environment = read_environment(path.parent)
    return StrategyTimes(
        folder=path.parent,
        caption=caption_of(environment, folder),
        recorded=is_recorded(folder),
        rotated=True,
        settings=yaml.safe_load(config.read_text()),
        environment=environment,
        times=read_table(path, COLUMNS),
    )


def from_training(training: Training) -> StrategyTimes:
    """The steps of the training runs on most ranks, and on one device, as one round of each."""
    largest = max(training.compared, key=lambda run: run.ranks)
    rows = []
    for run in training.compared:
        if run.ranks not in (1, largest.ranks) or (run.ranks == 1 and run.strategy != "single"):
            continue
        plain = run.steps[run.steps["step"].isin(run.step_times_ms()["step"])]
        named = plain.rename(columns={"step": "iteration"})
        named = named.assign(strategy=run.strategy, accumulation=largest.accumulation, round=0)
        rows.append(named[list(COLUMNS)])
    caps = [run.settings["bucket_cap_mb"] for run in training.compared if run.strategy == "DDP"]
    return StrategyTimes(
        folder=training.folder,
        caption=training.caption,
        recorded=training.recorded,
        rotated=False,
        settings=largest.settings | {"bucket_cap_mb": caps[0] if caps else None},
        environment=largest.environment,
        times=pd.concat(rows, ignore_index=True),
    )


def micro_batches(count: int) -> str:
    """``1 micro-batch``, ``2 micro-batches``."""
    return f"{count} micro-batch{'es' if count > 1 else ''}"


def _speedups_by_round(rounds: pd.Series) -> pd.DataFrame:
    """Median, least and greatest speedup over ``single`` in the same round, by both keys."""
    by_round = rounds.unstack("strategy")
    columns = ["accumulation", "strategy", "speedup", "speedup_low", "speedup_high"]
    if "single" not in by_round:
        return pd.DataFrame(columns=columns).astype({"accumulation": "int64", "speedup": float})
    ratios = (1 / by_round).mul(by_round["single"], axis=0).stack()
    spread = ratios.groupby(["accumulation", "strategy"]).agg(["median", "min", "max"])
    return spread.reset_index().set_axis(columns, axis=1)


def _ordered(table: pd.DataFrame) -> pd.DataFrame:
    place = table["strategy"].map(ORDER.index)
    return (
        table.assign(place=place)
        .sort_values(["accumulation", "place"])
        .drop(columns="place")
        .reset_index(drop=True)
    )
