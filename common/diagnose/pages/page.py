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
from common.diagnose.causes.trials import tried_against
from common.diagnose.diagnosis import Diagnosis
from common.diagnose.evidence.case import (
    MINOR,
    VALIDITY,
    Case,
    Verdict,
    differing_facts,
    percent,
)
from common.diagnose.evidence.evidence import Evidence, NotJudged
from common.diagnose.evidence.measured_step import step_model
from common.diagnose.pages.bars import colour_rules, number
from common.diagnose.pages.gains import (
    counted_in,
    gains_section,
    interval,
    tried_section,
)
from common.diagnose.pages.steps import ranks_section, timeline_section
from common.errors import UserError

TEMPLATE = Path(__file__).with_name("page.html.j2")
STYLE = Path(__file__).with_name("page.css")
FLAG = re.compile(r"--\w[\w-]*")
"""A flag of a command, which a line must not break after its hyphens."""


def diagnosis_page(diagnosis: Diagnosis, case: Case, title: str, notes: Sequence[str] = ()) -> str:
    """Returns a diagnosis as one HTML file that needs no network.

    Args:
        diagnosis: verdicts, summary and trials of the run.
        case: run and its baseline.
        title: title of the page.
        notes: sentences on what could not be seen.
    """
    compared = [*_with_main_cause(diagnosis, case), *_compared_with(case)]
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


def _with_main_cause(diagnosis: Diagnosis, case: Case) -> list[str]:
    """Returns a sentence with the speedup that counts more than steps, where the cause does."""
    if not diagnosis.verdicts or case.ranks == 1 or not counted_in(diagnosis.verdicts[0], case):
        return []
    speedup = diagnosis.verdicts[0].speedup_now
    return [
        "That is the speedup of steps alone. With the main cause counted in, which does not show "
        f"in the time of a step, it is {number(speedup)}: efficiency "
        f"{percent(speedup / case.ranks)}."
    ]


def _ranks(count: int) -> str:
    return f"{count:,} ranks" if count > 1 else "one rank"


def _compared_with(case: Case) -> list[str]:
    """Returns sentences on where the baseline comes from and what it means."""
    if case.ranks == 1:
        return ["One rank: there is no scaling to explain, and nothing to compare with."]
    differing = {} if case.baseline is None else differing_facts(case.run, case.baseline)
    throughput = case.one_rank_throughput
    if case.baseline is None:
        reason = "no run on one rank was given"
    else:
        reason = f"the run on one rank is of something else ({', '.join(differing)})"
    if throughput is None:
        return [
            f"Nothing to compare with: {reason}, and one rank cannot be "
            f"predicted: {_why_not_predicted(case)}."
        ]
    if case.baseline is None or differing:
        return [
            f"The baseline is predicted from passes alone [probes.csv]: one rank would process "
            f"{number(throughput)} samples/s. It was not measured: {reason}."
        ]
    return [
        f"The baseline is measured: one rank processes {number(throughput)} samples/s, a step of "
        f"{case.baseline.samples_per_step:,.0f} samples in {number(case.baseline.step_ms)} ms "
        f"{case.file('steps.csv', case.baseline)}.",
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
    if verdict.group == MINOR or verdict.lost_share is None:
        return "it costs no time"
    return f"it takes {percent(verdict.lost_share)} of the time"


def _unbroken_flags(text: str) -> Markup:
    """Returns text as HTML whose lines do not break within a flag."""
    return Markup(FLAG.sub(r'<span class="flag">\g<0></span>', str(escape(text))))
