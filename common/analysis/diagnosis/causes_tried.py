"""Causes that only a trial has shown: a change gained, and no cause was found that it would mend.

The model that other causes rest on does not know everything: how threads of one rank hinder each
other, or how many small all-reduces go through a backend. A trial (``ddplab diagnose --verify``)
measures the change itself.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import pandas as pd

from common.analysis.diagnosis.causes import Case, Verdict, percent
from common.analysis.diagnosis.evidence import PLACEMENT, TRIALS
from common.analysis.diagnosis.tried import Tried, pass_share

LEAST_GAIN = 0.05
"""Of a step, at the lower end of the interval. Some ten changes are tried, so that now and then one
of them gains a little by chance."""
LEAST_ROUNDS = 6
"""Of fewer the interval is not a 95 % one."""
TITLES = {
    "bucket-cap": "the bucket cap does not fit",
    "needless-search": "DDP looks for unused parameters, and there are none",
    "needless-synchronisation": "gradients are exchanged after every micro-batch",
    "oversubscribed-cores": "threads or ranks share cores",
    "too-few-threads": "a rank computes with fewer threads than it has cores",
    "wide-gradients": "gradients travel in 32 bits where 16 would do",
}


def shown_by_trials(case: Case, tried: Sequence[Tried], found: Collection[str]) -> list[Verdict]:
    """Returns a verdict for each cause that a trial has shown and nothing else has.

    Args:
        case: the run.
        tried: changes, the best first.
        found: causes that were found already.
    """
    verdicts: dict[str, Verdict] = {}
    for each in tried:
        cause = _cause(case, each)
        if cause and cause not in found and cause not in verdicts and _gains(case, each):
            verdicts[cause] = _verdict(case, each, cause, len(tried))
    return list(verdicts.values())


def _cause(case: Case, tried: Tried) -> str:
    """Returns the cause that a change mends; empty where it mends none, or changes the batch."""
    if tried.kind == "threads":
        return "oversubscribed-cores" if _more_threads_than_cores(case) else "too-few-threads"
    if tried.passes is not None:
        return ""
    return {
        "bucket_cap_mb": "bucket-cap",
        "find_unused_parameters": "needless-search",
        "compression": "wide-gradients",
        "no_sync": "needless-synchronisation",
        "affinity": "oversubscribed-cores",
    }.get(tried.kind, "")


def _more_threads_than_cores(case: Case) -> bool:
    placement = case.run.tables.get(PLACEMENT)
    if placement is None or "threads" not in placement:
        return False
    threads, cores = (
        pd.to_numeric(placement[name], errors="coerce") for name in ("threads", "cores")
    )
    return bool((threads > cores).any())


def _gains(case: Case, tried: Tried) -> bool:
    rounds = case.run.tables[TRIALS]["round"].nunique()
    return rounds >= LEAST_ROUNDS and tried.gain.low * pass_share(case) > LEAST_GAIN


def _verdict(case: Case, tried: Tried, cause: str, changes: int) -> Verdict:
    gain = tried.gain
    return Verdict(
        cause=cause,
        title=TITLES[cause],
        evidence=(
            f"With {tried.change} a pass takes {percent(gain.estimate)} less "
            f"({percent(gain.low)} to {percent(gain.high)}) {case.file(TRIALS)}.",
        ),
        lost_share=gain.estimate * pass_share(case),
        confidence="medium",
        reason=(
            f"tried in {case.run.tables[TRIALS]['round'].nunique()} rounds, one of {changes} "
            "changes; no other table shows the cause"
        ),
        change=tried.change,
        speedup_now=case.speedup_now,
        predicted_speedup=tried.speedup,
        speedup_low=tried.speedup_low,
        speedup_high=tried.speedup_high,
    )
