"""A page of plans: the one to take, its code, memory for time as a figure, and why not another."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from markupsafe import Markup
from matplotlib.figure import Figure

from common.analysis.html import rendered
from common.analysis.picture import describe, svg
from common.analysis.style import figure
from common.planning.answer import GB, VerifiedPlan, nothing_fits, why_not_others
from common.planning.answer_parts import (
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

TEMPLATE = Path(__file__).parents[1] / "answer.html.j2"
SLOWEST = 3
"""Bound on the times of plans that are drawn, as multiples of the best one's."""


def page(
    searched: Searched,
    best: TimedPlan | None,
    where: str,
    verified: Sequence[VerifiedPlan] | None = None,
    tuned: Tuned | None = None,
) -> str:
    """Returns the answer as one file of HTML; arguments are those of ``print_answer``."""
    title = f"How to train {searched.question.architecture.name}"
    common = {"title": title, "subject": subject(searched, where), "basis": searched.basis}
    if best is None:
        empty = {"picture": None, "words": "", "code": "", "tables": [], "why_not": []}
        return rendered(TEMPLATE, **common, **empty, verdict=nothing_fits(searched))
    drawn = frontier_figure(searched, best)
    tables = [frontier_plans(searched, best)]
    if verified:
        tables.append(verified_plans(verified, searched))
    if tuned and tuned.tried:
        tables.append(tried_plans(tuned))
    return rendered(
        TEMPLATE,
        **common | {"basis": [*searched.basis, *memory_basis(searched, best)]},
        verdict=verdict(searched, best, verified, tuned),
        picture=Markup(svg(drawn)),
        words=describe(drawn),
        code="\n".join(python_lines(searched.question, best.plan)),
        tables=tables,
        why_not=why_not_others(searched, best, verified),
    )


def frontier_figure(searched: Searched, best: TimedPlan) -> Figure:
    """Draws memory and time of all predicted plans, a colour for each strategy, and the budget."""
    caption = (
        f"Predicted; the bar is an interval of {best.time.confidence:.0%}. The line is the memory "
        "that a step may take. "
        f"Plans that take more than {SLOWEST} times as long as the best are left out."
    )
    drawn = [plan for plan in searched.timed if plan.time.step_s <= SLOWEST * best.time.step_s]
    with figure(caption) as (fig, axes):
        for strategy in searched.question.legal_strategies():
            plans = [plan for plan in drawn if plan.plan.strategy == strategy]
            if plans:
                axes.plot(
                    [plan.peak_bytes / GB for plan in plans],
                    [plan.time.step_s for plan in plans],
                    "o",
                    markersize=3,
                    label=strategy,
                )
        time, peak = best.time, best.peak_bytes / GB
        below, above = time.step_s - time.low_s, time.high_s - time.step_s
        axes.errorbar(peak, time.step_s, [[below], [above]], fmt="k*", label="the plan to take")
        axes.axvline(searched.question.usable_bytes / GB, color="#888888", linestyle="--")
        axes.set(xlabel="memory at the peak (GB)", ylabel="step (s)", ylim=(0, None))
        axes.set_xlim(left=0)
        axes.legend(fontsize=7)
    return fig
