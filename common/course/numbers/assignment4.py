"""Numbers that assignment 4 asks for, recomputed from the tables of a run."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from common.course.numbers.tables import table
from common.errors import UserError
from common.samples import per_round, slowest_rank

SWEEP = "sweep"
ALONE, SEVERAL, ALL = "text_1_rank", "text_2_ranks", "text_all_ranks"
"""Stages of text training; the last one is that of a preset with a rank per GPU."""


def computation_on_most_ranks_over_one(run: Path) -> float:
    """Returns how many times as long forward and backward pass take on the most ranks as on one.

    They are those of the weak arms with the largest batch per rank, medians over the timed rows.
    """
    several, single = _weak_arms(run)
    steps = _measured_steps(run)
    timed = steps[steps["kind"] == "timed"]
    passes_ms = timed["forward_time_ms"] + timed["backward_time_ms"]
    by_arm = passes_ms.groupby(timed["arm"]).median()
    return float(by_arm[several["arm"]] / by_arm[single["arm"]])


def weak_efficiency(run: Path) -> float:
    """Returns the efficiency of weak scaling with the largest batch on the most ranks, as a share.

    A step is as long as its slowest rank's; a round's is the median, and the arm's the median over
    rounds. On one rank nothing is watched and no step is plain; there the timed ones count.
    """
    several, single = _weak_arms(run)
    steps = _measured_steps(run)
    is_plain = steps["kind"] == "plain"
    counted = steps[is_plain | ~steps["arm"].isin(steps.loc[is_plain, "arm"])]
    step_ms = per_round(counted, "step_time_ms", "arm", step=["epoch", "step"]).median()
    throughput = [arm["global_batch"] / step_ms[arm["arm"]] for arm in (several, single)]
    return float(throughput[0] / throughput[1] / several["world_size"])


def text_speedup(run: Path) -> float:
    """Returns how many times as fast an epoch of text training is on several ranks as on one.

    Epochs are as long as on their slowest rank; the means are over all but the first.
    """
    several = SEVERAL if (run / SEVERAL).is_dir() else ALL
    return _mean_epoch_s(run, ALONE) / _mean_epoch_s(run, several)


def _weak_arms(run: Path) -> tuple[pd.Series, pd.Series]:
    """Returns the weak arms with the largest batch per rank, on the most ranks and on one.

    Raises:
        UserError: there are none on one rank and on several.
    """
    arms = table(run, "arms", SWEEP)
    weak = arms[arms["regime"] == "weak"]
    weak = weak[weak["batch_per_rank"] == weak["batch_per_rank"].max()].sort_values("world_size")
    if len(weak) < 2 or weak["world_size"].iloc[0] != 1:
        raise UserError(f"{SWEEP}/arms.csv: no weak arms on one rank and on several")
    return weak.iloc[-1], weak.iloc[0]


def _measured_steps(run: Path) -> pd.DataFrame:
    """Returns the steps of the sweep without warm-up."""
    steps = table(run, "steps", SWEEP)
    return steps[steps["warmup"].astype(str) != "True"]


def _mean_epoch_s(run: Path, stage: str) -> float:
    """Returns the mean epoch of a stage without its first one, in seconds.

    Raises:
        UserError: there is one epoch only.
    """
    epochs = slowest_rank(table(run, "epochs", stage), "train_time_s", by=["epoch"])
    if len(epochs) < 2:
        raise UserError(f"{stage}/epochs.csv: one epoch only, and the first does not count")
    return float(epochs.iloc[1:].mean())
