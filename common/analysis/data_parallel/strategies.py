"""The time of a step under each strategy, and the bytes that a rank sends in it."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
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
from common.judged import FIRST_PAGE_ROUNDS, Fastest, Judged, compared, fastest
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
from common.samples import paired_difference, paired_ratio, per_round, slowest_rank, student
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
        folder, caption, recorded, environment: as those of ``runs.Run``.
        rotated: whether strategies took turns in one process group; else these are steps of
            training runs, one run after another.
        settings: model, micro_batch_size, seq_len, precision, bucket_cap_mb.
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

    @cached_property
    def conditions(self) -> dict[str, object]:
        """Returns scope, state of the machine and least rounds, as ``Judged`` takes them."""
        gradient_mib = 4 * self.config.num_parameters() / 2**20
        network = self.environment.get("network") or self.backend
        sizes = f"{gradient_mib:.0f} MiB of gradients, {self.ranks} ranks, {network}"
        return {
            "scope": f"{SETTINGS.format(**self.settings)}, {sizes}",
            "machine": runs.Run(self.folder, self.folder).machine_state,
            "least_rounds": FIRST_PAGE_ROUNDS,
        }

    @cached_property
    def rounds(self) -> dict[int, pd.DataFrame]:
        """Returns median steps in ms by accumulation: a row per round, a column per strategy."""
        return {
            accumulation: per_round(times, "step_time_ms", "strategy")
            for accumulation, times in self.times.groupby("accumulation")
        }

    @cached_property
    def speedups(self) -> dict[tuple[int, str], Judged]:
        """Returns speedups over one device by accumulation and strategy; their intervals hold all
        at once."""
        beside = {key: times for key, times in self.rounds.items() if "single" in times}
        claims = sum(times.shape[1] - 1 for times in beside.values())
        speedups = {}
        for accumulation, times in beside.items():
            over = compared(1 / times, "single", claims=claims, **self.conditions)
            speedups |= {(accumulation, strategy): speedup for strategy, speedup in over.items()}
        return speedups

    @cached_property
    def exchange(self) -> dict[int, Judged]:
        """Returns DDP's step over the same computation without communication, by accumulation."""
        pairs = {
            key: times[["DDP", "local"]]
            for key, times in self.rounds.items()
            if {"DDP", "local"} <= set(times)
        }
        return {
            accumulation: compared(times, "local", claims=len(pairs), **self.conditions)["DDP"]
            for accumulation, times in pairs.items()
        }

    @cached_property
    def second_gap(self) -> dict[int, Judged]:
        """Returns how much more speedup the exchange takes than slower computation does, by
        accumulation: of ranks over ``local`` and of ``local`` over DDP."""
        gaps = {}
        for accumulation in self.exchange:
            times = self.rounds[accumulation]
            if "single" in times:
                local, ddp = times["single"] / times["local"], times["single"] / times["DDP"]
                gap = student((local - ddp) - (self.ranks - local))
                gaps[accumulation] = Judged(gap, null=0.0, **self.conditions)
        return gaps

    @cached_property
    def exchange_falls(self) -> dict[int, tuple[Judged, Judged]]:
        """Returns by how much less DDP's exchange adds than with the fewest micro-batches, as a
        share of the step without it and in ms, by the number of micro-batches."""
        added = {
            key: (times["DDP"] / times["local"], times["DDP"] - times["local"])
            for key, times in self.rounds.items()
            if key in self.exchange
        }
        fewest = min(added, default=None)
        return {
            key: tuple(
                Judged(paired_difference(first, value), null=0.0, **self.conditions)
                for first, value in zip(added[fewest], values, strict=True)
            )
            for key, values in added.items()
            if key != fewest
        }

    @cached_property
    def exchanging(self) -> dict[int, pd.DataFrame]:
        """Returns ``rounds`` of the strategies under which ranks exchange anything, in order."""
        exchanging = {}
        for accumulation, times in self.rounds.items():
            names = [name for name in ORDER if name in EXCHANGING and name in times]
            if names:
                exchanging[accumulation] = times[names]
        return exchanging

    @property
    def pairs(self) -> int:
        """Returns the number of pairs of exchanging strategies, of all accumulations together."""
        return sum(math.comb(times.shape[1], 2) for times in self.exchanging.values())

    def fastest(self, accumulation: int) -> Fastest | None:
        """Returns the fastest exchanging strategy, and those that are tied with it.

        Which one looks fastest is found in the same rounds, so that any pair of strategies may be
        shown: the intervals of all pairs hold at once.
        """
        return fastest(self.exchanging[accumulation], claims=self.pairs, **self.conditions)

    def step_time_ratios_to(self, accumulation: int, base: str) -> dict[str, Judged]:
        """Returns each other exchanging strategy's step over ``base``'s, as in ``fastest``."""
        return compared(self.exchanging[accumulation], base, claims=self.pairs, **self.conditions)

    @cached_property
    def accumulated(self) -> dict[int, Judged]:
        """Returns how many times as fast DDP's samples go with more micro-batches than the fewest,
        by their number; the intervals hold all at once."""
        fewest, *more = sorted(key for key, times in self.exchanging.items() if "DDP" in times)
        base = self.rounds[fewest]["DDP"]
        ratios = {
            count: paired_ratio(base * count, self.rounds[count]["DDP"] * fewest, claims=len(more))
            for count in more
        }
        return {count: Judged(ratio, **self.conditions) for count, ratio in ratios.items()}

    def summary(self, only: Collection[str] = ()) -> pd.DataFrame:
        """Returns a row per accumulation and strategy; a step is as long as its slowest rank's.

        ``only`` has the strategies to return; by default all.
        Columns: accumulation, strategy, step_ms (median), q25_ms, q75_ms, tokens_per_s, speedup
        (over one device; NaN where that was not measured), judged (``speedups``; None of
        ``single``) and verdict (that of ``judged``).
        """
        keys = ["accumulation", "strategy"]
        steps = slowest_rank(self.times, "step_time_ms", by=[*keys, "round", "iteration"])
        quartiles = steps.groupby(keys).quantile([0.25, 0.5, 0.75]).unstack()
        table = quartiles.set_axis(["q25_ms", "step_ms", "q75_ms"], axis=1)
        judged = [self.speedups.get(key) for key in table.index]
        table = table.assign(
            speedup=[speedup.estimate if speedup else float("nan") for speedup in judged],
            verdict=[speedup.said if speedup else None for speedup in judged],
            judged=judged,
        ).reset_index()
        table.loc[table["strategy"] == "single", "speedup"] = 1.0
        tokens = table["accumulation"].map(self.tokens_per_step)
        table = _ordered(table.assign(tokens_per_s=tokens / table["step_ms"] * 1e3))
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
    largest = training.largest
    rows = []
    for run in training.compared:
        if run.ranks not in (1, largest.ranks) or (run.ranks == 1 and run.strategy != "single"):
            continue
        plain = run.steps[run.steps["step"].isin(run.step_times_ms()["step"])]
        named = plain.rename(columns={"step": "iteration"})
        named = named.assign(strategy=run.strategy, accumulation=largest.accumulation, round=0)
        rows.append(named[list(STRATEGY_COLUMNS)])
    of_strategies = {}
    for name, strategy in (("bucket_cap_mb", "DDP"), ("shard_size", "HYBRID_SHARD")):
        values = (run.settings[name] for run in training.compared if run.strategy == strategy)
        of_strategies[name] = next(values, None)
    return StrategyTimes(
        folder=training.folder,
        caption=training.caption,
        recorded=training.recorded,
        rotated=False,
        settings=largest.settings | of_strategies,
        environment=largest.environment,
        times=pd.concat(rows, ignore_index=True),
    )


def _ordered(table: pd.DataFrame) -> pd.DataFrame:
    """Returns the rows by accumulation and in the order of strategies."""
    return table.sort_values(
        ["accumulation", "strategy"],
        key=lambda column: column.map(ORDER.index) if column.name == "strategy" else column,
        ignore_index=True,
    )
