"""What choices of plans cost: a race to the fastest plan of each budget, and regrets, from samples.

Every plan runs in the first round. It is visited again only if, of those plans that fit into one of
the budgets, it takes less than ``RACE`` times as long as the fastest one, by the medians of the
rounds so far: at first 1.5 times, then 1.25, then 1.15 times. So what is left out has been slower
than the best by many times the noise of a visit, and a regret of a few per cent is told by rounds.
"""

from __future__ import annotations

from collections.abc import Iterable

import pandas as pd

from common.samples import Interval, paired_ratio, per_round
from common.studies.exhaustive_sweep import runoff_regret

RACE = (1.5, 1.25, 1.15)
"""Bounds on a plan's time, as multiples of the fastest one's, after one, two, and three rounds or
more."""
PLAN, UNTUNED, SEARCH, FREE = "plan", "plan without tuning", "search alone", "free gathers"
ALWAYS_DDP, ALWAYS_FULL, LARGEST = "always DDP", "always FULL_SHARD", "largest DDP micro-batch"
RIVALS = (UNTUNED, SEARCH, FREE, ALWAYS_DDP, ALWAYS_FULL, LARGEST)
"""Who chooses besides plan: plan before it tried other buckets or units, its search without
verification, the same search with collectives of FSDP at no cost, and one micro-batch without
checkpointing under a strategy."""


def peak_of_plans(peaks: pd.DataFrame) -> pd.Series:
    """Returns the peak of each plan in bytes, of the rank with the largest one."""
    return peaks.groupby("plan")["peak_bytes"].max()


def racing(swept: pd.DataFrame, tops: pd.Series, budgets: Iterable[float]) -> list[str]:
    """Returns the plans that the next round visits.

    Args:
        swept: samples of the rounds so far.
        tops: peak of each plan in bytes.
        budgets: bytes of memory, of which a plan must fit into one.
    """
    times = per_round(swept, "step_time_ms", "plan")
    medians = times.loc[:, times.iloc[-1].notna()].median()
    bound = RACE[min(len(times), len(RACE)) - 1]
    kept: set[str] = set()
    for budget in budgets:
        fitting = medians[tops[medians.index] <= budget]
        kept |= set(fitting.index[fitting <= bound * fitting.min()])
    return [name for name in medians.index if name in kept]


def with_regrets(
    choices: pd.DataFrame, swept: pd.DataFrame, runoff: pd.DataFrame, tops: pd.Series
) -> pd.DataFrame:
    """Adds fits, regret, low, high and rounds to choices.

    A regret is against the fastest plan within the budget of the run-off, which other rounds
    choose. Of a plan that is not in the run-off it is against the fastest of the sweep, in the
    rounds that visited both; a single one gives no interval. One that does not fit has none.
    """
    swept = per_round(swept, "step_time_ms", "plan")
    run = runoff.rename(columns={"plan": "setting"})
    rows = []
    for choice in choices.to_dict("records"):
        fitting = tops.index[tops <= choice["memory_bytes"]]
        regret = _regret(choice["plan"], fitting, swept, run) if choice["plan"] in fitting else None
        judged = {"regret": None, "low": None, "high": None, "rounds": 0}
        if regret:
            judged = {"regret": regret.estimate, "low": regret.low, "high": regret.high}
            judged["rounds"] = regret.rounds
        rows.append(choice | {"fits": regret is not None} | judged)
    table = pd.DataFrame(rows)
    return table.astype(dict.fromkeys(("regret", "low", "high"), float))


def _regret(name: str, fitting: pd.Index, swept: pd.DataFrame, runoff: pd.DataFrame) -> Interval:
    rivals = [other for other in runoff["setting"].unique() if other in fitting]
    if name not in rivals:
        last = swept[fitting].loc[:, swept[fitting].iloc[-1].notna()]
        fastest = last.median().idxmin()
        return paired_ratio(swept[name], swept[fastest]).map(lambda ratio: ratio - 1)
    run_here = runoff[runoff["setting"].isin(rivals)]
    if rivals == [name]:
        return Interval(0.0, 0.0, 0.0, rounds=run_here["round"].nunique())
    return runoff_regret(run_here, pd.DataFrame({"setting": rivals}), name).interval
