"""The fastest plan that fits, and the plans that trade memory for time.

Memory is computed first. Of what fits, plans are taken in the order of a lower bound on their time,
and only those are predicted that may be the best of their strategy, or faster than everything that
takes no more memory. So are plans that somebody names beforehand, to be run beside the best ones.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from common.errors import NotYetWritten, UserError, unknown_name
from common.planning.space import (
    CHECKPOINTING,
    PRECISIONS,
    STRATEGIES,
    Plan,
    Question,
    SizedPlan,
    candidates,
    fits,
    sized,
)
from common.samples import CONFIDENCE

ALIKE = 0.01
"""Relative difference in time up to which the simpler of two plans is taken."""
NAMED = {"strategy": STRATEGIES, "checkpointing": CHECKPOINTING, "precision": PRECISIONS}
NUMBERS = ("micro_batch", "blocks_per_unit")
"""Fields of a plan that can be named: those of words, and those of numbers."""


@dataclass(frozen=True)
class StepTime:
    """A predicted step in seconds, with its interval, its computation and DDP's cap.

    ``confidence`` is the share of such intervals that hold the step: here that of all that is
    measured, on a cluster that of its assumptions.
    """

    step_s: float
    low_s: float
    high_s: float
    computation_s: float
    bucket_cap_mib: float | None = None
    confidence: float = CONFIDENCE


class Times(Protocol):
    """Predicts the steps of plans.

    Attributes:
        basis: sentences on what the times rest on.
    """

    basis: tuple[str, ...]

    def at_least_s(self, plan: Plan) -> float:
        """Returns a lower bound on the seconds of a step: nothing is exchanged."""

    def step(self, plan: Plan) -> StepTime:
        """Predicts a step."""


def in_one_bucket(basis: tuple[str, ...], error: NotYetWritten) -> tuple[str, ...]:
    """Returns a basis with what is assumed in a student's tree without the buckets of DDP."""
    assumed = f"{error}: DDP and ZeRO-1 are predicted with one bucket of all gradients"
    return (*basis, assumed) if assumed not in basis else basis


@dataclass(frozen=True)
class TimedPlan:
    """A plan with its memory and its time."""

    sized: SizedPlan
    time: StepTime

    @property
    def plan(self) -> Plan:
        """Returns the plan, with the cap of its buckets."""
        return replace(self.sized.plan, bucket_cap_mib=self.time.bucket_cap_mib)

    @property
    def peak_bytes(self) -> int:
        """Returns the bytes at the peak."""
        return self.sized.peak_bytes


@dataclass(frozen=True)
class Searched:
    """The result of a search.

    Attributes:
        question: what was asked.
        best: the plan to take; None where nothing fits.
        frontier: plans than which no other takes less memory and less time, by memory.
        timed: all plans that were predicted, by time.
        refused: plans that do not fit, those that lack least first.
        considered: number of plans.
        basis: sentences on what the times rest on.
    """

    question: Question
    best: TimedPlan | None
    frontier: tuple[TimedPlan, ...]
    timed: tuple[TimedPlan, ...]
    refused: tuple[SizedPlan, ...]
    considered: int
    basis: tuple[str, ...]

    def fastest(self, **fields: object) -> TimedPlan | None:
        """Returns the fastest predicted plan with these values of its fields; None without one."""
        return next((t for t in self.timed if matches(t.plan, fields)), None)

    def nearest_refused(self, **fields: object) -> SizedPlan | None:
        """Returns the refused plan that lacks least, with these values; None without one."""
        return next((s for s in self.refused if matches(s.plan, fields)), None)


def matches(plan: Plan, fields: Mapping[str, object]) -> bool:
    """Returns True if a plan has these values of its fields."""
    return all(getattr(plan, name) == value for name, value in fields.items())


def search(
    question: Question, times: Times | None, named: Mapping[str, object] | None = None
) -> Searched:
    """Finds the best plan of a question; plans with the ``named`` fields are predicted in any case.

    ``times`` may be None where no plan fits. Raises UserError where a model's memory is not known.
    """
    plans = list(candidates(question))
    fitting, refused = sized_plans(question, plans)
    timed: list[TimedPlan] = []
    fastest_s: dict[str, float] = defaultdict(lambda: float("inf"))
    bounds = {plan.plan: times.at_least_s(plan.plan) for plan in fitting}
    for plan in sorted(fitting, key=lambda plan: bounds[plan.plan]):
        bound_s, strategy = bounds[plan.plan], plan.plan.strategy
        dominated = any(
            other.time.step_s <= bound_s and other.peak_bytes <= plan.peak_bytes for other in timed
        )
        is_named = bool(named) and matches(plan.plan, named)
        if dominated and bound_s >= fastest_s[strategy] and not is_named:
            continue
        timed.append(TimedPlan(plan, times.step(plan.plan)))
        fastest_s[strategy] = min(fastest_s[strategy], timed[-1].time.step_s)
    timed.sort(key=lambda plan: plan.time.step_s)
    return Searched(
        question=question,
        best=choose(question, timed),
        frontier=frontier(timed),
        timed=tuple(timed),
        refused=tuple(sorted(refused, key=lambda plan: plan.peak_bytes)),
        considered=len(plans),
        basis=times.basis if times else (),
    )


def sized_plans(
    question: Question, plans: Iterable[Plan]
) -> tuple[list[SizedPlan], list[SizedPlan]]:
    """Returns the plans that fit, and of those that do not the smallest of each kind.

    A larger micro-batch takes more memory, so the first that does not fit ends its kind. A single
    micro-batch is looked at all the same: nothing is then kept from one to the next.
    """
    by_kind: dict[Plan, list[Plan]] = defaultdict(list)
    for plan in plans:
        by_kind[replace(plan, micro_batch=0, accumulation=0)].append(plan)
    fitting, refused = [], []
    for kind in by_kind.values():
        full = False
        for plan in sorted(kind, key=lambda plan: plan.micro_batch):
            if full and plan.accumulation > 1:
                continue
            memory = sized(question, plan)
            full = not fits(question, memory)
            (refused if full else fitting).append(memory)
    return fitting, refused


def choose(question: Question, timed: Sequence[TimedPlan]) -> TimedPlan | None:
    """Returns the simplest of the fastest plans, which are ALIKE; None without any.

    ``timed`` is sorted by time.
    """
    fastest = [plan for plan in timed if plan.time.step_s <= (1 + ALIKE) * timed[0].time.step_s]
    return simplest(question, fastest) if fastest else None


def simplest(question: Question, plans: Iterable[TimedPlan]) -> TimedPlan:
    """Returns the simplest plan; those with room, where also what CUDA may hold fits, come first.

    Larger micro-batches are simpler, and cost fewer launches, which no cluster's time counts.
    """
    return min(plans, key=lambda plan: (*by_simplicity(question, plan), plan.time.step_s))


def by_simplicity(question: Question, timed_plan: TimedPlan) -> tuple:
    """Returns a key by which plans with room come first, then the simplest."""
    plan = timed_plan.plan
    return (
        timed_plan.sized.held_bytes > question.usable_bytes,
        STRATEGIES.index(plan.strategy),
        CHECKPOINTING.index(plan.checkpointing),
        PRECISIONS.index(plan.precision),
        plan.blocks_per_unit,
        plan.prefetch != 1,
        plan.reduces_each,
        -plan.micro_batch,
    )


def frontier(timed: Iterable[TimedPlan]) -> tuple[TimedPlan, ...]:
    """Returns the plans than which none takes less memory and less time, from the smallest on."""
    kept: list[TimedPlan] = []
    for plan in sorted(timed, key=lambda plan: (plan.time.step_s, plan.peak_bytes)):
        if not kept or plan.peak_bytes < kept[-1].peak_bytes:
            kept.append(plan)
    return tuple(reversed(kept))


def named_fields(words: Sequence[str]) -> dict[str, object]:
    """Parses a plan: its strategy, then fields, for ``matches``; without words there are none.

    >>> named_fields(["DDP", "micro_batch=4", "checkpointing=block"])
    {'strategy': 'DDP', 'micro_batch': 4, 'checkpointing': 'block'}

    Raises UserError, with what is legal, for what is no such plan.
    """
    fields: dict[str, object] = {}
    for word in [f"strategy={words[0]}", *words[1:]] if words else ():
        name, _, value = word.partition("=")
        if name in NUMBERS and value.isdecimal():
            fields[name] = int(value)
        elif name not in NAMED:
            raise UserError(
                f"--mine {word!r}: expected a strategy, then any of checkpointing=KIND, "
                "precision=TYPE, micro_batch=NUMBER, blocks_per_unit=NUMBER"
            )
        elif value not in NAMED[name]:
            raise UserError(f"--mine: {unknown_name(name, value, NAMED[name])}")
        else:
            fields[name] = value
    return fields


def named_plans(question: Question, fields: Mapping[str, object]) -> list[Plan]:
    """Returns the plans of a question with these fields. Raises UserError where there is none."""
    plans = [plan for plan in candidates(question) if matches(plan, fields)] if fields else []
    if fields and not plans:
        words = ", ".join(f"{name} {value}" for name, value in fields.items())
        sizes = ", ".join(map(str, question.sizes))
        raise UserError(
            f"--mine: no plan has {words}; strategies are {', '.join(question.legal_strategies())},"
            f" micro-batches {sizes}"
        )
    return plans


def named_plan(searched: Searched, fields: Mapping[str, object]) -> TimedPlan | SizedPlan | None:
    """Returns the fastest plan with these fields, or where none fits, the smallest; or nothing."""
    plans = named_plans(searched.question, fields)
    if not plans:
        return None
    smallest = (sized(searched.question, plan) for plan in plans)
    return searched.fastest(**fields) or min(smallest, key=lambda plan: plan.peak_bytes)
