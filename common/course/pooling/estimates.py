"""What one student's run says of each quantity that a class can pool: a ratio from its rounds."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import yaml

from common.analysis.buckets.measurements import open_run
from common.analysis.buckets.networks import NetworkRun, measured_networks
from common.analysis.buckets.sweep import predicted_fastest_cap
from common.analysis.data_parallel.strategies import read_strategies
from common.analysis.data_parallel.training_runs import TIMES
from common.analysis.findings.finding import UNREADABLE
from common.analysis.micro_batches.mode_comparison import (
    DYNAMIC,
    MODE_TIMES,
    STATIC,
    ModeComparison,
    read_comparison,
)
from common.analysis.runs import DEPTHS, Run, complete_runs
from common.analysis.speedups import (
    ARMS,
    STEPS,
    arm_speedups,
    strategy_settings,
    text_speedups,
)
from common.course.pooling.hand_ins import in_a_line
from common.errors import UserError
from common.judged import Judged
from common.runtime.wording import counted
from common.samples import Interval, Item, mean_ratio, paired_ratio, per_round, student

SWEEP, EPOCHS = "ddp-times.csv", "epochs.csv"
REGRET = "regret of the model's cap"
RATIO, ADDED, SAVED = "ratio", "added", "saved"
"""Ways in which a ratio r is worded: as r, as the share r − 1 that is added, as 1 − r."""
NOT_OPENED = (*UNREADABLE, OSError, RecursionError, yaml.YAMLError)
"""Errors of tables, settings and records that are others than their names say."""


@dataclass(frozen=True)
class Estimate:
    """A quantity as one run measured it.

    Attributes:
        assignment: number of the assignment.
        quantity: what is compared with what, and where.
        wording: RATIO, ADDED or SAVED.
        ratio: the ratio with its interval over the run's own rounds; 1 where nothing differs.
        settings: what must be the same in all runs that are pooled.
        stage: name of the run that measured it.
        record: the run's environment record.
        digest: hash of the table that it comes from.
    """

    assignment: int
    quantity: str
    wording: str
    ratio: Judged
    settings: Mapping[str, object]
    stage: str
    record: Mapping[str, object]
    digest: str

    @property
    def hardware(self) -> str:
        """Returns what the run says that it ran on."""
        return in_a_line(str(self.record.get("hardware") or "not recorded"))

    @property
    def start_time(self) -> str:
        """Returns when the run began; empty where that was not recorded."""
        return str(self.record.get("start_time") or "")

    @property
    def identity(self) -> tuple[str, ...] | None:
        """Returns what tells this measurement from all others even if its table was changed."""
        names = ("label", "host", "process", "start_time")
        values = tuple(str(self.record[name]) for name in names if self.record.get(name))
        return values if len(values) == len(names) else None

    def difference(self, other: Estimate) -> str:
        """Returns the first setting in which two differ, in words; empty where none does."""
        for name in dict.fromkeys([*self.settings, *other.settings]):
            values = self.settings.get(name), other.settings.get(name)
            if values[0] != values[1]:
                return f"{name} is {values[0]}, in the class {values[1]}"
        return ""


def worded(wording: str, ratio: float) -> float:
    """Returns a ratio as its quantity is worded."""
    return {RATIO: ratio, ADDED: ratio - 1, SAVED: 1 - ratio}[wording]


def estimates_of(folder: Path, problems: list[str]) -> list[Estimate]:
    """Returns every quantity that a run directory measured.

    Args:
        folder: a run directory of ``ddplab run``, or what a student handed in of it.
        problems: gets a line for each table that cannot be used.
    """
    readers: dict[str, Callable[[Run], Iterator[Estimate]]] = {
        TIMES: _of_strategies,
        MODE_TIMES: _of_modes,
        ARMS: _of_arms,
    }
    estimates = []
    for table, reader in readers.items():
        for stage in _stages(folder, table, problems):
            estimates += _tried(partial(reader, stage), table, problems)
    if _stages(folder, SWEEP, problems):
        estimates += _tried(partial(_of_caps, folder), SWEEP, problems)
    return estimates + _tried(partial(_of_text, folder), EPOCHS, problems)


def _stages(folder: Path, table: str, problems: list[str]) -> list[Run]:
    """Returns the complete runs with a table; one that is not complete is a problem."""
    stages = _tried(partial(complete_runs, folder, table, DEPTHS), table, problems)
    if not stages and any(any(folder.glob(below + table)) for below in DEPTHS):
        problems.append(f"{table} is of a run that is not complete")
    return stages


def _tried(read: Callable[[], Iterable[Item]], table: str, problems: list[str]) -> list[Item]:
    try:
        with np.errstate(all="ignore"):  # a time that is none gives no finite ratio
            return list(read())
    except UserError as error:
        problems.append(f"{table} cannot be used: {error}")
    except NOT_OPENED as error:
        problems.append(f"{table} cannot be used ({type(error).__name__}: {error})")
    return []


def _of_strategies(stage: Run) -> Iterator[Estimate]:
    """Yields DDP over one device, and over the same computation without its exchange."""
    strategies = read_strategies(stage)
    settings = strategy_settings(strategies)
    for accumulation, times in strategies.times.groupby("accumulation"):
        rounds = per_round(times, "step_time_ms", "strategy")
        where = f", {counted(int(accumulation), 'micro-batch')}{_where(stage, strategies.ranks)}"
        for words, wording, first, second in (
            ("speedup of DDP over one device", RATIO, "single", "DDP"),
            ("added by DDP's exchange", ADDED, "DDP", "local"),
        ):
            if {first, second} <= set(rounds.columns):
                ratio = _judged(paired_ratio(rounds[first], rounds[second]), stage)
                yield _estimate(1, words + where, wording, ratio, settings, stage, TIMES)


def _of_caps(folder: Path) -> Iterator[Estimate]:
    """Yields what the model's cap gains over DDP's default, and its regret, on each network."""
    run = open_run(folder)
    for network in measured_networks(run):
        stage = Run(network.folder, folder)
        where = _where(stage, network.sweep.world_size)
        settings = {**run.settings, "ranks": network.sweep.world_size}
        settings.pop("device", None)
        for quantity, wording, interval in _cap_ratios(network):
            ratio = _judged(interval, stage)
            yield _estimate(2, quantity + where, wording, ratio, settings, stage, SWEEP)


def _cap_ratios(network: NetworkRun) -> Iterator[tuple[str, str, Interval]]:
    distinct = network.sweep.distinct()
    caps = sorted(distinct.measured_s())
    chosen = predicted_fastest_cap({cap: network.model.backward_s(cap) for cap in caps}, caps)
    explicit = per_round(distinct.steps, "backward_time_ms", "bucket_cap_mib")
    if network.sweep.default() is not None:
        rounds = per_round(network.sweep.steps, "backward_time_ms", "bucket_cap_mib")
        of_cap, of_default = rounds.reindex(columns=[chosen, np.nan]).to_numpy().T
        yield "gain of the model's cap over DDP's default", SAVED, paired_ratio(of_cap, of_default)
    yield REGRET, ADDED, regret(explicit, chosen)


def regret(rounds: pd.DataFrame, chosen: float) -> Interval:
    """Estimates the time at the chosen cap over that at the best one, from rounds.

    The best cap of a round is the fastest in all other rounds: the fastest in the same round, or in
    all, is partly so by luck, and there would be a regret where all caps are equal. So an estimate
    may be below 1. What is estimated is not, and an interval that ends below 1 is drawn out to it.

    Args:
        rounds: a row per round, a column per cap.
        chosen: one of the caps.

    Returns:
        the ratio; without a value where there are fewer than two rounds.
    """
    logs = np.log(rounds)
    ratios = []
    for number in range(len(logs)):
        further = logs.drop(index=logs.index[number])
        if further.notna().any().any():
            best = further.mean().idxmin()
            ratios.append(logs.iloc[number][chosen] - logs.iloc[number][best])
    ratio = student(ratios).map(np.exp)
    return replace(ratio, high=max(ratio.high, 1.0)) if ratio.high == ratio.high else ratio


def _of_modes(stage: Run) -> Iterator[Estimate]:
    """Yields the mean step of mode dynamic over static's, on the same global batches."""
    comparison: ModeComparison = read_comparison(stage)
    if DYNAMIC not in comparison.modes:
        return
    steps = comparison.slowest()[[DYNAMIC, STATIC]]
    interval = mean_ratio(steps[DYNAMIC], steps[STATIC])
    names = ("model_name", "vocab_size", "global_batch", "max_length", "precision", "backend")
    settings = {name: comparison.settings.get(name) for name in names}
    quantity = f"step of dynamic over static, {comparison.like}{_where(stage, comparison.ranks)}"
    settings["data"] = comparison.dataset
    ratio = Judged(interval, machine=stage.machine_state)
    yield _estimate(3, quantity, RATIO, ratio, settings, stage, MODE_TIMES)


def _of_arms(stage: Run) -> Iterator[Estimate]:
    """Yields the achieved speedup of each arm of a sweep, or of changes."""
    for speedup in arm_speedups(stage):
        regime = speedup.regime.removeprefix("same ")
        quantity = f"speedup, {speedup.what} ({regime}){_where(stage, speedup.ranks)}"
        yield _estimate(4, quantity, RATIO, speedup.speedup, speedup.settings, stage, STEPS)


def _of_text(folder: Path) -> Iterator[Estimate]:
    """Yields the speedup of text training, of one run over another one before it."""
    for speedup in text_speedups(folder):
        stage = speedup.run
        quantity = f"speedup, text training{_where(stage, speedup.ranks)}"
        yield _estimate(4, quantity, RATIO, speedup.speedup, speedup.settings, stage, STEPS)


def _estimate(
    assignment: int,
    quantity: str,
    wording: str,
    ratio: Judged,
    settings: Mapping[str, object],
    stage: Run,
    table: str,
) -> Estimate:
    digest = hashlib.sha256((stage.folder / table).read_bytes()).hexdigest()
    return Estimate(
        assignment=assignment,
        quantity=in_a_line(quantity),
        wording=wording,
        ratio=ratio,
        settings=settings,
        stage=stage.folder.name,
        record=stage.environment,
        digest=digest,
    )


def _judged(interval: Interval, stage: Run) -> Judged:
    return Judged(interval, machine=stage.machine_state)


def _where(stage: Run, ranks: int) -> str:
    """Returns the number of ranks and, where hosts are emulated, their rate: both are settings."""
    network = str(stage.environment.get("network") or "")
    emulated = re.search(r"emulated hosts? at (.+)", network)
    return f", {counted(ranks, 'rank')}" + (f", emulated {emulated[1]}" if emulated else "")
