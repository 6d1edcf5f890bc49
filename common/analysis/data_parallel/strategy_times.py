"""The time of a step under each strategy, and the bytes that a rank sends in it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from common.analysis import runs
from common.analysis.data_parallel.training_runs import (
    ASSIGNMENT,
    COMMAND,
    ORDER,
    STEPS,
    TIMES,
    Training,
    open_training,
)
from common.csv_tables import read_table
from common.perfmodel.fsdp.communication import (
    STRATEGIES,
    Collective,
    gathered_item_bytes,
    step_collectives,
    step_control_bytes,
    step_wire_bytes,
)
from common.perfmodel.one_device.architecture import GPT2Config
from common.runtime.records.run_directory import find_table
from common.samples import slowest_rank
from common.tables import STRATEGY_COLUMNS

EXCHANGING = STRATEGIES[1:]
"""Strategies under which ranks exchange anything."""
SETTINGS = "{model}, micro-batch {micro_batch_size}, sequence {seq_len}, {precision}"
"""The settings that a reader is shown beside the caption."""
IN_TURNS = "Strategies took turns"
ONE_AFTER_ANOTHER = (
    "These are the steps of training runs, one run after another: `compare_strategies.py` lets "
    "strategies take turns, so that a drift favours none"
)


@dataclass(frozen=True, eq=False)
class StrategyTimes:
    """Steps of one run under each strategy.

    Attributes:
        folder: folder of the table.
        caption: hardware, date and source, for figures.
        recorded: whether these measurements came with the project.
        rotated: whether strategies took turns in one process group; else these are steps of
            training runs, one run after another.
        settings: model, micro_batch_size, seq_len, precision, bucket_cap_mb.
        environment: the environment record.
        times: raw samples, ``STRATEGY_COLUMNS``.
    """

    folder: Path
    caption: str
    recorded: bool
    rotated: bool
    settings: dict
    environment: dict
    times: pd.DataFrame

    @property
    def origin(self) -> str:
        """Returns whose data these are, and how they were measured, as Markdown."""
        settings = SETTINGS.format(**self.settings)
        how = IN_TURNS if self.rotated else ONE_AFTER_ANOTHER
        return runs.origin(f"{self.caption}. {settings}. {how}", self.recorded, COMMAND)

    @property
    def ranks(self) -> int:
        """Returns the world size."""
        return int(self.environment["world_size"])

    @property
    def backend(self) -> str:
        """Returns ``gloo`` or ``nccl``."""
        return self.environment["backend"]

    @property
    def config(self) -> GPT2Config:
        """Returns the model's sizes, with the run's own vocabulary."""
        model = self.settings["model"]
        vocab_size = self.settings.get("vocab_size") or GPT2Config.named(model).vocab_size
        return GPT2Config.named(model, vocab_size=vocab_size)

    def tokens_per_step(self, accumulation: int) -> int:
        """Returns the tokens of a step, of all ranks together."""
        tokens = self.settings["micro_batch_size"] * self.settings["seq_len"]
        return tokens * self.ranks * accumulation

    def summary(self, only: Collection[str] = ()) -> pd.DataFrame:
        """Returns a row per accumulation and strategy; a step is as long as its slowest rank's.

        ``only`` has the strategies to return; by default all.
        Columns: accumulation, strategy, step_ms (median), q25_ms, q75_ms, noise (range of the
        rounds' medians, as a share of the median; NaN for a single round), tokens_per_s, speedup
        (over ``single`` in the same round, so that drift cancels: median over rounds; NaN without
        it), speedup_low and speedup_high (least and greatest).
        """
        keys = ["accumulation", "strategy"]
        steps = slowest_rank(self.times, "step_time_ms", by=[*keys, "round", "iteration"])
        quartiles = steps.groupby(keys).quantile([0.25, 0.5, 0.75]).unstack()
        table = quartiles.set_axis(["q25_ms", "step_ms", "q75_ms"], axis=1)
        # The noise is estimated from medians of whole rounds: each round builds every strategy
        # anew, so the range of these medians holds what single steps of one round cannot show.
        rounds = steps.groupby([*keys, "round"]).median()
        spread = rounds.groupby(keys).agg(lambda medians: medians.max() - medians.min())
        several = rounds.groupby(keys).size() > 1
        table["noise"] = (spread / table["step_ms"]).where(several)
        table = table.reset_index()
        tokens = table["accumulation"].map(self.tokens_per_step)
        table["tokens_per_s"] = tokens / table["step_ms"] * 1e3
        table = _ordered(table.merge(_speedups_by_round(rounds), how="left", on=keys))
        return table[table["strategy"].isin(only)] if only else table

    def collectives(self, strategy: str, accumulation: int) -> list[Collective]:
        """Returns the collectives of a step; blocks in half precision where that was set."""
        hybrid = strategy == "HYBRID_SHARD"
        return step_collectives(
            self.config,
            strategy,
            self.ranks,
            accumulation=accumulation,
            shard_size=self.settings.get("shard_size") if hybrid else None,
            parameter_bytes=gathered_item_bytes(strategy, self.settings["precision"]),
            bucket_cap_mb=self.settings.get("bucket_cap_mb"),
        )

    def sent(self) -> pd.DataFrame:
        """Returns what a rank sends in a step: a row per accumulation and exchanging strategy.

        Columns: accumulation, strategy, collectives (a step), predicted_bytes (payload and
        headers), measured_bytes (median step of the rank that sends most, or the mean over ranks
        for MY_ZERO1; NaN where the sockets do not tell, or NCCL's data takes other ways), error,
        ratio_to_ddp (measured where it is known, else predicted).
        """
        rows = []
        for (accumulation, strategy), times in self.times.groupby(["accumulation", "strategy"]):
            if strategy not in EXCHANGING:
                continue
            collectives = self.collectives(strategy, accumulation)
            payload = step_wire_bytes(collectives, self.backend)
            headers = step_control_bytes(collectives, self.backend)
            measured = float("nan")
            if self.backend == "gloo":
                by_rank = times.groupby("rank")["sent_bytes"].median()
                # Updated parameters go from the rank that owns them: predicted is the mean.
                measured = by_rank.mean() if strategy == "MY_ZERO1" else by_rank.max()
            count = sum(collective.count for collective in collectives)
            rows.append((accumulation, strategy, count, payload + headers, measured))
        columns = ["accumulation", "strategy", "collectives", "predicted_bytes", "measured_bytes"]
        table = _ordered(pd.DataFrame(rows, columns=columns))
        table["error"] = table["predicted_bytes"] / table["measured_bytes"] - 1
        sent_bytes = table["measured_bytes"].fillna(table["predicted_bytes"])
        is_ddp = table["strategy"] == "DDP"
        of_ddp = sent_bytes[is_ddp].set_axis(table.loc[is_ddp, "accumulation"])
        return table.assign(ratio_to_ddp=sent_bytes / table["accumulation"].map(of_ddp))


def open_strategies(run_dir: str | Path | None = None) -> StrategyTimes:
    """Opens the comparison of strategies in a run directory, else the steps of its training runs.

    By default as ``open_training``. Raises UserError where there is neither.
    """
    folder = runs.choose_folder(run_dir, ASSIGNMENT, (STEPS, TIMES))
    path = find_table(folder, TIMES)
    if path is None:
        return from_training(open_training(folder))
    return read_strategies(runs.Run(path.parent, folder))


def read_strategies(opened: runs.Run) -> StrategyTimes:
    """Reads the comparison of strategies in a run.

    Raises UserError for a table that is none, or without a run's records beside it.
    """
    opened.require(TIMES)
    return StrategyTimes(
        folder=opened.folder,
        caption=opened.caption,
        recorded=opened.recorded,
        rotated=True,
        settings=opened.settings,
        environment=opened.environment,
        times=read_table(opened.folder / TIMES, STRATEGY_COLUMNS),
    )


def from_training(training: Training) -> StrategyTimes:
    """Returns the steps of the training runs on most ranks and on one device, one round of each."""
    largest = max(training.compared, key=lambda run: run.ranks)
    rows = []
    for run in training.compared:
        if run.ranks not in (1, largest.ranks) or (run.ranks == 1 and run.strategy != "single"):
            continue
        plain = run.steps[run.steps["step"].isin(run.step_times_ms()["step"])]
        named = plain.rename(columns={"step": "iteration"})
        named = named.assign(strategy=run.strategy, accumulation=largest.accumulation, round=0)
        rows.append(named[list(STRATEGY_COLUMNS)])
    caps = [run.settings["bucket_cap_mb"] for run in training.compared if run.strategy == "DDP"]
    sizes = [
        run.settings["shard_size"] for run in training.compared if run.strategy == "HYBRID_SHARD"
    ]
    of_strategies = {
        "bucket_cap_mb": caps[0] if caps else None,
        "shard_size": sizes[0] if sizes else None,
    }
    return StrategyTimes(
        folder=training.folder,
        caption=training.caption,
        recorded=training.recorded,
        rotated=False,
        settings=largest.settings | of_strategies,
        environment=largest.environment,
        times=pd.concat(rows, ignore_index=True),
    )


def above_noise(difference: pd.Series, noise: pd.Series) -> pd.Series:
    """Returns ``yes`` where a relative difference is larger than the noise, else ``no``.

    ``unknown`` where the noise is, since there was a single round.
    """
    larger = (difference.abs() > noise).map({True: "yes", False: "no"})
    return larger.where(noise.notna(), "unknown")


def exchange_cost(strategies: StrategyTimes) -> pd.DataFrame:
    """Compares DDP's step with the same computation without communication.

    A row per accumulation at which both were measured. Columns: accumulation, above_noise (of
    added_share), step_ms, local_ms, added_ms (their difference), added_share (of local_ms), noise
    (the larger one of the two), speedup and local_speedup (over one device).
    """
    table = strategies.summary()
    exchanging = table[table["strategy"] == "DDP"]
    local = table[table["strategy"] == "local"]
    pairs = exchanging.merge(local, on="accumulation", suffixes=("", "_local"))
    added_ms = pairs["step_ms"] - pairs["step_ms_local"]
    added_share = added_ms / pairs["step_ms_local"]
    noise = pairs[["noise", "noise_local"]].max(axis=1, skipna=False)
    return pd.DataFrame(
        {
            "accumulation": pairs["accumulation"],
            "above_noise": above_noise(added_share, noise),
            "step_ms": pairs["step_ms"],
            "local_ms": pairs["step_ms_local"],
            "added_ms": added_ms,
            "added_share": added_share,
            "noise": noise,
            "speedup": pairs["speedup"],
            "local_speedup": pairs["speedup_local"],
        }
    )


def over_fastest(strategies: StrategyTimes) -> pd.DataFrame:
    """Compares each exchanging strategy with the fastest one of the same accumulation.

    Columns: accumulation, strategy, above_noise (of over_fastest; NaN for the fastest itself),
    step_ms, over_fastest (by which share a step is longer), noise (the largest one among the
    strategies of this accumulation).
    """
    table = strategies.summary()
    table = table[table["strategy"].isin(EXCHANGING)].reset_index(drop=True)
    by_accumulation = table.groupby("accumulation")
    longer = table["step_ms"] / by_accumulation["step_ms"].transform("min") - 1
    noise = by_accumulation["noise"].transform("max")
    return pd.DataFrame(
        {
            "accumulation": table["accumulation"],
            "strategy": table["strategy"],
            "above_noise": above_noise(longer, noise).where(longer > 0),
            "step_ms": table["step_ms"],
            "over_fastest": longer,
            "noise": noise,
        }
    )


def _speedups_by_round(rounds: pd.Series) -> pd.DataFrame:
    """Returns median, least and greatest speedup over ``single`` in the same round, by both keys.

    Args:
        rounds: Medians of steps by accumulation, strategy and round.
    """
    by_round = rounds.unstack("strategy")
    columns = ["accumulation", "strategy", "speedup", "speedup_low", "speedup_high"]
    if "single" not in by_round:
        return pd.DataFrame(columns=columns).astype({"accumulation": "int64", "speedup": float})
    # Each round's ratio is taken first, and the median over rounds after it: both steps of a ratio
    # were measured within minutes, so that a slow drift of the machine cancels.
    ratios = (1 / by_round).mul(by_round["single"], axis=0).stack()
    spread = ratios.groupby(["accumulation", "strategy"]).agg(["median", "min", "max"])
    return spread.reset_index().set_axis(columns, axis=1)


def _ordered(table: pd.DataFrame) -> pd.DataFrame:
    """Returns the rows by accumulation and in the order of strategies."""
    order = table["strategy"].map(ORDER.index)
    return (
        table.assign(order=order)
        .sort_values(["accumulation", "order"])
        .drop(columns="order")
        .reset_index(drop=True)
    )
