"""A diagnosis as one web page: slower than what, why, where a step's time goes, what would help.

The page is one file of HTML that asks for nothing from anywhere: style and figures are in it, and a
browser is told to load nothing. It reads without JavaScript, which adds buttons that copy a change.
Sections whose tables a run has not say so in a line.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from markupsafe import Markup, escape

from common.analysis.html import rendered
from common.analysis.style import GOOD_EFFICIENCY
from common.diagnose.causes.trials import WORKERS, Tried, tried_against
from common.diagnose.diagnosis import Diagnosis, costs, is_outside_steps, with_main_cause
from common.diagnose.evidence.case import VALIDITY, Case, Verdict, differing_facts, percent
from common.diagnose.evidence.evidence import Evidence, NotJudged
from common.diagnose.evidence.measured_step import step_model
from common.diagnose.pages.bars import (
    Axis,
    Bar,
    BarFigure,
    Row,
    colour_rules,
    number,
    upright,
    whiskers,
)
from common.diagnose.pages.steps import ranks_section, timeline_section
from common.errors import UserError

TEMPLATE = Path(__file__).with_name("page.html.j2")
STYLE = Path(__file__).with_name("page.css")
FLAG = re.compile(r"--\w[\w-]*")
"""A flag of a command, which a line must not break after its hyphens."""
SPARE = 1.08
"""An axis ends a little after the longest bar, so that the line of the ideal is seen with its
number below it."""
HEIGHT, TOP, THICK, THIN = 30, 3, 15, 7
"""Heights in pixels: of a row, above its bars, of what is predicted, and of what is."""
TALL = 44
"""Height in pixels of a row whose label has two lines."""


def diagnosis_page(diagnosis: Diagnosis, case: Case, title: str, notes: Sequence[str] = ()) -> str:
    """Returns a diagnosis as one HTML file that needs no network.

    Args:
        diagnosis: verdicts, summary and trials of the run.
        case: run and its baseline.
        title: title of the page.
        notes: sentences on what could not be seen.
    """
    counted = with_main_cause(diagnosis.verdicts, case)
    compared = [*([counted] if counted else []), *_compared_with(case)]
    if diagnosis.verdicts and diagnosis.much_unexplained:
        compared.append(diagnosis.unexplained.said())
    return rendered(
        TEMPLATE,
        title=title,
        style=f"{STYLE.read_text()}\n{colour_rules()}",
        diagnosis=diagnosis,
        cards=_cards(case),
        compared=compared,
        healthy=_healthy(diagnosis, case),
        not_judged=[f"{cause}: {why}" for cause, why in diagnosis.not_judged],
        notes=notes,
        ranks=ranks_section(case),
        timeline=timeline_section(case),
        gains=gains_section(diagnosis, case),
        tried=tried_section(diagnosis) if diagnosis.tried else None,
        source=_source(case.run),
        costs=_costs,
        interval=interval,
        number=number,
        tried_against=tried_against,
        unbroken_flags=_unbroken_flags,
    )


def _source(run: Evidence) -> str:
    record = run.opened.environment
    facts = [record.get("hardware"), str(record.get("start_time", ""))[:10]]
    where = f"Arm {run.arm['arm']} of {run.name}"
    return "; ".join([where, *(str(fact) for fact in facts if fact)]) + "."


def _cards(case: Case) -> list[tuple[str, str, str]]:
    """Returns how fast the job is: what is measured, its value, and what that means."""
    run, ranks, now = case.run, case.ranks, case.speedup_now
    samples = run.samples_per_step
    cards = []
    if now is not None and ranks > 1:
        cards = [
            ("Speedup now", number(now), f"samples/s of {ranks:,} ranks over those of one"),
            ("Efficiency", percent(now / ranks), f"of the ideal speedup, {ranks:,}"),
        ]
    return [
        *cards,
        (
            "Samples per second",
            number(run.throughput),
            f"of the job; {number(run.throughput / ranks)} per rank",
        ),
        ("Global batch", f"{samples:,.0f}", f"samples a step, of {_ranks(ranks)}"),
        (
            "Step time",
            f"{number(run.step_ms)} ms",
            f"the slowest rank's time, the {'mean' if run.mixed else 'median'}",
        ),
    ]


def _ranks(count: int) -> str:
    return f"{count:,} ranks" if count > 1 else "one rank"


def _compared_with(case: Case) -> list[str]:
    """Returns sentences on where the baseline comes from and what it means."""
    if case.ranks == 1:
        return ["One rank: there is no scaling to explain, and nothing to compare with."]
    throughput = case.one_rank_throughput
    reason = "no run on one rank was given"
    if case.baseline is not None:
        differing = ", ".join(differing_facts(case.run, case.baseline))
        reason = f"the run on one rank is of something else ({differing})"
    if throughput is None:
        return [
            f"Nothing to compare with: {reason}, and one rank cannot be "
            f"predicted: {_why_not_predicted(case)}."
        ]
    if not case.is_measured:
        return [
            f"The baseline is predicted from passes alone [probes.csv]: one rank would process "
            f"{number(throughput)} samples/s. It was not measured: {reason}."
        ]
    return [
        f"The baseline is measured: one rank processes {number(throughput)} samples/s, a step of "
        f"{case.baseline.samples_per_step:,.0f} samples in {number(case.baseline.step_ms)} ms "
        f"{case.baseline.file('steps.csv')}.",
        *_kind_of_scaling(case.run, case.baseline),
    ]


def _why_not_predicted(case: Case) -> str:
    try:
        step_model(case.run)
    except (NotJudged, UserError) as missing:
        return str(missing)
    return "its passes are not known"


def _kind_of_scaling(run: Evidence, baseline: Evidence) -> list[str]:
    """Returns a sentence on how long a perfect step would be."""
    mine, theirs = run.samples_per_step, baseline.samples_per_step
    ranks = run.world_size
    if mine == theirs:
        ideal, kind = baseline.step_ms / ranks, "strong"
        means = "The baseline's samples are divided among the ranks"
    elif mine == theirs * ranks:
        ideal, kind = baseline.step_ms, "weak"
        means = "Each rank takes as many samples as the baseline"
    else:
        return []
    return [
        f"{means} ({kind} scaling): a perfect step would take {number(ideal)} ms; it takes "
        f"{number(run.step_ms)} ms."
    ]


def _healthy(diagnosis: Diagnosis, case: Case) -> str:
    now = case.speedup_now
    sentence = "No part of a step takes so much that it counts as a cause."
    if case.ranks > 1 and now is not None and now < GOOD_EFFICIENCY * case.ranks:
        sentence += (
            f" The efficiency is below {percent(GOOD_EFFICIENCY)} all the same: what is missing is "
            "spread over the parts below."
        )
    if diagnosis.not_judged:
        sentence += " Not all could be judged: see below what is missing."
    return sentence


def _costs(verdict: Verdict) -> str:
    if verdict.group == VALIDITY:
        return "it makes the comparison void"
    if not verdict.lost_share:
        return "it is not known to cost time"
    return f"it {costs(verdict)}"


def _unbroken_flags(text: str) -> Markup:
    """Returns text as HTML whose lines do not break within a flag."""
    return Markup(FLAG.sub(r'<span class="flag">\g<0></span>', str(escape(text))))


def bounds(verdict: Verdict) -> tuple[float, float] | None:
    """Returns the interval of the predicted speedup; None where there is none."""
    low, high = verdict.speedup_low, verdict.speedup_high
    return None if low is None or high is None else (low, high)


def interval(verdict: Verdict) -> str:
    """Returns the interval in brackets, with a space before it; nothing where there is none."""
    ends = bounds(verdict)
    return "" if ends is None else f" ({number(ends[0])} to {number(ends[1])})"


def gains_section(diagnosis: Diagnosis, case: Case) -> dict[str, object]:
    """Returns the speedup now and those predicted after each change, against the ideal.

    Keys: said, and figure, None where no speedup is known.
    """
    now, ranks = case.speedup_now, case.ranks
    predicted = [verdict for verdict in diagnosis.verdicts if verdict.predicted_speedup is not None]
    if ranks == 1 or (now is None and not predicted):
        why = "there is one rank" if ranks == 1 else "there is nothing to compare with"
        return {"said": f"No speedup is known: {why}.", "figure": None}
    values = [ranks, now or 0.0]
    for verdict in predicted:
        values += [verdict.predicted_speedup, verdict.speedup_now or 0.0, *(bounds(verdict) or ())]
    alone = any(is_outside_steps(verdict, case) for verdict in predicted)
    name = "As it is, by steps alone" if alone else "As it is"
    rows = [] if now is None else [_as_it_is(name, now, ranks)]
    rows += [
        _after(index, verdict, ranks)
        for index, verdict in enumerate(diagnosis.verdicts, 1)
        if verdict.predicted_speedup is not None
    ]
    kinds = [("now", "now")]
    if predicted:
        kinds.append(("predicted", "predicted after the change"))
    if any(bounds(verdict) for verdict in predicted):
        kinds.append(("interval", "its interval"))
    kinds.append(("mark", f"the ideal: {ranks:,}"))
    sentence = "Each change is taken alone: gains do not add up."
    if alone:
        sentence += " A cause that lies outside of steps is counted in where its change is drawn."
    if not predicted:
        sentence = "No change is predicted to gain."
    elif any(verdict.predicted_speedup > ranks for verdict in predicted):
        sentence += (
            " One above the ideal would make one rank faster as well; it is compared with one rank "
            "as it is."
        )
    unit = "speedup over one rank, in samples/s"
    return {"said": sentence, "figure": BarFigure(Axis(max(values) * SPARE), unit, rows, kinds)}


def _as_it_is(name: str, now: float, ranks: int) -> Row:
    sentence = f"Speedup now {number(now)}; the ideal is {ranks:,}."
    shapes = [Bar("now", 0.0, now, TOP, THICK), upright("mark", ranks, 0, HEIGHT)]
    return Row(f"{name}: {number(now)}", sentence, shapes, HEIGHT)


def _after(index: int, verdict: Verdict, ranks: int) -> Row:
    after, now = verdict.predicted_speedup, verdict.speedup_now
    shapes = [Bar("predicted", 0.0, after, TOP, THICK)]
    label = f"{index}. {verdict.cause}: {number(after)}{interval(verdict)}"
    sentence = f"Speedup predicted after the change for {verdict.title}: {number(after)}"
    if now is not None:
        shapes.append(Bar("now", 0.0, now, TOP + THICK, THIN))
        sentence += f", now {number(now)}"
    if ends := bounds(verdict):
        shapes += whiskers(*ends, TOP + THICK / 2, THICK / 4)
    shapes.append(upright("mark", ranks, 0, HEIGHT))
    return Row(label, f"{sentence}; the ideal is {ranks:,}.", shapes, HEIGHT)


def tried_section(diagnosis: Diagnosis) -> dict[str, object]:
    """Returns how long a pass takes with each change that was tried: said, and figure."""
    axis = Axis(max(1.0, *(1 - tried.gain.low for tried in diagnosis.tried)) * 100 * SPARE)
    kinds = [("tried", "with the change"), ("interval", "its interval"), ("mark", "as it is")]
    unit = "time of a forward and backward pass with its exchange, in % of the script's as it is"
    loads = any(tried.kind == WORKERS for tried in diagnosis.tried)
    sentence = (
        "Each was run on a copy of the model, alone, in rounds with the script as it is. Gains do "
        f"not add up.{' With num_workers each pass loads a batch first.' * loads}"
    )
    return {
        "said": sentence,
        "figure": BarFigure(axis, unit, [*map(_tried, diagnosis.tried)], kinds),
    }


def _tried(tried: Tried) -> Row:
    took = tried.gain.map(lambda saved: (1 - saved) * 100)
    shapes = [
        Bar("tried", 0.0, took.estimate, (TALL - THICK) / 2, THICK),
        *whiskers(took.low, took.high, TALL / 2, THICK / 4),
        upright("mark", 100.0, 0, TALL),
    ]
    label = f"{tried.change}: {number(took.estimate)}\u00a0%"
    if tried.speedup is not None:
        label += f", speedup {number(tried.speedup.estimate)}"
    return Row(label, tried.said(), shapes, TALL)
