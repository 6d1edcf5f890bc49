"""Every speedup of several ranks over one that a run measured, in one table, with why they differ.

A run has many: strategies in turns on this machine and on emulated hosts, sweeps over ranks, text
training, changes that were made. Each is the one of its section, with the section's interval and
verdict. They differ by what the exchange has to carry while the ranks
compute: the bytes of a step over the time of its computation is the rate at which a network could
just hide it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from common.analysis.comparable import network_of
from common.analysis.data_parallel.strategies import StrategyTimes, read_strategies
from common.analysis.data_parallel.training_runs import NAMES, TIMES
from common.analysis.runs import DEPTHS, Run, complete_runs
from common.analysis.scaling.speedups import regime_of
from common.analysis.scaling.study import Compared
from common.analysis.scaling.study_files import read_runs
from common.analysis.scaling.text_study import by_data
from common.analysis.scaling.training_run import STRONG, ScalingRun
from common.analysis.show import ends_format
from common.analysis.step_parts import decompose
from common.analysis.sweep_speedups import NO_CHANGE, against_one_rank, sweep_speedups
from common.csv_tables import read_table
from common.errors import UserError
from common.judged import Judged
from common.runtime.wording import counted
from common.tables import ARM_COLUMNS, FACT_COLUMNS, STEP_COLUMNS

SAME_GLOBAL_BATCH, SAME_BATCH_PER_RANK = "same global batch", "same batch per rank"
ARMS, STEPS, FACTS, PROPOSALS = "arms.csv", "steps.csv", "facts.csv", "proposals.csv"
LOCAL = "local"
WORKLOADS = {"mlp": "MLP", "text": "text", "replay": "replay"}
SETTINGS = ("model", "micro_batch_size", "seq_len", "precision", "bucket_cap_mb")
ARM_SETTINGS = ARM_COLUMNS[ARM_COLUMNS.index("world_size") : -1]
TITLES = {
    "what": "what",
    "verdict": "faster or slower than one",
    "model": "model",
    "gradient_bytes": ("gradients (MB)", "{:,.1f}"),
    "network": "network",
    "regime": "batch",
    "ranks": "ranks",
    "speedup": "speedup",
    "interval": ("95 % interval", ends_format),
    "rounds": ("rounds", "{:.0f}"),
    "exchanged_bytes": ("exchanged (MB)", "{:,.1f}"),
    "computation_ms": "computation (ms)",
    "needed_bytes_per_s": ("to hide it (GB/s)", "{:.2f}"),
}
"""Titles of ``tabulate_speedups``: a verdict stands before its number."""


@dataclass(frozen=True, eq=False)
class RankSpeedup:
    """Samples per second of several ranks over those of one.

    Attributes:
        what: the strategy, the sweep, or what was changed.
        model: the model in words.
        regime: SAME_GLOBAL_BATCH or SAME_BATCH_PER_RANK.
        speedup: the speedup as the section of its run judges it, with what holds at once there.
        exchanged_bytes: bytes that a rank sends in the exchange of a step; NaN if not counted.
        computation_ms: a step of these ranks without its exchange, in ms; NaN if not measured.
        settings: settings that two repetitions of one measurement have in common.
    """

    run: Run
    what: str
    model: str
    gradient_bytes: float
    regime: str
    ranks: int
    speedup: Judged
    exchanged_bytes: float
    computation_ms: float
    settings: Mapping[str, object]

    @property
    def network(self) -> str:
        """Returns the name of the network between the ranks."""
        return network_of(self.run.environment) or "not recorded"

    @property
    def needed_bytes_per_s(self) -> float:
        """Returns the rate at which a network hides the exchange behind all of the computation."""
        return self.exchanged_bytes / self.computation_ms * 1e3

    @property
    def verdict(self) -> str:
        """Returns ``faster``, ``slower``, or the verdict where neither is settled."""
        return against_one_rank(self.speedup)


def find_speedups(folders: Iterable[Path]) -> list[RankSpeedup]:
    """Finds every speedup of several ranks over one in run directories with a folder per stage.

    Raises UserError for a table that cannot be read.
    """
    return [row for folder in folders for row in _of_run(folder)]


def tabulate_speedups(speedups: Sequence[RankSpeedup]) -> pd.DataFrame:
    """Returns a row per speedup, by network and then by the rate that the exchange needs.

    Columns as in ``TITLES``; intervals are those of the rows' sections.
    """
    rows = []
    for row in speedups:
        judged = row.speedup
        values = {
            "speedup": judged.estimate,
            "interval": judged.interval,
            "rounds": judged.rounds,
        }
        rows.append([values[name] if name in values else getattr(row, name) for name in TITLES])
    return pd.DataFrame(rows, columns=[*TITLES]).sort_values(
        ["network", "needed_bytes_per_s", "what"], ignore_index=True
    )


def _of_run(folder: Path) -> Iterator[RankSpeedup]:
    for opened in complete_runs(folder, TIMES, DEPTHS):
        yield from _strategy_speedups(read_strategies(opened), opened)
    for opened in complete_runs(folder, ARMS, DEPTHS):
        yield from arm_speedups(opened)
    yield from text_speedups(folder)


def _strategy_speedups(strategies: StrategyTimes, opened: Run) -> Iterator[RankSpeedup]:
    """Yields the speedup of each strategy over one device that does the same global batch."""
    sent = strategies.sent().set_index(["accumulation", "strategy"])
    sent_bytes = sent["measured_bytes"].fillna(sent["predicted_bytes"])
    for (accumulation, strategy), speedup in strategies.speedups.items():
        rounds = strategies.rounds[accumulation]
        batches = "" if accumulation == 1 else f", {counted(int(accumulation), 'micro-batch')}"
        exchanged = 0.0 if strategy == LOCAL else sent_bytes.get((accumulation, strategy), np.nan)
        yield RankSpeedup(
            run=opened,
            what=f"{NAMES.get(strategy, strategy)}{batches}",
            model=str(strategies.settings["model"]),
            gradient_bytes=4.0 * strategies.config.num_parameters(),
            regime=SAME_GLOBAL_BATCH,
            ranks=strategies.ranks,
            speedup=speedup,
            exchanged_bytes=float(exchanged),
            computation_ms=float(rounds[LOCAL].median()) if LOCAL in rounds else np.nan,
            settings=strategy_settings(strategies),
        )


def strategy_settings(strategies: StrategyTimes) -> dict[str, object]:
    """Returns what must be the same before two comparisons of strategies are repetitions."""
    settings = {name: strategies.settings.get(name) for name in SETTINGS}
    return settings | {"ranks": strategies.ranks, "backend": strategies.backend}


def arm_speedups(opened: Run) -> Iterator[RankSpeedup]:
    """Yields the speedup of each arm of a sweep, or of changes, over its arm on one rank."""
    arms = read_table(opened.folder / ARMS, ARM_COLUMNS)
    steps = read_table(opened.folder / STEPS, STEP_COLUMNS)
    try:
        table = sweep_speedups(arms, steps, opened.machine_state).set_index("arm")
    except UserError as error:
        raise UserError(f"{opened.folder}/{error}") from None
    table = table[(table["world_size"] > 1) & (table["refused"] == "")]
    if table.empty:
        return
    model, gradient_bytes = _model_of(opened)
    for _, arm in arms[arms["arm"].isin(table.index)].iterrows():
        row = table.loc[arm["arm"]]
        exchanged_bytes, computation_ms = _exchange(steps, int(arm["arm"]))
        yield RankSpeedup(
            run=opened,
            what=_name_of_arm(opened, row),
            model=model,
            gradient_bytes=gradient_bytes,
            regime=SAME_GLOBAL_BATCH if row["regime"] == STRONG else SAME_BATCH_PER_RANK,
            ranks=int(arm["world_size"]),
            speedup=row["judged"],
            exchanged_bytes=exchanged_bytes,
            computation_ms=computation_ms,
            settings={"model": model, "backend": opened.environment.get("backend")}
            | {name: _plain(arm[name]) for name in ARM_SETTINGS},
        )


def _name_of_arm(opened: Run, arm: pd.Series) -> str:
    workload = WORKLOADS.get(str(opened.settings.get("workload", "mlp")), "sweep")
    if opened.has(PROPOSALS):
        change = "as it was" if arm["change"] == NO_CHANGE else arm["change"]
        return f"changes: {change}"
    batch = arm["global_batch"] if arm["regime"] == STRONG else arm["batch_per_rank"]
    return f"{workload} sweep, batch {batch:,.0f}"


def text_speedups(folder: Path) -> Iterator[RankSpeedup]:
    """Yields the speedups of text training: runs one after another, so no rounds to be paired."""
    try:
        runs = [run for run in read_runs(folder).runs if run.environment]
    except UserError:  # there is none
        return
    if not runs:
        return
    for cases in by_data(runs).values():
        for case in cases:
            if case.speedup and not case.is_base:
                yield _text_speedup(case, folder)


def _text_speedup(case: Compared, folder: Path) -> RankSpeedup:
    run: ScalingRun = case.configuration.runs[0]
    opened = Run(run.folder, folder)
    model, gradient_bytes = _model_of(opened)
    exchanged_bytes, computation_ms = _exchange(read_table(run.folder / STEPS, STEP_COLUMNS), 0)
    regime = regime_of(case.base.identity, run.identity)
    return RankSpeedup(
        run=opened,
        what="text training",
        model=model,
        gradient_bytes=gradient_bytes,
        regime=SAME_GLOBAL_BATCH if regime == STRONG else SAME_BATCH_PER_RANK,
        ranks=run.identity.world_size,
        speedup=case.speedup.judged,
        exchanged_bytes=exchanged_bytes,
        computation_ms=computation_ms,
        settings={
            "model": model,
            "data": run.dataset,
            "ranks": run.identity.world_size,
            "global_batch": run.identity.global_batch,
            "precision": run.identity.precision,
            "backend": opened.environment.get("backend"),
        },
    )


def _model_of(opened: Run) -> tuple[str, float]:
    """Returns the model in words and the bytes of its gradients, from ``facts.csv``."""
    if not opened.has(FACTS):
        return str(opened.settings.get("model", "not recorded")), np.nan
    first = read_table(opened.folder / FACTS, FACT_COLUMNS).iloc[0]
    return str(first["model"]), float(first["gradient_bytes"])


def _exchange(steps: pd.DataFrame, arm: int) -> tuple[float, float]:
    """Returns the bytes that a rank sends in a step, and the parts that compute, in ms; NaN if
    unknown.

    All-reduces are rings: each of n ranks sends 2(n − 1)/n of what is reduced.
    """
    try:
        parts = decompose(steps, arm)
    except UserError:
        return np.nan, np.nan
    computing = ("data", "forward", "backward", "optimizer")
    computation_ms = sum(parts.parts_ms[name] for name in computing)
    ring = 2 * (parts.world_size - 1) / parts.world_size
    return parts.exchanged_bytes_per_step * ring, computation_ms


def _plain(value: object) -> object:
    """Returns a table's value as settings have it: None where it is blank, and no type of NumPy."""
    if pd.isna(value):
        return None
    return value.item() if isinstance(value, np.generic) else value
