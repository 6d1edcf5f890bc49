"""Predicts what a step's passes take among ranks that are equally fast.

While one rank is late, the others wait, and their cores are free to send and to let it compute.
Once it is as quick as they are, nobody waits: passes and their exchange then hinder each other. A
watch measures that outside of steps, by passes that send their gradients (``exchanging.py``).
"""

from __future__ import annotations

from common.analysis.step_parts import flags
from common.diagnose.causes.sharing import together_times
from common.diagnose.evidence.case import Case
from common.diagnose.evidence.evidence import (
    EXCHANGING,
    FACTS,
    PROBES,
    NotJudged,
)
from common.diagnose.evidence.measured_step import watched_exchanges
from common.samples import slowest_rank

KEYS = ["repeat", "iteration"]
PARTS = ["forward_time_ms", "backward_time_ms", "exchange_time_ms"]


def hindered_ms(case: Case, rank: int, longer_ms: float = 0.0) -> float:
    """Computes how much longer passes will be, once no rank is late, than those of ``rank`` now.

    Args:
        case: the run.
        rank: rank that the others wait for.
        longer_ms: time that its passes take longer than the others' in a step, and will not then.

    Returns:
        ms of a step, at least 0: nobody computes faster because nobody waits. 0 also where passes
        that send their gradients were not measured.
    """
    then_ms = passes_ms(case, rank)
    return 0.0 if then_ms is None else max(0.0, then_ms - (_now_ms(case, rank) - longer_ms))


def passes_ms(case: Case, rank: int) -> float | None:
    """Computes what the passes of a step would take if ``rank`` were as fast as the others.

    Forward passes then take what the others' take in a step now. What follows them takes what it
    took in the measured passes, less what the passes of ``rank`` take longer even alone.

    Returns:
        ms with all exchanges; None where passes that send their gradients were not measured.
    """
    measured, times = case.run.tables.get(EXCHANGING), together_times(case)
    if measured is None or measured.empty or times is None:
        return None
    alone = times[1].groupby("rank").median()
    if rank not in alone.index or len(alone) < 2:
        return None
    longer_ms = max(0.0, float(alone[rank] - alone.drop(rank).mean()))
    # A pass ends with its slowest rank, which is now one and now another.
    whole_ms = slowest_rank(measured.assign(whole=measured[PARTS].sum(axis=1)), "whole", by=KEYS)
    other_ranks = measured[measured["rank"] != rank]
    probed_ms = float(other_ranks.groupby("rank")[PARTS[0]].median().mean())
    sending_ms = float(whole_ms.median()) - longer_ms - probed_ms
    [facts] = case.run.need(FACTS)
    exchanges = watched_exchanges(case.run, float(facts["gradient_bytes"].max()))
    forward_ms = float(case.run.by_step(PARTS[0]).median().drop(rank).mean())
    silent = case.run.accumulation - exchanges
    silent_ms = silent * _silent_backward_ms(case, rank) if silent else 0.0
    return forward_ms + exchanges * sending_ms + silent_ms


def hindered_said(case: Case, rank: int, longer_ms: float = 0.0) -> list[str]:
    """Returns a sentence with ``hindered_ms``; none where that is 0."""
    if not (more_ms := hindered_ms(case, rank, longer_ms)):
        return []
    return [
        f"Once no rank is late, passes and their exchange take {passes_ms(case, rank):.3g} ms of a "
        f"step, {more_ms:.3g} ms more than if ranks did not hinder each other "
        f"{case.file(EXCHANGING)}."
    ]


def _now_ms(case: Case, rank: int) -> float:
    passes_ms = case.run.by_step("forward_time_ms") + case.run.by_step("whole_backward_time_ms")
    return float(passes_ms[rank].median())


def _silent_backward_ms(case: Case, rank: int) -> float:
    """Returns the ms of a backward pass of all ranks at once that sends nothing."""
    [probes] = case.run.need(PROBES)
    passes = probes[
        flags(probes["together"]) & (probes["batch_per_rank"] == case.run.batch_per_rank)
    ]
    if passes.empty:
        raise NotJudged(f"{PROBES} has no passes of the script's own batch")
    return float(passes[passes["rank"] != rank].groupby("rank")["backward_time_ms"].median().mean())
