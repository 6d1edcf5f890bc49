"""The answer of ``ddplab plan``: the plan, why not another, and what would fit where nothing does.

Sentences and the JSON file are made of a ``Searched`` and of what was run to verify it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

from common.judged import Judged, Verdict
from common.planning.code import python_lines
from common.planning.search import Searched, TimedPlan, simplest
from common.planning.space import CHECKPOINTING, Plan, SizedPlan, least_ranks
from common.runtime.wording import digits
from common.samples import Interval

GB = 10**9
WORTH_SHOWING = 0.04
"""Share by which two plans of the shown frontier differ in time at least."""


@dataclass(frozen=True)
class VerifiedPlan:
    """A plan that was run.

    Attributes:
        step: seconds of a step, with an interval over rounds; None where it did not end. Of the
            best two it is of rounds that had no part in the choice.
        peak_bytes: the largest peak of a rank; None where it did not end.
        died: why it did not end; empty where it did.
        was_refused: whether it had been predicted not to fit.
        over_best: its time over the best one's, of others in the final rounds, the closest first.
        is_mine: whether somebody had named it.
    """

    plan: Plan
    step: Interval | None
    peak_bytes: int | None
    died: str = ""
    was_refused: bool = False
    over_best: Judged | None = None
    is_mine: bool = False


def plan_to_take(searched: Searched, verified: tuple[VerifiedPlan, ...] = ()) -> TimedPlan | None:
    """Returns the plan to take: of those that were run, the best one within the memory.

    Of those that are not told from it, it is the simplest one (``simplest``). Without any, it is
    the predicted best. ``verified`` has the best one first.
    """
    timed = {plan.plan: plan for plan in searched.timed}
    tied = [timed[plan.plan] for plan in _tied(searched, verified)]
    return simplest(searched.question, tied) if tied else searched.best


def _tied(searched: Searched, verified: Sequence[VerifiedPlan]) -> list[VerifiedPlan]:
    """Returns the best one of those that were run within the memory, and those not told from it."""
    timed = {plan.plan for plan in searched.timed}
    usable = searched.question.usable_bytes
    fitting = [
        plan for plan in verified if plan.step and plan.peak_bytes <= usable and plan.plan in timed
    ]
    if not fitting or fitting[0] is not verified[0]:
        return fitting[:1]
    over = [plan for plan in fitting if plan.over_best and not plan.over_best.is_settled]
    return [fitting[0], *over]


def choice_in_words(searched: Searched, verified: Sequence[VerifiedPlan]) -> str:
    """Returns whether the best plan is told from the second best, in a sentence, or nothing."""
    if verified and not _tied(searched, verified):
        return "no plan that was run ended within the memory: the one to take is only predicted"
    second = next((plan for plan in verified if plan.over_best), None)
    if second is None:
        return ""
    over, usable = second.over_best, searched.question.usable_bytes
    longer = _longer(over)
    parts = [f"The next, {second.plan.label}, {longer}"]
    if not over.is_settled:
        why = over.said if over.verdict is Verdict.OPEN else over.reason
        parts = [f"Which of the best two is faster is not told ({why})"]
        if longer:
            parts[0] += f": {second.plan.label} {longer} as {verified[0].plan.label}"
    if (count := len(_tied(searched, verified))) > 1:
        of_them = "simpler of the two" if count == 2 else f"simplest of the {count} that are tied"
        parts.append(f"the {of_them} is taken")
    too_large = [plan for plan in (verified[0], second) if plan.peak_bytes > usable]
    parts += [f"{plan.plan.label} takes more memory than there is" for plan in too_large]
    return "; ".join(parts)


def _longer(over: Judged) -> str:
    """Returns how much longer a plan takes, as far as it may be told; empty where it may not."""
    change = over.change()
    return f"takes {change} in the same rounds" if change else ""


def compared_with_mine(best: TimedPlan, verified: Sequence[VerifiedPlan]) -> str:
    """Returns what the plan that somebody named is beside the best one, or nothing without it."""
    mine = next((plan for plan in verified if plan.is_mine), None)
    if mine is None:
        return ""
    yours = f"Yours, {mine.plan.label}, "
    if mine.plan == best.plan:
        return f"{yours}is the plan to take"
    if mine.step is None:
        return yours + mine.died
    if mine.was_refused:
        return f"{yours}was refused, and took {digits(mine.peak_bytes / GB)} GB at the peak"
    if mine.over_best is None:
        return f"{yours}was the fastest in the final rounds"
    over = mine.over_best
    if not (longer := _longer(over)):
        return f"{yours}is not told from {verified[0].plan.label}: {over.said}"
    return f"{yours}{longer} as {verified[0].plan.label}: {over.said}"


def shown_frontier(searched: Searched) -> list[TimedPlan]:
    """Returns plans of the frontier that differ enough to tell, the fastest last."""
    picked: list[TimedPlan] = []
    for plan in reversed(searched.frontier):
        if not picked or plan.time.step_s > (1 + WORTH_SHOWING) * picked[-1].time.step_s:
            picked.append(plan)
    if searched.frontier and picked[-1] is not searched.frontier[0]:
        picked.append(searched.frontier[0])
    return picked[::-1]


def why_not_others(
    searched: Searched, best: TimedPlan, verified: Sequence[VerifiedPlan] | None = None
) -> list[str]:
    """Returns a sentence for each strategy that was not chosen, and for neighbours of the plan.

    Times are predicted, but for a plan that ran in the final rounds beside the best one.
    """
    ran = {plan.plan: plan for plan in verified or ()}
    in_final = bool(verified) and verified[0].plan == best.plan
    lines = []

    def add(name: str, **fields: object) -> None:
        """Adds a sentence on the fastest plan with these fields, beside the best."""
        other = searched.fastest(**fields)
        if other is None:
            if refused := searched.nearest_refused(**fields):
                lines.append(f"{name}: {missing_memory_in_words(searched, refused)}")
            return
        it = ran.get(other.plan)
        why = difference_in_words(best, other, it.over_best if it and in_final else None)
        if it and it.died:
            why = it.died
        elif it and it.peak_bytes > searched.question.usable_bytes:
            why = f"took {digits(it.peak_bytes / GB)} GB at the peak"
        lines.append(f"{name}: {why} ({other.plan.label})")

    for strategy in searched.question.legal_strategies():
        if strategy != best.plan.strategy:
            add(strategy, strategy=strategy)
    fields = {"strategy": best.plan.strategy}
    for kind in CHECKPOINTING if searched.question.architecture.blocks else ():
        if kind != best.plan.checkpointing:
            add(f"checkpointing {kind}", **fields, checkpointing=kind)
    fields["checkpointing"] = best.plan.checkpointing
    for size, count in searched.question.splits(best.plan.strategy):
        if size in (best.plan.micro_batch // 2, best.plan.micro_batch * 2):
            add(f"micro-batches of {size}", **fields, micro_batch=size, accumulation=count)
    return lines


def difference_in_words(best: TimedPlan, other: TimedPlan, over_best: Judged | None = None) -> str:
    """Returns how much time and memory a plan takes beside the best, in words.

    ``over_best`` is its time over the best one's, where both ran.
    """
    change = other.time.step_s / best.time.step_s - 1
    slower = f"{change:.1%} slower" if change >= 0.0005 else "as fast"
    if change > 1:
        slower = f"{1 + change:.1f} times as slow"
    if change < -0.0005:
        slower = f"{-change:.1%} faster, too little for a plan with more to it"
    if over_best:
        slower = _longer(over_best) or "not told from it in the same rounds"
    saved = best.peak_bytes - other.peak_bytes
    memory = f"takes {digits(-saved / GB)} GB more"
    if saved > 0:
        memory = f"saves {digits(saved / GB)} GB that you have"
    return f"{slower}, {memory}"


def missing_memory_in_words(searched: Searched, refused: SizedPlan) -> str:
    """Returns what a plan that does not fit lacks, in words."""
    usable = searched.question.usable_bytes
    missing = refused.peak_bytes - usable
    if missing <= 0:
        return f"fits by less than the {digits(-missing / GB)} GB that predictions need"
    kind = f"checkpointing {refused.plan.checkpointing}"
    of = f"even {kind} with micro-batches of {refused.plan.micro_batch}"
    return f"lacks {digits(missing / GB)} GB ({of}: {digits(refused.peak_bytes / GB)} GB)"


def nothing_fits(searched: Searched) -> list[str]:
    """Returns what would fit where nothing does, and what was not planned."""
    question = searched.question
    smallest = searched.refused[0]
    states = smallest.memory.peak.state_bytes
    lines = [
        f"Nothing fits: the smallest plan ({smallest.plan.label}) takes "
        f"{digits(smallest.peak_bytes / GB)} GB of the {digits(question.usable_bytes / GB)} GB "
        f"that a rank has for it; {digits(states / GB)} GB of them are parameters, gradients and "
        "optimizer states"
    ]
    more = None if question.unshardable else least_ranks(question)
    if more is None:
        lines.append(
            "No number of ranks would do: a block's activations or gathered parameters exceed the "
            "memory. You need tensor parallelism, offloading, or devices with more memory"
        )
    elif more > question.ranks:
        lines.append(
            f"{more:,} ranks of this kind would do under full sharding; or tensor parallelism, "
            "offloading, or devices with more memory"
        )
    else:
        lines.append("A smaller micro-batch than those that are allowed would do")
    return [*lines, *question.left_out]


def as_json(
    searched: Searched,
    verified: tuple[VerifiedPlan, ...] | None = None,
    best: TimedPlan | None = None,
) -> dict:
    """Returns the answer as plain values; arguments are those of ``print_answer``."""
    question, ran = searched.question, verified or ()
    taken = plan_to_take(searched, ran)
    answer = {
        "strategy": None,
        **_fields(best),
        "peak_bytes": best.peak_bytes if best else None,
        "budget_bytes": int(question.memory_bytes),
        "held_bytes": round(best.sized.held_bytes) if best else None,
        "memory_by_part": dict(best.sized.memory.peak.components) if best else None,
        "ranks": question.ranks,
        "global_batch": question.global_batch,
        "samples_per_s": question.global_batch / best.time.step_s if best else None,
        "python": python_lines(question, best.plan) if best else None,
        "verified": None if verified is None else [_verified(plan, taken) for plan in ran],
        "verdict": next(
            (plan.over_best.verdict for plan in ran if plan.over_best),
            Verdict.NOT_MEASURED,
        ),
        "choice": choice_in_words(searched, ran),
        "rejected": [*_slower(searched, best), *_too_large(searched)],
        "frontier": [
            {**_fields(plan), "peak_bytes": plan.peak_bytes} for plan in searched.frontier
        ],
        "considered": searched.considered,
        "left_out": question.left_out,
        "basis": list(searched.basis),
    }
    if best is None:
        answer["nothing_fits"] = nothing_fits(searched)
    return answer


def _fields(timed: TimedPlan | None) -> dict:
    """Returns plan and time of a plan, with every value None where there is no plan."""
    plan = asdict(timed.plan) if timed else dict.fromkeys(Plan.__dataclass_fields__)
    time = timed.time if timed else None
    return plan | {
        "step_s": time and time.step_s,
        "step_low_s": time and time.low_s,
        "step_high_s": time and time.high_s,
    }


def interval_fields(interval: Interval | None, name: str, unit: str = "") -> dict:
    """Returns estimate and ends of an interval under a name; None for what may not be said."""
    has_ends = interval is not None and interval.is_told
    return {
        f"{name}{unit}": interval.estimate if interval else None,
        f"{name}_low{unit}": interval.low if has_ends else None,
        f"{name}_high{unit}": interval.high if has_ends else None,
    }


def _verified(plan: VerifiedPlan, taken: TimedPlan | None) -> dict:
    over = plan.over_best
    return {
        **asdict(plan.plan),
        **interval_fields(plan.step, "step", "_s"),
        "rounds": plan.step.rounds if plan.step else 0,
        "peak_bytes": plan.peak_bytes,
        "died": plan.died,
        "was_refused": plan.was_refused,
        **interval_fields(over.difference if over else None, "slower"),
        "verdict": over.verdict if over else None,
        "taken": taken is not None and plan.plan == taken.plan,
        "mine": plan.is_mine,
    }


def _slower(searched: Searched, best: TimedPlan | None) -> Iterator[dict]:
    for plan in searched.timed:
        if best is None or plan.plan == best.plan:
            continue
        share = plan.time.step_s / best.time.step_s - 1
        reason = f"{share:.1%} slower" if share > 0 else "as fast, less simple"
        yield {**_fields(plan), "peak_bytes": plan.peak_bytes, "reason": reason}


def _too_large(searched: Searched) -> Iterator[dict]:
    for refused in searched.refused:
        missing = refused.peak_bytes - searched.question.usable_bytes
        reason = f"lacks {missing / GB:.3f} GB" if missing > 0 else "fits by less than the margin"
        yield {
            **asdict(refused.plan),
            "step_s": None,
            "peak_bytes": refused.peak_bytes,
            "reason": reason,
        }
