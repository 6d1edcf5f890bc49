"""*Four GPUs as fast as one, why?* The causes, from what was measured, with the main one first.

``diagnose`` looks at per-rank measurements, identities of samples and the placement of ranks,
never at the settings. Each verdict says what it is judged by and in which file that stands, how
sure it is, what to change, and the speedup that the performance model predicts after the change.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TypeVar

from common.analysis.step_parts import PARTS
from common.diagnose.all_causes import CAUSES, OF_SCRIPTS
from common.diagnose.causes.communication import LIMITS, NEEDLESS, TARGET_EFFICIENCY
from common.diagnose.causes.job.traces import by_profile, profiled, profiled_step
from common.diagnose.causes.trials import (
    Tried,
    borne_out,
    shown_by_trials,
    tried_against,
    tried_changes,
)
from common.diagnose.evidence.case import PERFORMANCE, Case, Verdict, percent
from common.diagnose.evidence.evidence import TRACE_STEPS, NotJudged, baseline_arm, open_evidence
from common.diagnose.frameworks import in_its_words
from common.diagnose.unexplained import Unexplained, unexplained
from common.errors import UserError
from common.judged import DISTURBED

Subject = TypeVar("Subject")
MISTAKES = (
    *(NEEDLESS, "oversubscribed-cores", "nccl-settings", "own-exchange"),
    *("unused-gradients", "sparse-embedding", "sent-buffers", "synchronised-norms"),
)
"""Causes that lengthen an exchange: they come before the limit of what is left of it."""
COUNTED = (NEEDLESS, "recompilation", "cpu-quota", "shared-device")
"""Causes that cost time and are counted or seen, not timed: other work does not look like them."""
SEEN_OF_MISTAKES = (*LIMITS, "exposed-communication", "beside-the-model", "bucket-cap")
REASONS = dict.fromkeys(SEEN_OF_MISTAKES, MISTAKES) | {
    "evaluation-or-logging": ("garbage-collection", "growing-memory"),
    "own-exchange": ("slow-rank", "unequal-lengths"),
}
"""Cause → causes that come before it, as they are a reason of what it only sees the time of."""
LARGE_PART = 0.5
"""Share of a verdict's time from which a surer one, or a reason, comes before it."""
MANY_UNJUDGED = 12
"""With so many causes not judged, it means little that none of the others was found."""
NEW_SHARE = 0.02
"""Share of a step by which a cause takes more after a change, to be named there again."""
WIDTH = 96
"""Characters of a line in a report."""


@dataclass(frozen=True)
class Diagnosis:
    """Verdicts on a run.

    Attributes:
        verdicts: verdicts, the main cause first; empty where none was found.
        not_judged: (cause, why), for lack of a table.
        summary: speedup, efficiency and parts of the step, in a sentence or two.
        tried: changes that were tried on the spot, the best first.
        unexplained: shares of a step that scaling costs; None where they are not known.
        lost: sentence on where most of a step goes beside its passes, for a run that falls short
            of ``TARGET_EFFICIENCY``; empty for one that does not.
    """

    verdicts: tuple[Verdict, ...]
    not_judged: tuple[tuple[str, str], ...]
    summary: str
    tried: tuple[Tried, ...] = ()
    unexplained: Unexplained | None = None
    lost: str = ""

    @property
    def healthy(self) -> bool:
        """Returns True if no cause was found, and none seems to be missing."""
        return not (self.verdicts or self.much_unexplained or self.lost)

    @property
    def much_unexplained(self) -> bool:
        """Returns True if more than a little of the step is not explained."""
        return self.unexplained is not None and self.unexplained.is_large

    def as_json(self) -> dict[str, object]:
        """Returns the diagnosis as JSON can hold it."""
        return {
            "summary": self.summary,
            "healthy": self.healthy,
            "verdicts": [verdict.as_json() for verdict in self.verdicts],
            "tried": [asdict(trial) for trial in self.tried],
            "unexplained": None if self.unexplained is None else asdict(self.unexplained),
            "not_judged": [{"cause": cause, "why": why} for cause, why in self.not_judged],
        }


def examine_case(case: Case) -> Diagnosis:
    """Judges every cause of a case.

    What makes the comparison void comes first, then what costs time, the largest share first.
    """
    causes = CAUSES | OF_SCRIPTS if case.run.watched else CAUSES
    verdicts, not_judged = judged_causes(causes, case)
    of_profile, not_judged = by_profile(case, not_judged)
    verdicts += of_profile
    tried = tried_changes(case)
    verdicts = borne_out(case, tried, verdicts)
    verdicts += shown_by_trials(case, tried, {verdict.cause for verdict in verdicts})
    if case.run.opened.machine_state == DISTURBED:
        verdicts = [_hint(verdict) for verdict in verdicts]
    ordered = tuple(
        in_its_words(case, verdict.with_interval(case.run.noise)) for verdict in in_order(verdicts)
    )
    return Diagnosis(
        verdicts=ordered,
        not_judged=tuple(not_judged),
        summary=_summary(case, with_main_cause(ordered, case)),
        tried=tried,
        unexplained=unexplained(case, verdicts),
        lost=_lost(case),
    )


def _hint(verdict: Verdict) -> Verdict:
    """Returns what is left of a verdict where other work had the cores: no time is sure then."""
    if verdict.group != PERFORMANCE or verdict.cause in COUNTED:
        return verdict
    return replace(
        verdict, confidence="low", reason=f"other work had the cores meanwhile; {verdict.reason}"
    )


def judged_causes(
    causes: Mapping[str, Callable[[Subject], Verdict | None]], subject: Subject
) -> tuple[list[Verdict], list[tuple[str, str]]]:
    """Judges causes; returns the verdicts, and (cause, why) of those that cannot be judged."""
    verdicts, not_judged = [], []
    for cause, judge in causes.items():
        try:
            verdict = judge(subject)
        except NotJudged as missing:
            not_judged.append((cause, str(missing)))
            continue
        if verdict is not None:
            verdicts.append(verdict)
    return verdicts, not_judged


def lost_by_round(case: Case, cause: str) -> list[float]:
    """Returns the share of a step that a cause takes in each round by itself.

    It is 0 where the round does not show the cause, and NaN where it cannot be judged.

    Args:
        case: a sweep's.
        cause: name of one of ``CAUSES``.
    """
    judge = next(judge for names, judge in CAUSES.items() if cause in names.split(", "))
    shares = []
    for round_ in sorted(set(case.run.measured["round"])):
        try:
            verdict = judge(case.of_round(round_))
            is_shown = verdict is not None and verdict.cause == cause
            shares.append((verdict.lost_share or 0.0) if is_shown else 0.0)
        except (NotJudged, UserError):
            shares.append(math.nan)
    return shares


def in_order(verdicts: Sequence[Verdict]) -> list[Verdict]:
    """Sorts by group and cost; but what ``_goes_before`` another comes before it."""
    ordered, remaining = [], sorted(verdicts, key=lambda verdict: verdict.order)
    while remaining:
        first = next(v for v in remaining if not any(_goes_before(o, v) for o in remaining))
        remaining.remove(first)
        ordered.append(first)
    return ordered


def _goes_before(first: Verdict, second: Verdict) -> bool:
    """Returns True if a verdict comes before another of its group, though it may take less.

    It does so if it is surer than a verdict of low confidence and takes at least ``LARGE_PART`` of
    that one's time, or if it is a reason of the other: of time that the other only sees, or of a
    limit. A limit is what is left without its reasons, and comes after nothing else.
    """
    if first.group != second.group or first.confidence == "low":
        return False
    takes_most = -first.order[1] >= LARGE_PART * -second.order[1]
    if first.cause in REASONS.get(second.cause, ()):
        return takes_most or first.cause == NEEDLESS
    return takes_most and second.confidence == "low" and second.cause not in LIMITS


def diagnose_folder(
    run_folder: Path | str, baseline_folder: Path | str | None = None, arm: int | None = None
) -> Diagnosis:
    """Examines a run directory; see ``case_of``."""
    return examine_case(case_of(run_folder, baseline_folder, arm))


def case_of(
    run_folder: Path | str, baseline_folder: Path | str | None = None, arm: int | None = None
) -> Case:
    """Opens a run directory; the baseline is the one given, or else an arm of the same run."""
    run = open_evidence(run_folder, arm)
    if baseline_folder:
        return Case(run, open_evidence(baseline_folder))
    one_rank_arm = baseline_arm(run)
    if one_rank_arm is None or run.world_size == 1:
        return Case(run)
    try:
        return Case(run, run.of_arm(one_rank_arm))
    except UserError:  # the arm has no steps: the run was cut off
        return Case(run)


def _lost(case: Case) -> str:
    """Returns where most of a step goes beside its passes, if ranks bring little; see ``lost``."""
    now = case.speedup_now
    if case.ranks == 1 or now is None or now >= TARGET_EFFICIENCY * case.ranks:
        return ""
    try:
        parts = case.run.parts
    except NotJudged:
        return "No step was measured in parts."
    beside = {name: parts.parts_ms[name] for name in PARTS if name not in ("forward", "backward")}
    most = max(beside, key=beside.get)
    share = percent(beside[most] / parts.step_ms)
    return f"Apart from its passes a step spends most on {most}, {share}."


def _summary(case: Case, counted: str) -> str:
    sentences = []
    if case.run.opened.machine_state == DISTURBED:
        sentences.append(
            f"{case.run.opened.machine.reason[0].upper()}{case.run.opened.machine.reason[1:]} "
            "meanwhile: what was timed is a hint, and says more once nothing else runs."
        )
    if case.ranks == 1:
        sentences.append("One rank: there is no scaling to explain.")
    elif case.speedup_now is not None:
        baseline = f"one rank's {case.one_rank_throughput:,.0f} samples/s"
        source = "measured" if case.baseline is not None else "not run: estimated from its passes"
        sentences.append(
            f"{case.ranks} ranks are {case.speedup_now:.2f} times as fast as {baseline} "
            f"({source}): efficiency {percent(case.speedup_now / case.ranks)}."
        )
        sentences += [counted] if counted else []
    else:
        sentences.append(
            f"{case.ranks} ranks, {case.run.throughput:,.0f} samples/s; nothing to compare with."
        )
    try:
        parts = case.run.parts
    except NotJudged:
        if (profile := profiled(case)) and profile.common_steps:
            sentences.append(f"{profiled_step(profile)} [{TRACE_STEPS}].")
        return " ".join(sentences)
    shares = ", ".join(
        f"{name} {percent(value / parts.step_ms)}" for name, value in parts.parts_ms.items()
    )
    return " ".join([*sentences, f"A step of {parts.step_ms:.3g} ms: {shares} [steps.csv]."])


def diagnosis_lines(
    run_folder: Path | str, baseline_folder: Path | str | None = None, arm: int | None = None
) -> list[str]:
    """Returns the diagnosis of a run directory as text, for performance_report.txt."""
    return lines_of(diagnose_folder(run_folder, baseline_folder, arm))


def lines_of(diagnosis: Diagnosis, many_unjudged: int = MANY_UNJUDGED) -> list[str]:
    """Returns a diagnosis as text.

    Args:
        diagnosis: verdicts, summary and trials of a run.
        many_unjudged: with so many causes not judged, finding no other means little.
    """
    lines = wrapped(diagnosis.summary)
    if diagnosis.much_unexplained:
        lines += wrapped(diagnosis.unexplained.said())
    if not diagnosis.verdicts and not diagnosis.healthy:
        slow = "That is slow, and no" if diagnosis.lost else "No"
        lines += wrapped(f"{slow} cause was found. {diagnosis.lost}")
    if diagnosis.healthy and len(diagnosis.not_judged) < many_unjudged:
        lines.append("No limiting cause found: nothing to change.")
    elif diagnosis.healthy:
        lines.append("No limiting cause found among the few that can be judged here.")
    lines += lines_of_causes(diagnosis.verdicts, diagnosis.tried)
    tried = [f"{trial.said()}." for trial in diagnosis.tried]
    lines += listed("Tried on a copy of the model, each change alone", tried)
    return lines + listed("Not judged", [f"{cause}: {why}" for cause, why in diagnosis.not_judged])


def listed(heading: str, sentences: Sequence[str]) -> list[str]:
    """Returns sentences as text below a heading; nothing where there are none."""
    lines = ["", f"{heading}:"] if sentences else []
    for sentence in sentences:
        lines += wrapped(sentence, "   - ")
    return lines


def lines_of_causes(verdicts: Sequence[Verdict], trials: Sequence[Tried] = ()) -> list[str]:
    """Returns causes as text, with the changes that were tried against them."""
    lines: list[str] = []
    for number, verdict in enumerate(verdicts, 1):
        lost = f"; {costs(verdict)}" if verdict.lost_share else ""
        lines += ["", *wrapped(f"{verdict.title} ({verdict.cause}{lost})", f"{number}. ")]
        for sentence in verdict.evidence:
            lines += wrapped(sentence, "   - ")
        lines += wrapped(f"Confidence: {verdict.confidence} ({verdict.reason}).", "   ")
        lines += wrapped(f"Change: {verdict.change}", "   ")
        if (gain := verdict.gain) is not None:
            ends = f"{verdict.gain_low:.2f} to {verdict.gain_high:.2f}"
            sentence = f"Predicted after the change: {gain:.2f} times as fast as now ({ends})."
            if verdict.speedup_now is not None:
                sentence = (
                    f"Speedup now {verdict.speedup_now:.2f}, predicted after the change "
                    f"{verdict.predicted_speedup:.2f} ({verdict.speedup_low:.2f} to "
                    f"{verdict.speedup_high:.2f}), both over one rank as it is: {gain:.2f} times "
                    "as fast as now."
                )
            lines += wrapped(sentence, "   ")
        if tried := tried_against(verdict, trials):
            lines += wrapped(f"Tried: {tried.said()}.", "   ")
    return lines


def costs(verdict: Verdict) -> str:
    """Returns what a cause takes, in words: samples that are wasted, or a share of the time."""
    wasted = verdict.cause == "wrong-sampler"
    share = percent(verdict.lost_share)
    return f"wastes {share} of the samples" if wasted else f"takes {share} of the time"


def is_outside_steps(verdict: Verdict, case: Case) -> bool:
    """Returns True if a verdict's speedup now is not that of steps alone.

    What lies between steps, repeated samples and a warm-up are not in the time of a step.
    """
    now, counted = case.speedup_now, verdict.speedup_now
    return now is not None and counted is not None and not math.isclose(now, counted, rel_tol=1e-3)


def with_main_cause(verdicts: Sequence[Verdict], case: Case) -> str:
    """Returns a sentence with the speedup that counts more than steps, where the cause does."""
    if not verdicts or case.ranks == 1 or not is_outside_steps(verdicts[0], case):
        return ""
    speedup = verdicts[0].speedup_now
    return (
        "That is the speedup of steps alone. With the main cause counted in, which does not show "
        f"in the time of a step, it is {speedup:.2f}: efficiency {percent(speedup / case.ranks)}."
    )


def new_causes(before: Diagnosis, after: Diagnosis) -> list[Verdict]:
    """Returns the causes that were not found before, or that take more by ``NEW_SHARE``."""
    shares = {verdict.cause: verdict.lost_share or 0.0 for verdict in before.verdicts}
    return [
        verdict
        for verdict in after.verdicts
        if verdict.cause not in shares
        or (verdict.lost_share or 0.0) - shares[verdict.cause] > NEW_SHARE
    ]


def wrapped(text: str, indent: str = "") -> list[str]:
    """Returns text in lines of at most ``WIDTH`` characters, the first after an indent."""
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=indent,
        subsequent_indent=" " * len(indent),
        break_on_hyphens=False,  # names of files stay whole
    )
