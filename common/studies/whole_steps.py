"""``ddplab study steps``: whole steps of DDP and FSDP between two emulated hosts, predicted.

The emulated part of assignment 1's laptop preset, with more rounds, several times over, each run on
a cluster of its own: a figure of one run says nothing of the next. ``steps.csv`` has each step
predicted and measured, with n, the standard error of the measured median; ``ranges.csv`` the range
over the runs. The exercises' strategies take turns with PyTorch's: ``ratios.csv`` has their steps'
ratio in each round, ``bytes.csv`` what a rank sent and what was predicted.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import pandas as pd

from common.analysis.data_parallel.emulated_strategies import EmulatedStrategies, read_emulated
from common.analysis.data_parallel.strategies import EXCHANGING
from common.cluster.emulated import EmulatedCluster, why_no_hosts
from common.cluster.launch import launch
from common.errors import UserError
from common.runtime.flags import as_flags
from common.runtime.machine.environment import describe_environment
from common.runtime.paths import project_root
from common.runtime.records.study import say_tables, study_run
from common.runtime.stage_progress import StageProgress
from common.samples import MOST_NOISE, median_standard_error, per_round, slowest_rank
from common.settings import Positive, Settings

ASSIGNMENTS = project_root() / "assignments"
CONFIG = ASSIGNMENTS / "assignment1" / "configs" / "laptop.yaml"
HOSTS = 2
RATIOS = {"MY_BUCKETS": "DDP", "MY_ZERO1": "DDP", "MY_FSDP": "FULL_SHARD"}
"""Strategies of the exercises → those of PyTorch that they are compared with."""


@dataclass(frozen=True)
class WholeStepsStudy(Settings):
    """Settings of the study: the number of runs, their links and rounds."""

    runs: Annotated[int, Positive] = 3
    """Runs on each network."""
    rate: str = "1gbit"
    """Rate of the emulated links, as tc writes it."""
    rounds: Annotated[int, Positive] = 8
    """Rounds of steps under each strategy."""


SETTINGS = WholeStepsStudy


def run_study(study: WholeStepsStudy, output_dir: str, progress: StageProgress) -> Path:
    """Measures and predicts each run; returns the run directory.

    Raises UserError: this machine cannot emulate hosts.
    """
    if reason := why_no_hosts():
        raise UserError(reason)
    cluster = EmulatedCluster.of(HOSTS, [study.rate])
    environment = describe_environment("gloo", "cpu", HOSTS)
    with study_run("steps", study, output_dir, progress, environment) as run:
        tables, ratios, sent = [], [], []
        for number in range(study.runs):
            folder = (run.path / f"run-{number + 1}" / f"emulated-{HOSTS}x{study.rate}").absolute()
            folder.mkdir(parents=True)
            for name, script, flags in measurements(study):
                where = {"config": CONFIG, "output_dir": folder, "run_id": name}
                with progress.stage(f"run {number + 1}, {name}") as update:
                    launch(
                        script,
                        as_flags(where | flags),
                        HOSTS,
                        folder / f"{name}.log",
                        hosts=cluster,
                        on_output=update,
                    )
            emulated = read_emulated(folder, folder.parent)
            tables.append(steps_of(emulated).assign(run=number + 1))
            ratios.append(ratios_of(emulated.measured.times).assign(run=number + 1))
            sent.append(emulated.measured.sent().assign(run=number + 1))
        run.write_table("ratios.csv", pd.concat(ratios))
        run.write_table("bytes.csv", pd.concat(sent))
        progress.say(summary_of(pd.concat(ratios)).to_string(float_format="%.3f"))
        steps = pd.concat(tables)
        ranges = ranges_of(steps)
        run.write_table("steps.csv", steps)
        run.write_table("ranges.csv", ranges)
    say_tables(progress, ranges, float_format="%.3f")
    return run.path


def measurements(study: WholeStepsStudy) -> list[tuple[str, Path, dict]]:
    """Returns name, script and flags of each measurement; other settings are the preset's."""
    assignment1, assignment2 = ASSIGNMENTS / "assignment1", ASSIGNMENTS / "assignment2"
    strategies = {
        "strategies": ("local", "DDP", "FULL_SHARD", "SHARD_GRAD_OP", *RATIOS),
        "accumulations": (1,),
        "rounds": study.rounds,
        "parts": True,
    }
    return [
        ("allreduce_benchmark", assignment2 / "allreduce_benchmark.py", {"rounds": 4}),
        ("overlap_benchmark", assignment2 / "overlap_benchmark.py", {"rounds": 6}),
        ("compare_strategies", assignment1 / "compare_strategies.py", strategies),
    ]


def ratios_of(times: pd.DataFrame) -> pd.DataFrame:
    """Returns the ratios of steps in each round, of medians over its steps.

    A step is as long as its slowest rank's. Columns: strategy, over (what it is compared with),
    round, ratio.
    """
    rounds = per_round(times, "step_time_ms", "strategy")
    rows = [
        (strategy, over, round_, ratio)
        for strategy, over in RATIOS.items()
        for round_, ratio in (rounds[strategy] / rounds[over]).items()
    ]
    return pd.DataFrame(rows, columns=["strategy", "over", "round", "ratio"])


def summary_of(ratios: pd.DataFrame) -> pd.DataFrame:
    """Returns median and quartiles of the ratios over all rounds of all runs, by strategy."""
    quartiles = ratios.groupby(["strategy", "over"])["ratio"].quantile([0.25, 0.5, 0.75]).unstack()
    return quartiles.set_axis(["q25", "median", "q75"], axis=1)


def steps_of(emulated: EmulatedStrategies) -> pd.DataFrame:
    """Returns a row per strategy: predicted_ms, measured_ms, error and n, both relative."""
    table = emulated.table()
    keys = ["strategy", "accumulation", "round", "iteration"]
    slowest = slowest_rank(emulated.measured.times, "step_time_ms", by=keys)
    # Of each strategy's steps [rounds, iterations], each as long as its slowest rank's.
    n = [
        median_standard_error(slowest[row.strategy, row.accumulation].unstack().to_numpy())
        for row in table.itertuples()
    ]
    columns = ["strategy", "accumulation", "predicted_ms", "measured_ms"]
    return table[columns].assign(error=table["predicted_ms"] / table["measured_ms"] - 1, n=n)


def ranges_of(steps: pd.DataFrame) -> pd.DataFrame:
    """Returns the range of each strategy's errors over the runs in which n is small enough.

    Columns: strategy, runs, judged, lowest and highest error (NaN where none is judged), worst n.
    """
    rows = []
    for strategy in [name for name in EXCHANGING if name in set(steps["strategy"])]:
        of_strategy = steps[steps["strategy"] == strategy]
        judged = of_strategy.loc[of_strategy["n"] <= MOST_NOISE, "error"]
        rows.append(
            {
                "strategy": strategy,
                "runs": of_strategy["run"].nunique(),
                "judged": len(judged),
                "lowest": judged.min(),
                "highest": judged.max(),
                "worst_n": of_strategy["n"].max(),
            }
        )
    return pd.DataFrame(rows)
