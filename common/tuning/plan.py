"""Which settings are visited how often, with as many visits as there is time for.

Sequential halving (Karnin, Koren and Somekh, ICML 2013): all candidates are visited for a few
rounds, the slower half is left out, and so on. The winner of such a choice looks better than it is,
so its gain is taken from rounds of its own, beside the default, that had no part in the choice.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

ROUNDS_PER_LEVEL = 2
LADDERS = ((8, 4, 2), (6, 3), (4, 2), (3,), (2,), (1,))
"""Candidates at each level; one alone is not chosen among."""
FEWEST_FINAL, MOST_FINAL = 6, 14
"""Rounds of the winner: with fewer than six no interval of 95 % can be had."""
MOST_OPTIONS = 2
OPTION_VISITS = (1, 2)
"""Visits' worth of a round of the first option and of the second (accumulation: two passes)."""


@dataclass(frozen=True)
class VisitPlan:
    """What is visited.

    Attributes:
        levels: candidates at each level of the halving, the default beside them.
        final_rounds: of the winner and the default.
        options: options that change the numbers, visited in the final rounds too.
    """

    levels: tuple[int, ...]
    final_rounds: int
    options: int = 0

    @property
    def visits(self) -> int:
        """How many fresh DDP instances that makes."""
        halving = sum((count + 1) * ROUNDS_PER_LEVEL for count in self.levels)
        return halving + self.final_rounds * (2 + sum(OPTION_VISITS[: self.options]))


def with_final_rounds(plan: VisitPlan, visits: float) -> VisitPlan:
    """The plan with as many final rounds as fit into the ``visits`` that are left, never more.

    Where not even the fewest do, options are left out.
    """
    for options in range(plan.options, -1, -1):
        each = 2 + sum(OPTION_VISITS[:options])
        rounds = min(plan.final_rounds, int(visits // each))
        if rounds >= FEWEST_FINAL:
            return replace(plan, final_rounds=rounds, options=options)
    return replace(plan, final_rounds=FEWEST_FINAL, options=0)


def plan_visits(visits: int, candidates: int, options: int = MOST_OPTIONS) -> VisitPlan:
    """The richest plan within ``visits``, or the poorest there is.

    Candidates come first, then more final rounds, then the options.
    """
    ladders = [tuple(n for n in ladder if n > 1) for ladder in LADDERS]
    fitting = [levels for levels in ladders if not levels or levels[0] <= candidates]
    plans = [VisitPlan(levels, FEWEST_FINAL) for levels in fitting]
    chosen = next((plan for plan in plans if plan.visits <= visits), plans[-1])
    for wanted_options in range(1, min(options, MOST_OPTIONS) + 1):
        richer = VisitPlan(chosen.levels, chosen.final_rounds, wanted_options)
        chosen = richer if richer.visits <= visits else chosen
    for rounds in range(FEWEST_FINAL + 1, MOST_FINAL + 1):
        longer = VisitPlan(chosen.levels, rounds, chosen.options)
        chosen = longer if longer.visits <= visits else chosen
    return chosen
