"""Sentences and tables of ``ddplab plan``'s answer, which the terminal and the page both show."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from common.planning.answer import (
    GB,
    VerifiedPlan,
    choice_in_words,
    compared_with_mine,
    shown_frontier,
)
from common.planning.search import Searched, TimedPlan
from common.planning.space import Plan
from common.planning.tuned import Tuned
from common.runtime.wording import digits

PLAN_COLUMNS = ("strategy", "batches", "recomputed", "blocks a unit", "reduced in", "precision")
"""Titles of a plan's cells; batches are the number and the size of a rank's micro-batches."""


def subject(searched: Searched, where: str) -> str:
    """Returns what is to be trained, and on what, in a sentence or two."""
    question, model = searched.question, searched.question.architecture
    trained = model.num_trained
    of_them = f" ({digits(trained / 1e6)}M trained)" if trained < model.num_parameters else ""
    return (
        f"{model.name}, {model.num_parameters / 1e6:,.1f}M parameters{of_them}, on {where}; "
        f"global batch of {question.global_batch:,} samples, "
        f"{digits(question.memory_bytes / GB)} GB a rank. {searched.considered:,} plans were "
        f"looked at, {len(searched.timed):,} predicted."
    )


def verdict(
    searched: Searched,
    best: TimedPlan,
    verified: Sequence[VerifiedPlan] | None,
    tuned: Tuned | None = None,
) -> list[str]:
    """Returns the plan with its time and memory, how it was told, and what was tried, by lines."""
    time, question = best.time, searched.question
    waiting = max(0.0, 1 - time.computation_s / time.step_s)
    parts = sorted(best.sized.memory.peak.components.items(), key=lambda item: -item[1])
    largest = ", ".join(f"{name} {digits(size / GB)}" for name, size in parts[:4])
    lines = [
        f"Take {best.plan.label}: a step of {digits(time.step_s)} s ({digits(time.low_s)} to "
        f"{digits(time.high_s)}), {digits(question.global_batch / time.step_s)} samples/s; "
        f"{waiting:.0%} of the step is not computation",
        f"Memory: {digits(best.peak_bytes / GB)} GB at the peak (in GB: {largest}) of "
        f"{digits(question.usable_bytes / GB)} GB",
    ]
    base = tuned.base if tuned else best
    for plan in verified or ():
        if plan.plan == base.plan and plan.step:
            of = f" {base.plan.name}:" if base != best else ""
            lines.append(
                f"Verified:{of} {digits(plan.step.estimate)} s ({plan.step.text(digits)}, "
                f"{plan.step.rounds} rounds that had no part in the choice), peak "
                f"{digits(plan.peak_bytes / GB)} GB"
            )
    sentences = choice_in_words(searched, verified or ()), compared_with_mine(best, verified or ())
    return [*lines, *filter(None, sentences), *(tuned.sentences() if tuned else [])]


def memory_basis(searched: Searched, best: TimedPlan) -> list[str]:
    """Returns sentences on what the memory rests on."""
    question = searched.question
    lines = [
        "memory is counted, tensor by tensor: weights, gradients and AdamW's moments in float32, "
        "what autograd saves, buckets and gathered units; a plan must leave 3 % free"
    ]
    if question.device == "cuda":
        held, usable = best.sized.held_bytes / GB, question.usable_bytes / GB
        tight = "; that is more than there is, so it may fail by fragmentation"
        lines.append(
            f"1 GB is left to the CUDA context and the libraries; CUDA's allocator may hold about "
            f"{digits(held)} GB for the peak{tight if held > usable else ''}"
        )
    if best.plan.is_sharded and best.plan.precision == "bfloat16":
        lines.append(
            "bfloat16 under FSDP is that of inputs, norms and the loss, too; autocast, of DDP and "
            "a single rank, keeps these in float32"
        )
    return [*lines, *question.left_out]


@dataclass(frozen=True)
class AnswerTable:
    """A table of an answer: its title, the titles of its columns, and its cells."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def frontier_plans(searched: Searched, best: TimedPlan) -> AnswerTable:
    """Returns the plans that trade memory for time, the best one marked."""
    plans = shown_frontier(searched)
    rows = []
    for plan in plans if best in plans else [*plans, best]:
        interval = f"{digits(plan.time.low_s)} to {digits(plan.time.high_s)}"
        cells = _cells(plan.plan)
        cells[0] = ("→ " if plan == best else "  ") + cells[0]
        rows.append((*cells, digits(plan.peak_bytes / GB), digits(plan.time.step_s), interval))
    interval = f"interval of {best.time.confidence:.0%}"
    columns = (*PLAN_COLUMNS, "peak (GB)", "step (s)", interval)
    return AnswerTable("Memory for time: no other plan takes less of both", columns, tuple(rows))


def _cells(plan: Plan) -> list[str]:
    """Returns a plan as cells under ``PLAN_COLUMNS``."""
    unit = reduced = ""
    if plan.is_sharded:
        unit = str(plan.blocks_per_unit)
        unit += f", {plan.prefetch} ahead" if plan.prefetch != 1 else ""
        reduced = "each" if plan.reduces_each else "last"
    again = "" if plan.checkpointing == "none" else plan.checkpointing
    split = f"{plan.accumulation} × {plan.micro_batch}"
    return [plan.strategy, split, again, unit, reduced, plan.precision]


def verified_plans(verified: Sequence[VerifiedPlan], searched: Searched) -> AnswerTable:
    """Returns the plans that were run, measured beside predicted."""
    predicted = {plan.plan: plan for plan in searched.timed}
    sizes = {plan.plan: plan.peak_bytes for plan in searched.refused}
    rows = []
    for plan in verified:
        timed = predicted.get(plan.plan)
        step = plan.died
        if plan.step:
            step = digits(plan.step.estimate)
            step += f" ({plan.step.text(digits)})" if plan.step.is_told else ""
        size = timed.peak_bytes if timed else sizes.get(plan.plan)
        cells = _cells(plan.plan)
        cells[0] += " (refused)" if plan.was_refused else ""
        rows.append(
            (
                *cells,
                digits(timed.time.step_s) if timed else "–",
                step,
                digits(size / GB) if size else "–",
                digits(plan.peak_bytes / GB) if plan.peak_bytes else "–",
            )
        )
    columns = (*PLAN_COLUMNS, "predicted (s)", "step (s)", "predicted (GB)", "peak (GB)")
    return AnswerTable("Run for real, in rotated rounds", columns, tuple(rows))


def tried_plans(tuned: Tuned) -> AnswerTable:
    """Returns the settings that were predicted, with what those that were run have saved."""
    rows = []
    for tried in (*tuned.tried, *tuned.options):
        gain = tried.gain
        saved = f"{gain.estimate:+.1%} ({gain.text('{:+.1%}')})" if gain else "–"
        rounds = f"{gain.rounds}" if gain else "–"
        rows.append((tried.timed.plan.name, digits(tried.timed.time.step_s), saved, rounds))
    columns = ("settings", "predicted (s)", "time saved", "rounds")
    return AnswerTable("Tried beside the verified plan, in rotated rounds", columns, tuple(rows))
