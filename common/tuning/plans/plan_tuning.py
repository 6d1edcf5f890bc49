"""Runs plans for real: verifies which is the fastest, and tries other settings of that one.

As ``ddplab tune`` does with DDP's, settings are predicted, the most promising ranked by real
steps, and the best is run beside the plan in rounds that had no part in the choice.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace

import pandas as pd

from common.judged import compared, fastest
from common.planning.answer import VerifiedPlan
from common.planning.measured_times import MeasuredTimes
from common.planning.search import TimedPlan, by_simplicity
from common.planning.space import Plan, fits, sized, variations
from common.planning.tuned import TriedPlan, Tuned
from common.runtime.progress import Progress
from common.samples import student
from common.tuning.candidates import MOST_CANDIDATES, spread_settings, time_class
from common.tuning.plans.plan_visits import FIRST, PlanVisits
from common.tuning.same_graph import on_main
from common.tuning.visit_plan import (
    FEWEST_FINAL,
    ROUNDS_PER_LEVEL,
    plan_visits,
    saving,
    successive_halving,
    with_final_rounds,
)

CHOICE_ROUNDS = 3
"""Rounds of all plans, by which two are chosen."""
CAUTION = 0.8
"""The part of the allowed time that visits are planned for: what one takes is an estimate."""


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

    ranked = successive_halving(plans, levels, times_after, lambda plan: plan.name)
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


def settings_to_try(base: TimedPlan, times: MeasuredTimes) -> list[TimedPlan]:
    """Returns plans that do a plan's work under other settings and fit, the most promising first.

    Under DDP they have other buckets, some way apart, and under FSDP they are ``variations``.
    """
    plan, question = base.plan, times.question
    plans: list[Plan] = []
    if plan.has_buckets:
        caps = [setting.cap_mib for setting in spread_settings(times.bucketings(plan))]
        plans = [replace(plan, bucket_cap_mib=cap) for cap in caps]
    elif plan.is_sharded:
        measured = times.inputs.overhead_s
        plans = [varied for varied in variations(question, plan) if varied.strategy in measured]
    timed = _timed(times, [varied for varied in plans if varied != plan])
    lowest_s = min((varied.time.step_s for varied in timed), default=0.0)
    timed.sort(
        key=lambda varied: (
            time_class(varied.time.step_s, lowest_s),
            *(by_simplicity(question, varied) if plan.is_sharded else ()),
        )
    )
    return timed[:MOST_CANDIDATES]


def tune_plan(
    base: TimedPlan,
    times: MeasuredTimes,
    verified: PlanVisits,
    allowed_s: float,
    options: Sequence[str] = (),
) -> Tuned:
    """Tries settings of a plan that was verified; all ranks do so together.

    Args:
        verified: the visits that verified it.
        allowed_s: seconds that all of it may take; the fewest visits that tell two settings apart
            are made only if they are expected to fit.
        options: precisions to try it in beside its own; never chosen.
    """
    worker, began = verified.worker, time.perf_counter()
    question, visit_s = times.question, verified.visit_s(base.plan)
    precisions = [replace(base.plan, precision=name) for name in options if base.plan.is_sharded]
    candidates, extra = on_main(
        worker, lambda: (settings_to_try(base, times), _timed(times, precisions))
    )
    afforded = int(CAUTION * allowed_s / visit_s) if visit_s else 0
    if not candidates or afforded < 2 * FEWEST_FINAL:
        tried = tuple(map(TriedPlan, candidates))
        return Tuned(base, tried, (), allowed_s, 0.0, visit_s)
    plan = plan_visits(afforded, len(candidates), [1] * len(extra))
    progress = Progress(plan.visits + 1, worker.is_main)
    recorder, per_node = verified.recorder, question.ranks_per_node
    visits = PlanVisits(verified.model, recorder, per_node, "tune", progress)

    def times_after(level: int, arms: list[Plan]) -> pd.DataFrame:
        first = FIRST + ROUNDS_PER_LEVEL * level
        return visits.rounds("tune", [base.plan, *arms], ROUNDS_PER_LEVEL, first)

    name, by_plan = base.plan.name, {candidate.plan: candidate for candidate in candidates}
    best, *slower = successive_halving(
        list(by_plan), plan.levels, times_after, lambda arm: arm.name, name
    )
    visits.rounds("tune, peak", [best], 1)
    left_s = CAUTION * allowed_s - (time.perf_counter() - began)
    plan = with_final_rounds(plan, worker.broadcast(left_s) / visit_s)
    extra = extra[: len(plan.options)]
    first = FIRST + ROUNDS_PER_LEVEL * len(plan.levels)
    finalists = [base.plan, best, *(option.plan for option in extra)]
    table = visits.rounds("tune", finalists, plan.final_rounds, first)
    peaks, final = visits.peaks(), table.loc[first:]

    def tried(arm: TimedPlan, rounds: pd.DataFrame) -> TriedPlan:
        label = arm.plan.name
        gain = saving(rounds, label, name) if {label, name} <= set(rounds) else None
        if gain and math.isnan(gain.estimate):
            gain = None
        return TriedPlan(arm, gain, peaks.get(label))

    return Tuned(
        base=base,
        tried=(tried(by_plan[best], final), *(tried(by_plan[arm], table) for arm in slower)),
        options=tuple(tried(option, final) for option in extra),
        allowed_s=allowed_s,
        took_s=worker.broadcast(time.perf_counter() - began),
        visit_s=visit_s,
        fits=peaks.get(best.name, math.inf) <= question.usable_bytes,
        machine=on_main(worker, lambda: recorder.machine().state),
    )


def _timed(times: MeasuredTimes, plans: Sequence[Plan]) -> list[TimedPlan]:
    """Returns the plans that fit, with their memory and time."""
    sizes = [sized(times.question, plan) for plan in plans]
    return [TimedPlan(size, times.step(size.plan)) for size in sizes if fits(times.question, size)]
