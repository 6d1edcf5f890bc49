"""Speedups of a sweep: every arm against the arm on one rank, measured in the same rounds."""

from __future__ import annotations

import numpy as np
import pandas as pd

from common.analysis.scaling.training_run import STRONG
from common.analysis.step_parts import PLAIN, flags
from common.errors import UserError
from common.judged import FIRST_PAGE_ROUNDS, NOT_WITNESSED, Judged, Verdict
from common.samples import paired_ratio, per_round

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
    "judged",
    "refused",
)
"""Columns of ``sweep_speedups``. ``step_ms`` is the median over rounds of the slowest rank's step;
``change`` is what was changed on one rank and on all, and ``global_batch_changed`` whether that
changed how many samples a step has; ``judged`` is the speedup as it may be said (``Judged``), and
``refused`` says why there is none."""

DRAWN = (Verdict.SETTLED, Verdict.HIDDEN)
"""Verdicts on numbers whose interval is drawn."""


def sweep_speedups(
    arms: pd.DataFrame, steps: pd.DataFrame, machine: str = NOT_WITNESSED
) -> pd.DataFrame:
    """Computes each arm's speedup over one rank under the same change, in the same regime.

    Speedup is in samples per second, so it means the same for strong and for weak scaling. It is
    paired by round, as arms of one round were measured side by side; the intervals (95 %) of all
    arms on several ranks hold at once. With a single round there is none.

    Args:
        arms: Rows of ``arms.csv``.
        steps: Rows of ``steps.csv``. An arm's plain steps are used where it has some, else its
            timed ones (one rank has no buckets to watch: its timed steps are plain).
        machine: State of the machine meanwhile (``Judged``).

    Returns a row per arm. Raises UserError where an arm has no measured step.
    """
    arms, rounds, bases = _with_bases(arms, steps)
    claims = sum(base is not None and base["arm"] != arm for arm, base in bases.items())
    rows = []
    for _, arm in arms.iterrows():
        step_ms, base = float(rounds[arm["arm"]].median()), bases[arm["arm"]]
        row = {name: arm[name] for name in OF_THE_ARM} | {
            "global_batch_changed": _batch_changed(arm, arms),
            "step_ms": step_ms,
            "throughput_samples_per_s": arm["global_batch"] / step_ms * 1e3,
            "refused": "",
        }
        if base is None:
            kept = "global batch" if arm["regime"] == STRONG else "batch per rank"
            row["refused"] = f"no arm on one rank with this change and this {kept}"
        else:
            row |= _speedup(arm, base, rounds, claims=max(1, claims), machine=machine)
        rows.append(row)
    return pd.DataFrame(rows, columns=[*COLUMNS])


def speedups_by_round(arms: pd.DataFrame, steps: pd.DataFrame) -> pd.DataFrame:
    """Computes the speedups of ``sweep_speedups`` in each round: a row per round, a column per arm.

    Arms without one on one rank are left out. Raises UserError where an arm has no measured step.
    """
    arms, rounds, bases = _with_bases(arms, steps)
    speedups = {}
    for _, arm in arms.iterrows():
        base = bases[arm["arm"]]
        if base is not None:
            samples_ratio = arm["global_batch"] / base["global_batch"]
            speedups[arm["arm"]] = rounds[base["arm"]] / rounds[arm["arm"]] * samples_ratio
    return pd.DataFrame(speedups, index=rounds.index)


def _with_bases(
    arms: pd.DataFrame, steps: pd.DataFrame
) -> tuple[pd.DataFrame, pd.DataFrame, dict[int, pd.Series | None]]:
    """Returns the arms with all words filled in, ``step_times_by_round``, and each arm's
    ``baseline_of``. Raises UserError where an arm has no measured step."""
    # A column without any word is read as numbers.
    words = arms[["regime", "change"]].astype(object)
    arms = arms.assign(**words.fillna({"regime": "", "change": NO_CHANGE}))
    rounds = step_times_by_round(steps)
    missing = sorted(set(arms["arm"]) - set(rounds.columns))
    if missing:
        raise UserError(f"steps.csv: no measured step of arm {', '.join(map(str, missing))}")
    return arms, rounds, {arm["arm"]: baseline_of(arm, arms) for _, arm in arms.iterrows()}


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


def _speedup(
    arm: pd.Series, base: pd.Series, rounds: pd.DataFrame, *, claims: int, machine: str
) -> dict:
    """Returns an arm's speedup over the one on one rank, with its interval."""
    samples_ratio = arm["global_batch"] / base["global_batch"]
    ratio = paired_ratio(rounds[base["arm"]], rounds[arm["arm"]], claims=claims)
    judged = Judged(
        ratio.map(lambda value: value * samples_ratio),
        machine=machine,
        least_rounds=FIRST_PAGE_ROUNDS,
    )
    low, high = judged.interval.low, judged.interval.high
    if base["arm"] == arm["arm"]:
        low = high = 1.0
    return {
        "speedup": judged.estimate,
        "speedup_low": low,
        "speedup_high": high,
        "efficiency": judged.estimate / (arm["world_size"] / base["world_size"]),
        "judged": judged,
    }


def against_one_rank(judged: Judged | float, refused: str = "") -> str:
    """Returns ``faster``, ``slower``, or the verdict where neither is settled.

    An arm without a speedup has a reason, ``refused``.
    """
    if refused or not isinstance(judged, Judged):
        return refused
    if not judged.is_settled:
        return judged.said
    return "faster" if judged.estimate > 1 else "slower"


def error_bars(table: pd.DataFrame, number: str = "speedup") -> np.ndarray:
    """Returns the error bars of speedups, [2, arms]; of no length where nothing may be told yet.

    That is where rounds lack, where the machine was disturbed, and where there is no speedup.

    Args:
        table: speedup, speedup_low, speedup_high and judged of each arm, as ``sweep_speedups`` has.
        number: the column that is drawn, where it is another one, such as ratio.
    """
    may_be_drawn = [
        isinstance(judged, Judged) and judged.verdict in DRAWN for judged in table["judged"]
    ]
    below = (table[number] - table[f"{number}_low"]).where(may_be_drawn)
    above = (table[f"{number}_high"] - table[number]).where(may_be_drawn)
    return np.nan_to_num(np.clip([below, above], 0, None))


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
    """Returns True if a step has more or fewer samples than on as many ranks without the change."""
    unchanged = arms[
        (arms["change"] == NO_CHANGE)
        & (arms["regime"] == arm["regime"])
        & (arms["world_size"] == arm["world_size"])
    ]
    return not unchanged.empty and arm["global_batch"] not in set(unchanged["global_batch"])
