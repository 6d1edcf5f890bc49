"""A diagnosis as one web page: slower than what, why, where a step's time goes, what would help.

The page is one file of HTML that asks for nothing from anywhere: style and figures are in it, and a
browser is told to load nothing. It reads without JavaScript, which adds buttons that copy a change.
Sections whose tables a run has not say so in a line.
"""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from pathlib import Path

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
from common.diagnose.pages import bars
from common.diagnose.pages.bars import number
from common.diagnose.pages.gains import (
    counted_in,
    gains_section,
    interval,
    tried_section,
)
from common.diagnose.pages.steps import ranks_section, timeline_section
from common.errors import UserError

STYLE = Path(__file__).with_name("page.css")
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
"""Content security policy: a browser loads nothing but what is written in the page."""
FLAG = re.compile(r"--\w[\w-]*")
"""A flag of a command, which a line must not break after its hyphens."""
COPY = """
for (const change of document.querySelectorAll("pre.change")) {
  if (!navigator.clipboard) break;
  const button = document.createElement("button");
  button.type = "button";
  button.textContent = "Copy";
  button.onclick = async () => {
    await navigator.clipboard.writeText(change.textContent);
    button.textContent = "Copied";
  };
  change.after(button);
}
"""


def diagnosis_page(found: Diagnosis, case: Case, title: str, notes: Sequence[str] = ()) -> str:
    """Returns a diagnosis as one HTML file that needs no network.

    Args:
        found: the diagnosis.
        case: the run that it is of, and its baseline.
        title: of the page.
        notes: what could not be seen, a sentence each.
    """
    sections = {
        "Baseline: slower than what?": _baseline(found, case),
        "Verdict": _verdict(found, case, notes),
        "A step by rank": ranks_section(case),
        "Steps in time, by rank": timeline_section(case),
        "What a change would gain": gains_section(found, case),
    }
    if found.tried:
        sections["What changes gained when they were tried"] = tried_section(found)
    body = "".join(
        f"<section>\n<h2>{html.escape(heading)}</h2>\n{inner}</section>\n"
        for heading, inner in sections.items()
    )
    style = f"{STYLE.read_text()}\n{bars.colour_rules()}"
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(title)}</title>\n<style>\n{style}\n</style>\n</head>\n<body>\n"
        f"<header><h1>{html.escape(title)}</h1></header>\n<main>\n{body}</main>\n"
        f"<footer><p>{html.escape(_source(case.run))}</p></footer>\n"
        f"<script>{COPY}</script>\n</body>\n</html>\n"
    )


def _source(run: Evidence) -> str:
    record = run.opened.environment
    known = [record.get("hardware"), str(record.get("start_time", ""))[:10]]
    where = f"Arm {run.arm['arm']} of {run.name}"
    return "; ".join([where, *(str(each) for each in known if each)]) + "."


def _baseline(found: Diagnosis, case: Case) -> str:
    """Returns how fast the job is, and what that is compared with."""
    run, ranks, now = case.run, case.ranks, case.speedup_now
    samples = run.samples_per_step
    cards = []
    if now is not None and ranks > 1:
        cards = [
            ("Speedup now", number(now), f"samples/s of {ranks:,} ranks over those of one"),
            ("Efficiency", percent(now / ranks), f"of the ideal speedup, {ranks:,}"),
        ]
    cards += [
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
    drawn = "".join(
        f'<div><dt>{name}</dt> <dd class="value">{value}</dd> <dd>{said}</dd></div>\n'
        for name, value, said in cards
    )
    told = [*_with_main_cause(found, case), *_compared_with(case)]
    if found.verdicts and found.much_unexplained:
        told.append(found.unexplained.said())
    sentences = "".join(f"<p>{html.escape(each)}</p>\n" for each in told)
    return f'<dl class="cards">\n{drawn}</dl>\n{sentences}'


def _with_main_cause(found: Diagnosis, case: Case) -> list[str]:
    """Returns a sentence with the speedup that counts more than steps, where the cause does."""
    if not found.verdicts or case.ranks == 1 or not counted_in(found.verdicts[0], case):
        return []
    own = found.verdicts[0].speedup_now
    return [
        "That is the speedup of steps alone. With the main cause counted in, which does not show "
        f"in the time of a step, it is {number(own)}: efficiency {percent(own / case.ranks)}."
    ]


def _ranks(count: int) -> str:
    return f"{count:,} ranks" if count > 1 else "one rank"


def _compared_with(case: Case) -> list[str]:
    """Returns sentences on where the baseline comes from and what it means."""
    if case.ranks == 1:
        return ["One rank: there is no scaling to explain, and nothing to compare with."]
    differing = {} if case.baseline is None else differing_facts(case.run, case.baseline)
    one = case.one_rank_throughput
    if case.baseline is None:
        given = "no run on one rank was given"
    else:
        given = f"the run on one rank is of something else ({', '.join(differing)})"
    if one is None:
        return [
            f"Nothing to compare with: {given}, and one rank cannot be "
            f"predicted: {_why_not_predicted(case)}."
        ]
    if case.baseline is None or differing:
        return [
            f"The baseline is predicted from passes alone [probes.csv]: one rank would process "
            f"{number(one)} samples/s. It was not measured: {given}."
        ]
    return [
        f"The baseline is measured: one rank processes {number(one)} samples/s, a step of "
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


def _verdict(found: Diagnosis, case: Case, notes: Sequence[str]) -> str:
    """Returns the main cause, or that there is none; all else is folded."""
    if found.healthy:
        first = _healthy(found, case)
    elif not found.verdicts:
        first = (
            '<div class="answer"><p class="kind">Not explained</p>\n'
            "<h3>Something is wrong, and no cause was found for it</h3>\n"
            f"<p>{html.escape(found.unexplained.said())}</p></div>\n"
        )
    else:
        main = found.verdicts[0]
        first = (
            f'<div class="answer"><p class="kind">Main cause: {_costs(main)}</p>\n'
            f"<h3>{html.escape(main.title)}</h3>\n{_cause(main, found)}</div>\n"
        )
    others = "".join(
        f"<details><summary><h3>{place}. {html.escape(verdict.title)}</h3> "
        f"({_costs(verdict)})</summary>\n{_cause(verdict, found)}</details>\n"
        for place, verdict in enumerate(found.verdicts[1:], 2)
    )
    not_judged = [f"{cause}: {why}" for cause, why in found.not_judged]
    return (
        first
        + others
        + _fold("Not judged, and why", not_judged)
        + _fold("What could not be seen", notes)
    )


def _healthy(found: Diagnosis, case: Case) -> str:
    now = case.speedup_now
    said = "No part of a step takes so much that it counts as a cause."
    if case.ranks > 1 and now is not None and now < GOOD_EFFICIENCY * case.ranks:
        said += (
            f" The efficiency is below {percent(GOOD_EFFICIENCY)} all the same: what is missing is "
            "spread over the parts below."
        )
    if found.not_judged:
        said += " Not all could be judged: see below what is missing."
    return (
        '<div class="answer healthy"><p class="kind">Healthy</p>\n<h3>Nothing is wrong</h3>\n'
        f"<p>{said}</p></div>\n"
    )


def _costs(verdict: Verdict) -> str:
    if verdict.group == VALIDITY:
        return "it makes the comparison void"
    if verdict.group == MINOR or verdict.lost_share is None:
        return "it costs no time"
    return f"it takes {percent(verdict.lost_share)} of the time"


def _cause(verdict: Verdict, found: Diagnosis) -> str:
    """Returns what a cause is judged by, how sure that is, what to change and what it brings."""
    tried = tried_against(verdict, found.tried)
    told = f"<p><strong>Tried:</strong> {html.escape(tried.said())}.</p>\n" if tried else ""
    evidence = "".join(f"<li>{html.escape(sentence)}</li>\n" for sentence in verdict.evidence)
    return (
        f'<ul class="evidence">\n{evidence}</ul>\n'
        f"<p><strong>Confidence: {html.escape(verdict.confidence)}</strong> "
        f"({html.escape(verdict.reason)}).</p>\n<p><strong>What to change</strong></p>\n"
        f'<pre class="change">{_unbroken_flags(verdict.change)}</pre>\n'
        f"<p>{_prediction(verdict)}</p>\n{told}"
    )


def _unbroken_flags(text: str) -> str:
    """Returns text as HTML whose lines do not break within a flag."""
    return FLAG.sub(r'<span class="flag">\g<0></span>', html.escape(text))


def _prediction(verdict: Verdict) -> str:
    after = verdict.predicted_speedup
    if after is None:
        return "No speedup is predicted for this change."
    now = verdict.speedup_now
    said = (
        f"<strong>Predicted speedup after the change: {number(after)}</strong>{interval(verdict)}"
    )
    return f"{said}; now {number(now)}." if now is not None else f"{said}."


def _fold(name: str, lines: Sequence[str]) -> str:
    """Returns a folded list with its length, or a line where there is nothing in it."""
    if not lines:
        return f'<p class="soft">{name}: nothing.</p>\n'
    items = "".join(f"<li>{html.escape(line)}</li>\n" for line in lines)
    return bars.folded(f"{name} ({len(lines)})", f"<ul>\n{items}</ul>\n")
