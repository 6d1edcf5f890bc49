"""A plan that somebody names before anything is planned, to be run beside the best ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from common.errors import UserError, unknown_name
from common.planning.search import Searched, TimedPlan, matches
from common.planning.space import (
    CHECKPOINTING,
    PRECISIONS,
    STRATEGIES,
    Plan,
    Question,
    SizedPlan,
    candidates,
    sized,
)

NAMED = {"checkpointing": CHECKPOINTING, "precision": PRECISIONS}
NUMBERS = ("micro_batch", "blocks_per_unit")


def named_fields(words: Sequence[str]) -> dict[str, object]:
    """Parses a plan: its strategy, then fields; of what is not said, the fastest is taken.

    >>> named_fields(["DDP", "micro_batch=4", "checkpointing=block"])
    {'strategy': 'DDP', 'micro_batch': 4, 'checkpointing': 'block'}

    Raises UserError, with what is legal, for what is no such plan; without words there is none.
    """
    fields: dict[str, object] = {}
    for word in [f"strategy={words[0]}", *words[1:]] if words else ():
        name, _, value = word.partition("=")
        legal = {"strategy": STRATEGIES, **NAMED}.get(name)
        if name in NUMBERS and value.isdecimal():
            fields[name] = int(value)
        elif legal is None:
            raise UserError(
                f"--mine {word!r}: expected a strategy, then any of checkpointing=KIND, "
                "precision=TYPE, micro_batch=NUMBER, blocks_per_unit=NUMBER"
            )
        elif value not in legal:
            raise UserError(f"--mine: {unknown_name(name, value, legal)}")
        else:
            fields[name] = value
    return fields


def named_plans(question: Question, fields: Mapping[str, object]) -> list[Plan]:
    """Returns the plans of a question with these fields. Raises UserError where there is none."""
    plans = [plan for plan in candidates(question) if matches(plan, fields)] if fields else []
    if fields and not plans:
        said = ", ".join(f"{name} {value}" for name, value in fields.items())
        sizes = ", ".join(map(str, question.sizes))
        raise UserError(
            f"--mine: no plan has {said}; strategies are {', '.join(question.legal_strategies())}, "
            f"micro-batches {sizes}"
        )
    return plans


def named_plan(searched: Searched, fields: Mapping[str, object]) -> TimedPlan | SizedPlan | None:
    """Returns the fastest plan with these fields, or where none fits, the smallest; or nothing."""
    plans = named_plans(searched.question, fields)
    if not plans:
        return None
    smallest = (sized(searched.question, plan) for plan in plans)
    return searched.fastest(**fields) or min(smallest, key=lambda plan: plan.peak_bytes)
