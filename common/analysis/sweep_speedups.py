"""Speedups of a sweep: every arm against the arm on one rank, measured in the same rounds."""

from __future__ import annotations

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from common.analysis.scaling.training_run import STRONG
from common.analysis.step_parts import PLAIN, flags
from common.errors import UserError
from common.samples import per_round, student

NO_CHANGE = "none"
OF_THE_ARM = ("arm", "regime", "world_size", "batch_per_rank", "global_batch", "change")
COLUMNS = (
    *OF_THE_ARM,
    "global_batch_changed",
    "step_ms",
    "throughput_samples_per_s",
    "speedup",
    "speedup_low",
    "speedup_high",
    "efficiency",
    "refused",
)
"""Columns of ``sweep_speedups``. ``step_ms`` is the median over rounds of the slowest rank's step;
``change`` is what was changed on one rank and on all, and ``global_batch_changed`` whether that
changed how many samples a step has; ``refused`` says why there is no speedup."""


def sweep_speedups(arms: pd.DataFrame, steps: pd.DataFrame) -> pd.DataFrame:
    """Computes each arm's speedup over one rank under the same change, in the same regime.

    Speedup is in samples per second, so it means the same for strong and for weak scaling. Its
    interval (95 %) is Student's, of the speedups of the rounds: arms of one round were measured
    side by side. With a single round there is none.

    Args:
        arms: Rows of ``arms.csv``.
        steps: Rows of ``steps.csv``. An arm's plain steps are used where it has some, else its
            timed ones (one rank has no buckets to watch: its timed steps are plain).

    Returns a row per arm. Raises UserError where an arm has no measured step.
    """
    arms = arms.assign(regime=arms["regime"].fillna(""), change=arms["change"].fillna(NO_CHANGE))
    rounds = step_times_by_round(steps)
    missing = sorted(set(arms["arm"]) - set(rounds.columns))
    if missing:
        raise UserError(f"steps.csv: no measured step of arm {', '.join(map(str, missing))}")
    return pd.DataFrame([_row(arm, arms, rounds) for _, arm in arms.iterrows()], columns=[*COLUMNS])


def unwatched_steps(steps: pd.DataFrame) -> pd.DataFrame:
    """Selects the rows that an arm's speed is taken from: its plain steps, else its timed ones.

    Warm-up is left out. A plain and a timed step may have the same round, epoch and number and are
    two steps nevertheless: times and samples are grouped by these only after this selection.
    """
    measured = steps[~flags(steps["warmup"])]
    plain = measured["kind"] == PLAIN
    return measured[plain | ~measured["arm"].isin(set(measured["arm"][plain]))]


def step_times_by_round(steps: pd.DataFrame) -> pd.DataFrame:
    """Computes the median step in ms of the slowest rank: a row per round, a column per arm.

    Warm-up is left out.
    """
    kept = unwatched_steps(steps)
    step = [key for key in ("epoch", "step") if key in kept]
    return per_round(kept, "step_time_ms", "arm", step=step)


def _row(arm: pd.Series, arms: pd.DataFrame, rounds: pd.DataFrame) -> dict:
    """Returns the row of an arm.

    Args:
        arm: Row of ``arms``.
        arms: Rows of ``arms.csv``.
        rounds: Step times in ms, as ``step_times_by_round`` returns them.
    """
    step_ms = float(rounds[arm["arm"]].median())
    row = {name: arm[name] for name in OF_THE_ARM} | {
        "global_batch_changed": _batch_changed(arm, arms),
        "step_ms": step_ms,
        "throughput_samples_per_s": arm["global_batch"] / step_ms * 1e3,
        "refused": "",
    }
    base = baseline_of(arm, arms)
    if base is None:
        kept = "global batch" if arm["regime"] == STRONG else "batch per rank"
        return row | {"refused": f"no arm on one rank with this change and this {kept}"}
    samples_ratio = arm["global_batch"] / base["global_batch"]
    times = rounds[[base["arm"], arm["arm"]]].to_numpy()
    value = float(np.nanmedian(times[:, 0]) / np.nanmedian(times[:, 1]) * samples_ratio)
    low, high = _interval(times, value, samples_ratio)
    if base["arm"] == arm["arm"]:
        low = high = 1.0
    return row | {
        "speedup": value,
        "speedup_low": low,
        "speedup_high": high,
        "efficiency": value / (arm["world_size"] / base["world_size"]),
    }


def _interval(times: NDArray, value: float, samples_ratio: float) -> tuple[float, float]:
    """Computes the 95 % interval of a speedup; NaN with fewer than two complete rounds.

    A moment at which the machine was slow is slow for both sides of a round, and cancels in the
    round's ratio.

    Args:
        times: Step times of the base and of the arm, [rounds, 2].
        value: Speedup, which the interval contains.
        samples_ratio: Samples of the arm's step over those of the base's.
    """
    complete = times[~np.isnan(times).any(axis=1)]
    if len(complete) < 2:
        return float("nan"), float("nan")
    # Not the exact interval of ranks, which has 50 % with two rounds: sweeps have two to six.
    paired = student(np.log(complete[:, 0] / complete[:, 1] * samples_ratio)).map(np.exp)
    return min(paired.low, value), max(paired.high, value)


def baseline_of(arm: pd.Series, arms: pd.DataFrame) -> pd.Series | None:
    """Returns the arm on one rank that ``arm`` is compared with; None where there is none.

    It has the same regime, change, precision and compression, and the same global batch (strong) or
    the same batch per rank (weak, or no regime).
    """
    same = ["regime", "change", "precision", "compression"]
    same += ["global_batch"] if arm["regime"] == STRONG else ["batch_per_rank", "accumulation"]
    matching = arms["world_size"] == 1
    for name in same:
        matching &= (arms[name] == arm[name]) | (arms[name].isna() & pd.isna(arm[name]))
    bases = arms[matching]
    return None if bases.empty else bases.iloc[0]


def _batch_changed(arm: pd.Series, arms: pd.DataFrame) -> bool:
    """Returns True if a step has another number of samples than without the change.

    Both on as many ranks.
    """
    unchanged = arms[
        (arms["change"] == NO_CHANGE)
        & (arms["regime"] == arm["regime"])
        & (arms["world_size"] == arm["world_size"])
    ]
    return not unchanged.empty and arm["global_batch"] not in set(unchanged["global_batch"])
