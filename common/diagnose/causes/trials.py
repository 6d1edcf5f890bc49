"""Changes that ``ddplab diagnose --verify`` tried, against the script as it is.

Trials time forward and backward passes with their exchange (``trials.csv``). What a change saves of
a pass is estimated within rounds; of a step it saves as much as passes are of it, or all that the
change shortens, and the speedup over one rank changes with the step. In trials of loader workers
each pass loads a batch first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd

from common.diagnose.evidence.case import Case, Verdict, percent
from common.diagnose.evidence.evidence import TRIALS
from common.samples import Interval, paired_gain, per_round

AS_IT_IS, AS_IT_LOADS = "as it is", "as it loads"
"""Settings of the script itself, without its loading and with it."""
WORKERS = "workers"
"""The kind of change whose passes load batches."""
AFFINITY, THREADS = "affinity", "threads"
"""Kinds of change that bind ranks to cores of their own, and that change their threads."""
TRIED_BY = {
    "bucket-cap": ("bucket_cap_mb",),
    "needless-search": ("find_unused_parameters",),
    "wide-gradients": ("compression",),
    "network-too-slow": ("compression",),
    "needless-synchronisation": ("no_sync",),
    "batch-too-small": ("no_sync",),
    "too-few-threads": (THREADS,),
    "oversubscribed-cores": (AFFINITY, THREADS),
    "data-loading": (WORKERS,),
}
"""Causes, and the kinds of change that were tried against each."""
PASSES = ("forward_time_ms", "whole_backward_time_ms")
CHANGED = {
    WORKERS: (*PASSES, "data_time_ms"),
    THREADS: (*PASSES, "optimizer_time_ms"),
    AFFINITY: (*PASSES, "data_time_ms", "optimizer_time_ms"),
}
"""What a kind of change shortens, where that is more than passes: a rank that has its cores for
itself loads and updates in less time, too."""


@dataclass(frozen=True)
class Tried:
    """A change that was tried.

    Attributes:
        kind, change: kind of the change, and the change as a line of Python or a word.
        gain: the share of a pass that it saves.
        share: share of a step that it shortens as it does a pass.
        speedup: samples per second over those of one rank with it; None where one rank's are not
            known.
        passes: passes of a step, where they are not the script's: the global batch is another one.
    """

    kind: str
    change: str
    gain: Interval
    share: float
    speedup: Interval | None = None
    passes: int | None = None

    def said(self) -> str:
        """Returns what came out, in words: ``takes 33 % less of a pass (30 % to 36 %) …``."""
        gain = self.gain
        low, high = percent(gain.low), percent(gain.high)
        what = "loading and a pass take" if self.kind == WORKERS else "a pass takes"
        sentence = f"{self.change}: {what} {_less(gain.estimate)} ({low} to {high} less)"
        if speedup := self.speedup:
            sentence += (
                f"; speedup {speedup.estimate:.2f} ({speedup.low:.2f} to {speedup.high:.2f})"
            )
        if gain.low <= 0 <= gain.high:
            sentence += "; not told from no change"
        if self.passes is not None:
            sentence += f"; a step is then of {self.passes} passes"
        return sentence


def _less(gain: float) -> str:
    return f"{percent(abs(gain))} {'less' if gain >= 0 else 'more'}"


def tried_changes(case: Case) -> tuple[Tried, ...]:
    """Returns the changes that were tried on a run, the best first; empty where none were."""
    trials = case.run.tables.get(TRIALS)
    if trials is None or trials.empty:
        return ()
    times = per_round(trials, "step_time_ms", "setting")
    changed = trials[~trials["setting"].isin([AS_IT_IS, AS_IT_LOADS])]
    tried = [
        _tried(case, times, change, rows) for change, rows in changed.groupby("setting", sort=False)
    ]
    return tuple(sorted(filter(None, tried), key=lambda trial: -trial.gain.estimate))


def _tried(case: Case, times: pd.DataFrame, change: str, rows: pd.DataFrame) -> Tried | None:
    """Returns what a change brought; None where no round has both it and the script as it is.

    Args:
        case: the run.
        times: the pass of each round (index) and setting (columns).
        change: the setting.
        rows: the trials of this setting.
    """
    kind, passes = str(rows["kind"].iloc[0]), int(rows["passes"].iloc[0])
    base = AS_IT_LOADS if kind == WORKERS else AS_IT_IS
    pairs = times.reindex(columns=[change, base]).dropna()
    if pairs.empty:
        return None
    gain = paired_gain(pairs[change], pairs[base])
    share = _changed_share(case, kind)
    has_speedup = case.speedup_now is not None
    return Tried(
        kind=kind,
        change=str(change),
        gain=gain,
        share=share,
        speedup=gain.map(lambda saved: case.speedup_without(share * saved))
        if has_speedup
        else None,
        passes=passes if passes != case.run.accumulation else None,
    )


def tried_against(verdict: Verdict, tried: Sequence[Tried]) -> Tried | None:
    """Returns the best change that was tried against a cause; None where none was."""
    kinds = TRIED_BY.get(verdict.cause, ())
    return next((trial for trial in tried if trial.kind in kinds), None)


def _changed_share(case: Case, kind: str) -> float:
    """Returns the share of a step that a kind of change shortens as it does a pass.

    That is what its forward and backward passes take, exchange included; see ``CHANGED``.
    """
    columns = CHANGED.get(kind, PASSES)
    changed_ms = sum(case.run.by_step(column) for column in columns)
    step_ms = case.run.slowest_ms
    return min(1.0, float((changed_ms.mean(axis=1) / step_ms).median()))
