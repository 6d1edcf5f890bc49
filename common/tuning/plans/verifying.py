"""Runs plans for real in rotated rounds, and judges which is the fastest."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pandas as pd

from common.judged import compared, fastest
from common.planning.answer import VerifiedPlan
from common.planning.space import Plan
from common.runtime.progress import Progress
from common.samples import student
from common.tuning.plans.plan_visits import FIRST, PlanVisits
from common.tuning.same_graph import on_main
from common.tuning.visit_plan import FEWEST_FINAL, halved

CHOICE_ROUNDS = 3
"""Rounds of all plans, by which two are chosen."""


def verify(
    visits: PlanVisits, plans: Sequence[Plan], refused: Plan | None, mine: Plan | None
) -> tuple[VerifiedPlan, ...]:
    """Runs plans in rotated rounds, each visit a fresh instance; returns them, the best first.

    In round 0 the peak of each is measured, and its times, from when nothing was warm, are not
    judged. Rounds of all leave two plans; further rounds of them, and of ``mine``, had no part in
    that, and judge which is the best. The refused one is run once, after all others.

    Args:
        visits: visits plans; its progress is set to what is visited here.
        plans: those that fit, the most promising first.
        refused: one that does not fit.
        mine: the one of them that somebody named.
    """
    levels = [len(plans)] if len(plans) > 2 else []
    chosen_in = FIRST + CHOICE_ROUNDS * len(levels)
    most = len(plans) * chosen_in + FEWEST_FINAL * min(len(plans), 2 + (mine in plans))
    visits.progress = Progress(most + (refused is not None), visits.worker.is_main)
    visits.rounds("peak", plans, 1)

    def times_after(_: int, arms: list[Plan]) -> pd.DataFrame:
        return visits.rounds("choice", arms, CHOICE_ROUNDS, FIRST).loc[FIRST:]

    ranked = halved(plans, levels, times_after, lambda plan: plan.name)
    alive = [plan for plan in ranked if plan not in visits.died]
    finalists = [*alive[:2], *(plan for plan in alive[2:] if plan == mine)]
    times = visits.rounds("final", finalists, FEWEST_FINAL, chosen_in) if finalists else None
    machine = on_main(visits.worker, lambda: visits.recorder.machine().state)
    if refused is not None:
        times = visits.rounds("refused", [refused], 1)
    final = [plan.name for plan in finalists if plan not in visits.died]
    final_times = times.loc[chosen_in:, final] if final else pd.DataFrame()
    best = fastest(final_times, machine=machine)
    # Any two of them could have been shown, since the best was chosen by the same rounds.
    pairs = math.comb(len(final), 2)
    over = compared(final_times, best.arm, claims=pairs, machine=machine) if best else {}
    order = [best.arm, best.rival, *over] if best else final
    ranked.sort(key=lambda plan: (*order, plan.name).index(plan.name))
    peaks = visits.peaks()
    verified = []
    for plan in (*ranked, *([refused] if refused else [])):
        known = {"was_refused": plan == refused, "is_mine": plan == mine}
        if plan in visits.died:
            verified.append(VerifiedPlan(plan, None, None, visits.died[plan], **known))
            continue
        begun = chosen_in if plan in finalists else 0 if plan == refused else FIRST
        of_plan = times[plan.name].loc[begun:]
        step = student(of_plan)
        positive = replace(step, low=max(step.low, 0.0))  # NaN of a single round stays
        judged = over.get(plan.name)
        verified.append(VerifiedPlan(plan, positive, peaks[plan.name], over_best=judged, **known))
    if mine not in (None, refused, *plans):
        no_room = "takes more memory than there is here to try it"
        verified.append(VerifiedPlan(mine, None, None, no_room, was_refused=True, is_mine=True))
    return tuple(verified)
