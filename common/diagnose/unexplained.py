"""What N ranks take longer than one would, and no measurement and no cause accounts for.

A step on N ranks may be longer than one rank's for reasons that are measured: ranks wait, nothing
hides the exchange, and passes hinder each other. Some causes lengthen passes beyond that. What is
left speaks against the baseline, or for a cause that is not known.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from common.diagnose.causes.sharing import compute_share, together_error, together_times
from common.diagnose.evidence.case import NORMAL_90, VALIDITY, Case, Verdict, percent
from common.diagnose.evidence.evidence import EXCHANGING, NotJudged
from common.diagnose.evidence.measured_step import shares_cores, watched_exchanges

BASELINE_ERROR = 0.13
"""Standard error of one rank's speed as predicted from its passes, as a share of it: the root mean
square of ln(predicted over achieved speedup) of eight changes (the remedies in data/RESULTS.md)."""
MOST_UNEXPLAINED = 0.10
"""Share of the step. With more of it unexplained, that no cause was found does not mean *healthy*.
"""
WITHIN_PASSES = (
    "needless-search",
    "garbage-collection",
    "recompilation",
    "allocator-retries",
    "growing-memory",
    "synchronised-norms",
    "host-waits",
    "unpinned-copies",
)
"""Causes whose time is within a step's passes, and not in those that are measured apart."""


@dataclass(frozen=True)
class Unexplained:
    """Shares of a step; the interval holds 90 %.

    Attributes:
        lost: time that one rank would not take for its part of the samples.
        exchanging: time in which ranks wait or communicate.
        hindered: time that passes are longer beside those of other ranks, and beside an exchange.
        caused: time of causes that lie within the passes.
        share: remainder, and ``low``, ``high`` its interval.
    """

    lost: float
    exchanging: float
    hindered: float
    caused: float
    share: float
    low: float
    high: float

    @property
    def is_large(self) -> bool:
        """Returns True for more than may be left, beyond the interval."""
        return self.low > MOST_UNEXPLAINED

    def said(self) -> str:
        """Returns the shares as sentences."""
        parts = [f"waiting and communication take {percent(self.exchanging)}"]
        if self.hindered:
            parts.append(f"passes that hinder each other {percent(self.hindered)}")
        if self.caused:
            parts.append(f"causes within the passes {percent(self.caused)}")
        return (
            f"Not explained: {percent(self.share)} of the step ({percent(self.low)} to "
            f"{percent(self.high)}). One rank would not take {percent(self.lost)} of it for as "
            f"many samples; of these, {', '.join(parts)}."
        )


def unexplained(case: Case, verdicts: Sequence[Verdict]) -> Unexplained | None:
    """Computes what is left of the time that scaling costs.

    Returns:
        None where it is not known: one rank, no baseline, one of other batches, a comparison that
        a verdict makes void, or no step in parts.
    """
    now, is_void = case.speedup_now, any(verdict.group == VALIDITY for verdict in verdicts)
    if case.ranks == 1 or now is None or is_void or not _takes_as_many(case):
        return None
    try:
        parts, computing = case.run.parts, compute_share(case)
        hindered, error = _hindered(case, computing)
    except NotJudged:
        return None
    efficiency = now / case.ranks
    exchanging = (parts.parts_ms["waiting"] + parts.parts_ms["communication"]) / parts.step_ms
    caused = sum(v.lost_share or 0.0 for v in verdicts if v.cause in WITHIN_PASSES)
    share = 1 - efficiency - exchanging - hindered - caused
    of_baseline = case.baseline.noise if case.is_measured else BASELINE_ERROR
    half = NORMAL_90 * math.hypot(efficiency * math.hypot(case.run.noise, of_baseline), error)
    return Unexplained(
        lost=1 - efficiency,
        exchanging=exchanging,
        hindered=hindered,
        caused=caused,
        share=share,
        low=share - half,
        high=min(share + half, 1 - efficiency),
    )


def _takes_as_many(case: Case) -> bool:
    """Returns True if a rank of the run takes as many samples a step as the baseline's does.

    A pass over fewer takes longer for each: that is no loss of the exchange.
    """
    if not case.is_measured:
        return True
    per_rank = [run.samples_per_step / run.world_size for run in (case.run, case.baseline)]
    return math.isclose(*per_rank, rel_tol=0.01)


def _hindered(case: Case, computing: float) -> tuple[float, float]:
    """Computes the share of the step by which passes are longer than alone, and its error."""
    times = together_times(case)
    if times is None:
        return 0.0, 0.0
    together_ms, alone_ms = (float(series.groupby("rank").median().mean()) for series in times)
    exchanging, beside = case.run.rows(EXCHANGING), 0.0
    if len(exchanging):
        passes_ms = exchanging["forward_time_ms"] + exchanging["backward_time_ms"]
        sending_ms = float(passes_ms.groupby(exchanging["rank"]).median().mean())
        exchanges = watched_exchanges(case.run, case.run.gradient_bytes)
        share = exchanges / case.run.accumulation
        together_ms += share * max(0.0, sending_ms - together_ms)
    elif shares_cores(case.run):
        # Beside computation, an all-reduce takes at most its own time from it.
        beside = (case.run.parts.hidden_communication_ms or 0.0) / case.run.parts.step_ms
    ratio = max(1.0, together_ms / alone_ms)
    return computing * (1 - 1 / ratio) + beside, computing / ratio**2 * together_error(case)
