"""Plans the visits of settings: how many, and how often, in the time that there is.

Sequential halving (Karnin, Koren and Somekh, ICML 2013): all candidates are visited for a few
rounds, the slower half is left out, and so on. The winner of such a choice looks better than it is,
so its gain is taken from rounds of its own, beside the default, that had no part in the choice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import pandas as pd

from common.samples import Interval, paired_gain

Arm = TypeVar("Arm")

ROUNDS_PER_LEVEL = 2
LADDERS = ((8, 4, 2), (6, 3), (4, 2), (3,), (2,), (1,))
"""Candidates at each level, the richest plan first. With one candidate there is no choice."""
FEWEST_FINAL, MOST_FINAL = 6, 14
"""Bounds on the final rounds of a plan: fewer than six give no interval of 95 %."""
MOST_WITH_TIME_LEFT = 30
"""Bound on the final rounds of the winner, where there is time after those of the plan."""


@dataclass(frozen=True)
class VisitPlan:
    """The visits of a tuning run.

    Attributes:
        levels: candidates at each level of the halving, the default beside them.
        final_rounds: rounds of the winner and the default.
        options: cost of a visit to each option of the final rounds, in visits of the default: one,
            or more where a step has several passes (accumulation).
    """

    levels: tuple[int, ...]
    final_rounds: int
    options: tuple[int, ...] = ()

    @property
    def visits(self) -> int:
        """Returns the cost of the plan, in visits of the default: one DDP instance each."""
        halving = sum((count + 1) * ROUNDS_PER_LEVEL for count in self.levels)
        return halving + self.final_rounds * (2 + sum(self.options))


def with_final_rounds(plan: VisitPlan, visits: float) -> VisitPlan:
    """Shortens the final rounds of a plan to those that fit into the ``visits`` that are left.

    Where not even FEWEST_FINAL rounds fit, options are left out, the last first. Without options
    the fewest rounds stay, whether they fit or not.
    """
    for count in range(len(plan.options), -1, -1):
        options = plan.options[:count]
        rounds = min(plan.final_rounds, int(visits // (2 + sum(options))))
        if rounds >= FEWEST_FINAL:
            return replace(plan, final_rounds=rounds, options=options)
    return replace(plan, final_rounds=FEWEST_FINAL, options=())


def rounds_with_time_left(rounds_done: int, visits: float) -> int:
    """Returns how many more rounds of the winner and the default fit into the ``visits`` left."""
    return max(0, min(MOST_WITH_TIME_LEFT - rounds_done, int(visits // 2)))


def plan_visits(visits: int, candidates: int, options: Sequence[int] = ()) -> VisitPlan:
    """Returns the richest plan within ``visits``, or the poorest there is.

    A visit is of one DDP instance; ``options`` have the cost of each, in visits of the default.
    Candidates come first, then options, then more final rounds.
    """
    ladders = [tuple(n for n in ladder if n > 1) for ladder in LADDERS]
    fitting = [levels for levels in ladders if not levels or levels[0] <= candidates]
    plans = [VisitPlan(levels, FEWEST_FINAL) for levels in fitting]
    chosen = next((plan for plan in plans if plan.visits <= visits), plans[-1])
    for count in range(1, len(options) + 1):
        richer = VisitPlan(chosen.levels, chosen.final_rounds, tuple(options[:count]))
        chosen = richer if richer.visits <= visits else chosen
    for rounds in range(FEWEST_FINAL + 1, MOST_FINAL + 1):
        longer = VisitPlan(chosen.levels, rounds, chosen.options)
        chosen = longer if longer.visits <= visits else chosen
    return chosen


def successive_halving(
    arms: Sequence[Arm],
    levels: Sequence[int],
    times_after: Callable[[int, list[Arm]], pd.DataFrame],
    name: Callable[[Arm], str],
    reference: str | None = None,
) -> list[Arm]:
    """Ranks arms by real steps, of fewer of them at each level; returns all, the best first.

    A level goes on with those that have saved most in all rounds so far. What it leaves out stays
    behind what it keeps, what has no time comes behind what has one, and what no level visits comes
    last.

    Args:
        arms: the most promising first.
        levels: number of arms at each level.
        times_after: (level, arms) → visits them; returns a row per round so far, a column per name.
        name: arm → name of its column.
        reference: column that savings are of; by default the first arm that has one.
    """
    ranked = list(arms)
    for level, count in enumerate(levels):
        times = times_after(level, ranked[:count])
        ran = [name(arm) for arm in ranked[:count] if name(arm) in times]
        base = reference if reference in times else next(iter(ran), "")
        saved = {
            arm: saving(times, name(arm), base).estimate if name(arm) in ran else -math.inf
            for arm in ranked[:count]
        }
        ranked[:count] = sorted(saved, key=saved.__getitem__, reverse=True)
    return ranked


def saving(times: pd.DataFrame, name: str, base: str) -> Interval:
    """Returns what an arm saves of another's time in the rounds (rows) that visited both."""
    pairs = pd.DataFrame({"arm": times[name], "base": times[base]}).dropna()
    return paired_gain(pairs["arm"], pairs["base"])
