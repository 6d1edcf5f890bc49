"""The answer of ``ddplab plan`` on the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from common.planning.answer import VerifiedPlan, nothing_fits, why_not_others
from common.planning.answer_parts import (
    PLAN_COLUMNS,
    AnswerTable,
    frontier_plans,
    memory_basis,
    subject,
    tried_plans,
    verdict,
    verified_plans,
)
from common.planning.code import python_lines
from common.planning.search import Searched, TimedPlan
from common.planning.tuned import Tuned

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

WIDTH = 120


def print_answer(
    searched: Searched,
    best: TimedPlan | None,
    where: str,
    console: Console,
    verified: Sequence[VerifiedPlan] | None = None,
    tuned: Tuned | None = None,
) -> None:
    """Prints the plan to take, its code, the frontier, and why not another.

    Args:
        best: the plan to take; None where nothing fits.
        where: the ranks in words, as ``64 × NVIDIA H100 (h100-ib)``.
        verified: plans that were run; None where none was to be.
        tuned: settings that were tried of the plan; None likewise.
    """
    question = searched.question

    def say(line: str = "") -> None:
        console.print(line, highlight=False, markup=False, soft_wrap=True)

    say(subject(searched, where))
    say()
    if best is None:
        for line in nothing_fits(searched):
            say(line)
        return
    for line in verdict(searched, best, verified, tuned):
        say(line)
    say()
    for line in python_lines(question, best.plan):
        say(f"    {line}")
    say()
    console.print(as_rich(frontier_plans(searched, best)))
    if verified:
        console.print(as_rich(verified_plans(verified, searched)))
    if tuned and tuned.tried:
        console.print(as_rich(tried_plans(tuned)))
    say("Why not")
    for line in why_not_others(searched, best, verified):
        say(f"- {line}")
    say("What this rests on")
    for line in (*searched.basis, *memory_basis(searched, best)):
        say(f"- {line}")


def as_rich(answer: AnswerTable) -> Table:
    """Returns the table as the terminal shows it."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(title=answer.title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for title in answer.columns:
        justify = "left" if title in (*PLAN_COLUMNS, answer.columns[0]) else "right"
        table.add_column(title, justify=justify, no_wrap=title == "strategy")
    for row in answer.rows:
        table.add_row(*row)
    return table
