"""Changes that ``ddplab diagnose --verify`` tried, against the script as it is.

Trials time forward and backward passes with their exchange (``trials.csv``). What a change saves of
a pass is estimated within rounds; of a step it saves as much as passes are of it, or all that the
change shortens, and the speedup over one rank changes with the step. In trials of loader workers
each pass loads a batch first.

Trials are evidence, too. The model that causes rest on does not know everything: how threads of one
rank hinder each other, or how many small all-reduces go through a backend. A trial measures the
change itself, so where one was made it decides.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import pandas as pd

from common.diagnose.causes.communication import cap_change
from common.diagnose.evidence.case import PERFORMANCE, Case, Verdict, gain_without, percent
from common.diagnose.evidence.evidence import PLACEMENT, TRIALS
from common.judged import DISTURBED, FIRST_PAGE_ROUNDS, NOT_WITNESSED, Judged
from common.samples import Interval, paired_gain, per_round

AS_IT_IS, AS_IT_LOADS = "as it is", "as it loads"
"""Settings of the script itself, without its loading and with it."""
WORKERS = "workers"
"""The kind of change whose passes load batches."""
AFFINITY, THREADS = "affinity", "threads"
"""Kinds of change that bind ranks to cores of their own, and that change their threads."""
PASSES = ("forward_time_ms", "whole_backward_time_ms")
CHANGED = {
    WORKERS: (*PASSES, "data_time_ms"),
    THREADS: (*PASSES, "optimizer_time_ms"),
    AFFINITY: (*PASSES, "data_time_ms", "optimizer_time_ms"),
}
"""What a kind of change shortens, where that is more than passes: a rank that has its cores for
itself loads and updates in less time, too."""
LEAST_GAIN = 0.05
"""Least share of a step saved, at the lower end of the interval."""


@dataclass(frozen=True)
class Remedy:
    """Kinds of change that mend a cause.

    Attributes:
        kinds: kinds that are tried against it.
        title: title where a trial shows the cause and nothing else does; empty for causes that no
            trial can show.
        is_tried: the remedy is the very change that is tried.
        is_predicted: the cause is only named because a gain is predicted; others are facts of the
            script.
    """

    kinds: tuple[str, ...]
    title: str = ""
    is_tried: bool = True
    is_predicted: bool = False


REMEDIES = {
    "bucket-cap": Remedy(("bucket_cap_mb",), "another bucket cap is faster", is_predicted=True),
    "needless-search": Remedy(
        ("find_unused_parameters",), "DDP looks for unused parameters, and there are none"
    ),
    "wide-gradients": Remedy(
        ("compression",), "gradients travel in 32 bits where 16 would do", is_predicted=True
    ),
    "network-too-slow": Remedy(("compression",), is_tried=False),
    "needless-synchronisation": Remedy(
        ("no_sync",), "gradients are exchanged after every micro-batch"
    ),
    "batch-too-small": Remedy(("no_sync",), is_tried=False),
    "too-few-threads": Remedy(
        (THREADS,), "a rank computes with fewer threads than it has cores", is_tried=False
    ),
    "oversubscribed-cores": Remedy((AFFINITY, THREADS), "threads or ranks share cores"),
    "data-loading": Remedy((WORKERS,), is_tried=False),
}
NO_REMEDY = Remedy((), is_tried=False)


@dataclass(frozen=True)
class Tried:
    """A change that was tried.

    Attributes:
        kind, change: kind of the change, and the change as a line of Python or a word.
        gain: the share of a pass that it saves; the intervals of all that were tried hold at once.
        share: share of a step that it shortens as it does a pass.
        speedup: samples per second over those of one rank with it; None where one rank's are not
            known.
        passes: passes of a step, where they are not the script's: the global batch is another one.
        machine: state of the machine meanwhile (``Judged``).
    """

    kind: str
    change: str
    gain: Interval
    share: float
    speedup: Interval | None = None
    passes: int | None = None
    machine: str = NOT_WITNESSED

    @property
    def judged(self) -> Judged:
        """Returns the gain as it may be said."""
        return Judged(self.gain, null=0.0, machine=self.machine, least_rounds=FIRST_PAGE_ROUNDS)

    @property
    def decides(self) -> bool:
        """Returns True if there were rounds enough, on a machine that had no other work."""
        return self.gain.rounds >= FIRST_PAGE_ROUNDS and self.machine != DISTURBED

    def said(self) -> str:
        """Returns what came out, in words: ``takes 33 % less of a pass (30 % to 36 %) …``."""
        gain, has_ends = self.gain, self.gain.is_told
        what = "loading and a pass take" if self.kind == WORKERS else "a pass takes"
        saved = f"{percent(abs(gain.estimate))} {'less' if gain.estimate >= 0 else 'more'}"
        sentence = f"{self.change}: {what} {saved}"
        if has_ends:
            sentence += f" ({gain.text(percent)} less)"
        if speedup := self.speedup:
            sentence += f"; speedup {speedup.estimate:.2f}"
            if has_ends:
                sentence += f" ({speedup.text()})"
        if not self.judged.is_settled:
            sentence += f"; not told from no change: {self.judged.reason}"
        if self.passes is not None:
            sentence += f"; a step is then of {self.passes} passes"
        return sentence


def tried_changes(case: Case) -> tuple[Tried, ...]:
    """Returns the changes that were tried on a run, the best first; empty where none were."""
    trials = case.run.tables.get(TRIALS)
    if trials is None or trials.empty:
        return ()
    times = per_round(trials, "step_time_ms", "setting")
    changed = trials[~trials["setting"].isin([AS_IT_IS, AS_IT_LOADS])]
    by_change = changed.groupby("setting", sort=False)
    tried = [_tried(case, times, change, rows, len(by_change)) for change, rows in by_change]
    return tuple(sorted(filter(None, tried), key=lambda trial: -trial.gain.estimate))


def _tried(
    case: Case, times: pd.DataFrame, change: str, rows: pd.DataFrame, claims: int
) -> Tried | None:
    """Returns what a change brought; None where no round has both it and the script as it is.

    Args:
        case: the run.
        times: the pass of each round (index) and setting (columns).
        change: the setting.
        rows: the trials of this setting.
        claims: number of changes that were tried.
    """
    kind, passes = str(rows["kind"].iloc[0]), int(rows["passes"].iloc[0])
    base = AS_IT_LOADS if kind == WORKERS else AS_IT_IS
    pairs = times.reindex(columns=[change, base]).dropna()
    if pairs.empty:
        return None
    gain = paired_gain(pairs[change], pairs[base], claims=claims)
    share = _changed_share(case, kind)
    now = case.speedup_now
    return Tried(
        kind=kind,
        change=str(change),
        gain=gain,
        share=share,
        speedup=None if now is None else gain.map(lambda saved: now * gain_without(share * saved)),
        passes=passes if passes != case.run.accumulation else None,
        machine=case.run.opened.machine_state,
    )


def tried_against(verdict: Verdict, tried: Sequence[Tried]) -> Tried | None:
    """Returns the best change that was tried against a cause; None where none was."""
    kinds = REMEDIES.get(verdict.cause, NO_REMEDY).kinds
    return next((trial for trial in tried if trial.kind in kinds), None)


def _changed_share(case: Case, kind: str) -> float:
    """Returns the share of a step that a kind of change shortens as it does a pass.

    That is what its forward and backward passes take, exchange included; see ``CHANGED``.
    """
    columns = CHANGED.get(kind, PASSES)
    changed_ms = sum(case.run.by_step(column) for column in columns)
    step_ms = case.run.slowest_ms
    return min(1.0, float((changed_ms.mean(axis=1) / step_ms).median()))


def borne_out(case: Case, tried: Sequence[Tried], verdicts: Sequence[Verdict]) -> list[Verdict]:
    """Returns verdicts as their trials leave them.

    Where a remedy was tried, what it saved is what it is predicted to save, in place of the model's
    answer. If it saved less than ``LEAST_GAIN`` of a step even at the upper end of its interval,
    or in the median where it is not told from no change, its cause has low confidence; if it surely
    costs time, a predicted cause is none, and any other one comes last. What a needless search
    costs is known from its trial alone. Trials of loader workers decide only how sure it is that
    loading can be shortened here: what they save is not what data that need no preparing would.
    """
    judged = (_borne_out(case, verdict, tried_against(verdict, tried)) for verdict in verdicts)
    return [verdict for verdict in judged if verdict is not None]


def _borne_out(case: Case, verdict: Verdict, trial: Tried | None) -> Verdict | None:
    remedy = REMEDIES.get(verdict.cause, NO_REMEDY)
    decides = remedy.is_tried or verdict.cause == "data-loading"
    if not decides or trial is None or trial.passes is not None or not trial.decides:
        return verdict
    low, high = (percent(saved * trial.share) for saved in (trial.gain.low, trial.gain.high))
    reason = f"tried in {trial.gain.rounds} rounds: a step then takes {low} to {high} less"
    if trial.gain.high < 0 and remedy.is_predicted:
        return None
    if remedy.is_tried:
        verdict = _as_tried(case, verdict, trial)
    most = trial.gain.high if trial.gain.low > 0 else trial.gain.estimate
    if most * trial.share < LEAST_GAIN:
        sure = 0.0 if trial.gain.high < 0 else verdict.sure_share  # such a remedy costs time
        return replace(verdict, confidence="low", reason=reason, sure_share=sure)
    if verdict.cause == "needless-search" and trial.gain.low > 0:
        return replace(
            verdict,
            lost_share=trial.gain.estimate * trial.share,
            confidence="high" if trial.gain.low * trial.share > LEAST_GAIN else "medium",
            reason=reason,
            group=PERFORMANCE,
            speedup_now=case.speedup_now,
            **_gains(trial),
        )
    return verdict


def _as_tried(case: Case, verdict: Verdict, trial: Tried) -> Verdict:
    """Returns a verdict whose prediction is what its trial measured; a cap is then the tried one.

    The interval is left to be that of a prediction: from one run to another a machine changes by
    more than from one round of trials to another.
    """
    if verdict.gain is None:
        return verdict
    if verdict.proposed is not None and trial.kind == "bucket_cap_mb":
        cap_mb = float(trial.change.partition("=")[2])
        proposed = replace(verdict.proposed, bucket_cap_mb=cap_mb)
        verdict = replace(verdict, proposed=proposed, change=cap_change(case, cap_mb))
    if trial.kind == "compression":
        hook = f"ddp.register_comm_hook(None, default_hooks.{trial.change})"
        verdict = replace(verdict, change=hook)
    return replace(
        verdict,
        evidence=(*verdict.evidence, _measured(trial)),
        lost_share=max(0.0, trial.gain.estimate * trial.share),
        gain=_gains(trial)["gain"],
    )


def shown_by_trials(case: Case, tried: Sequence[Tried], causes: Collection[str]) -> list[Verdict]:
    """Returns a verdict for each cause that a trial has shown and nothing else has.

    Args:
        case: run and its baseline.
        tried: changes that were tried, the best first.
        causes: names of the causes that other tables have shown.
    """
    verdicts: dict[str, Verdict] = {}
    for trial in tried:
        cause = _cause(case, trial)
        gains = trial.judged.is_settled and trial.gain.low * trial.share > LEAST_GAIN
        if gains and cause and cause not in causes and cause not in verdicts:
            verdicts[cause] = _verdict(case, trial, cause, len(tried))
    return list(verdicts.values())


def _cause(case: Case, tried: Tried) -> str:
    """Returns the cause that a change mends; empty where it mends none, or changes the batch."""
    if tried.kind == THREADS:
        return "oversubscribed-cores" if _more_threads_than_cores(case) else "too-few-threads"
    if tried.passes is not None:
        return ""
    for cause, remedy in REMEDIES.items():
        if remedy.title and tried.kind in remedy.kinds:
            return cause
    return ""


def _more_threads_than_cores(case: Case) -> bool:
    placement = case.run.rows(PLACEMENT)[["threads", "cores"]]
    numbers = placement.apply(pd.to_numeric, errors="coerce")
    return bool((numbers["threads"] > numbers["cores"]).any())


def _verdict(case: Case, tried: Tried, cause: str, changes: int) -> Verdict:
    return Verdict(
        cause=cause,
        title=REMEDIES[cause].title,
        evidence=(_measured(tried),),
        lost_share=tried.gain.estimate * tried.share,
        confidence="medium",
        reason=(
            f"tried in {tried.gain.rounds} rounds, one of {changes} changes; no other table "
            "shows the cause"
        ),
        change=tried.change,
        speedup_now=case.speedup_now,
        **_gains(tried),
        sure_share=tried.gain.low * tried.share,
    )


def _gains(tried: Tried) -> dict[str, float]:
    """Returns the gain that a trial has shown, by the fields of a verdict."""
    saved = tried.gain
    shares = {"gain": saved.estimate, "gain_low": saved.low, "gain_high": saved.high}
    return {name: gain_without(share * tried.share) for name, share in shares.items()}


def _measured(tried: Tried) -> str:
    """Returns what a trial measured, as a sentence of evidence."""
    gain = tried.gain
    return (
        f"With {tried.change} a pass takes {percent(gain.estimate)} less "
        f"({percent(gain.low)} to {percent(gain.high)}) [{TRIALS}]."
    )
