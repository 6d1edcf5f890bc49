"""Causes that are judged from traces of torch.profiler.

Under FSDP there are no buckets, and a model that was compiled in place calls no hook. The watch
then records a few steps with torch.profiler, which are judged here where the steps as they were do
not suffice (``by_profile``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import pandas as pd

from common.diagnose.causes.communication import EXPOSED_SHARE, LIMITS, NEEDLESS, SKIPPED
from common.diagnose.causes.needless_work import share_of_scatters
from common.diagnose.causes.ranks import Slowest
from common.diagnose.evidence.case import MOST_LOST, Case, Verdict, confidence, percent
from common.diagnose.evidence.evidence import (
    FACTS,
    LEAN_PASSES,
    STEPS,
    TRACE_OPERATIONS,
    TRACE_STEPS,
    NotJudged,
    standard_error,
)
from common.diagnose.evidence.left_behind import LeftBehind
from common.runtime.wording import counted
from common.traces.step_overlap import GATHER, SCATTER

IDLE_SHARE = 0.2
"""With a fifth of the step idle, no kernel can make it more than a fifth faster."""


def keeps_waiting(rank: int, look_at: str, **fields: object) -> Verdict:
    """Returns the verdict on a rank that the others wait for, whatever shows it."""
    title, change = f"rank {rank} keeps the others waiting", f"Look at: {look_at}"
    return Verdict(cause="slow-rank", title=title, change=change, **fields)


def exposed(share: float, **fields: object) -> Verdict | None:
    """Returns the verdict on communication that nothing hides; None for a small share of a step."""
    if share < EXPOSED_SHARE:
        return None
    return Verdict(
        cause="exposed-communication",
        title="communication that nothing hides takes much of a step",
        lost_share=share,
        **fields,
    )


def idle(share: float, sentence: str, level: str, reason: str) -> Verdict | None:
    """Returns the verdict on a GPU that waits for its host; None for a small share of a step."""
    if share < IDLE_SHARE:
        return None
    return Verdict(
        cause="idle-device",
        title="the GPU waits for its host",
        evidence=(sentence,),
        lost_share=share,
        confidence=level,
        reason=f"{reason}; the profiler itself slows the host",
        change="Look for a slow loader, .item() and other waits for the device, and many small "
        "kernels (torch.compile, larger batches).",
    )


def slow_rank(job: LeftBehind) -> Verdict | None:
    """Judges whether one rank keeps the others waiting, step after step.

    What a rank does by itself is its step less its exposed communication, which holds the wait for
    others; so the rank that keeps the others waiting is the one that communicates least.
    """
    alone_ms = job.by_step("step_ms") - job.by_step("exposed_communication_ms")
    if alone_ms.shape[1] < 2:
        raise NotJudged("a trace of one rank has no other to be slower than")
    slow = Slowest.of(alone_ms)
    if not slow.is_slow:
        return None
    step_ms = float(job.slowest_ms.median())
    over = {}
    for name, column in (("computation", "computation_ms"), ("idle", "idle_ms")):
        medians = job.by_step(column).median()
        over[name] = float(medians[slow.rank] - medians.drop(slow.rank).median())
    part = max(over, key=over.get)
    level, reason = slow.sure
    return keeps_waiting(
        slow.rank,
        "the device (clocks, temperature, other jobs), or more work for this rank."
        if part == "computation"
        else "its loader, its Python between launches, logging or checkpoints on this rank alone.",
        evidence=(
            f"Rank {slow.rank} takes {slow.times.median():.3g} ms of a step for itself, the others "
            f"{slow.other_times.median():.3g} ms: {slow.ratio:.2f} times as long, and the longest "
            f"in {percent(slow.often)} of {len(slow.ratios)} steps.",
            f"It is {part}: {over[part]:.3g} ms more than the others'.",
        ),
        lost_share=min(MOST_LOST, float((slow.times - slow.other_times).median()) / step_ms),
        confidence=level,
        reason=reason,
    )


def exposed_communication(job: LeftBehind) -> Verdict | None:
    """Judges whether communication that nothing hides takes much of a step.

    The rank that comes last waits for nobody: the shortest exposed communication of a step is what
    the exchange itself takes.
    """
    exposed_ms = job.by_step("exposed_communication_ms")
    shares = exposed_ms.min(axis=1) / job.slowest_ms
    share = float(shares.median())
    communication_ms = job.by_step("communication_ms").min(axis=1).median()
    if exposed_ms.shape[1] < 2 and not share:
        raise NotJudged("a trace of one rank that exchanges nothing")
    level, reason = confidence(share, EXPOSED_SHARE, standard_error(shares), len(shares))
    operations = _operations(job, rank=int(exposed_ms.median().idxmin()))
    return exposed(
        share,
        evidence=(
            f"Collectives take {communication_ms:.3g} ms of a step on the rank that communicates "
            f"least, {exposed_ms.min(axis=1).median():.3g} ms of it while nothing is computed: "
            f"{percent(share)} of the step.",
            _operations_sentence(operations),
        ),
        confidence=level,
        reason=reason,
        change=_less_exposed(operations),
    )


def needless_synchronisation(job: LeftBehind, case: Case) -> Verdict | None:
    """Judges whether FSDP exchanges gradients after each micro-batch instead of once a step.

    Each module under FSDP scatters its gradients once in an exchange.
    """
    facts, micro = case.run.need(FACTS), float(case.run.measured["micro_batches"].median())
    # An earlier watch did not count them.
    modules = int(facts["sharded_modules"].max()) if "sharded_modules" in facts else 0
    exposed_ms = job.by_step("exposed_communication_ms")
    operations = _operations(job, rank=int(exposed_ms.median().idxmin()))
    if not modules or SCATTER not in operations.index:
        raise NotJudged("no module under FSDP, or none that scatters its gradients")
    if micro <= 1:
        return None
    scatters = operations.loc[SCATTER]
    exchanges = float(scatters["calls"]) / modules
    if not exchanges > SKIPPED:
        return None
    exposed = float(scatters["exposed_ms"] / job.slowest_ms.median())
    timed = share_of_scatters(case)
    lost = (exposed if timed is None else timed) * (1 - 1 / exchanges)
    return case.verdict(
        cause=NEEDLESS,
        title="gradients are exchanged after every micro-batch",
        evidence=(
            f"A step of {micro:g} micro-batches scatters gradients {scatters['calls']:g} times, "
            f"for {counted(modules, 'module')} under FSDP: {exchanges:.1f} exchanges where one is "
            f"enough [{STEPS}] [{FACTS}] [{TRACE_OPERATIONS}].",
            f"Scatters that nothing hides take {scatters['exposed_ms']:.3g} of "
            f"{job.slowest_ms.median():.3g} ms [{TRACE_OPERATIONS}] [{TRACE_STEPS}].",
            ""
            if timed is None
            else f"Passes without scatters, timed in turns with passes as they are, save "
            f"{percent(timed)} of the step [{LEAN_PASSES}].",
        ),
        lost=lost,
        sure=("high", "calls are counted, not timed"),
        change=(
            "Call model.set_requires_gradient_sync(False) before all micro-batches but the last "
            "(FullyShardedDataParallel: inside model.no_sync()); a rank holds all gradients "
            "meanwhile."
        ),
    )


def profiled_step(job: LeftBehind) -> str:
    """Returns where a step's time goes in the traces, as a sentence without its full stop."""
    step_ms = job.slowest_ms.median()
    parts = {
        "computation": "computation_ms",
        "exposed communication": "exposed_communication_ms",
        "idle": "idle_ms",
    }
    shares = ", ".join(
        f"{name} {percent(job.by_step(column).mean(axis=1).median() / step_ms)}"
        for name, column in parts.items()
    )
    return f"A step of {step_ms:.3g} ms under the profiler: {shares}"


def _operations(job: LeftBehind, rank: int) -> pd.DataFrame:
    """Returns the median step's communication by operation on one rank, the most exposed first.

    Columns: calls, communication_ms, exposed_ms. A step without an operation has none of it.
    """
    operations = job.operations[job.operations["rank"] == rank]
    steps = job.steps.loc[job.steps["rank"] == rank, "step"]
    columns = ["calls", "communication_ms", "exposed_ms"]
    medians = {
        name: rows.set_index("step")[columns].reindex(steps).fillna(0).median()
        for name, rows in operations.groupby("operation")
    }
    return pd.DataFrame(medians, index=columns).T.sort_values("exposed_ms", ascending=False)


def _operations_sentence(operations: pd.DataFrame) -> str:
    parts = [
        f"{counted(row['calls'], name)} {row['communication_ms']:.3g}"
        f" ms ({row['exposed_ms']:.3g} exposed)"
        for name, row in operations.iterrows()
    ]
    return f"In a step there: {', '.join(parts)}." if parts else ""


def _less_exposed(operations: pd.DataFrame) -> str:
    """Returns what hides or shortens the exchange: of shards where gradients are scattered."""
    if SCATTER not in operations.index:
        return (
            "More work for each exchange (accumulation inside no_sync(), a larger batch), fewer "
            "bytes (bf16 gradients), or a faster network; ddplab diagnose --verify on the script "
            "says what each would gain."
        )
    if operations.index[0] == GATHER:
        return (
            "Gather earlier or less: fully_shard() on each block, so that one is gathered while "
            "the one before computes; reshard_after_forward=False, which keeps the parameters and "
            "gathers once a step; MixedPrecisionPolicy(param_dtype=torch.bfloat16), which halves "
            "the bytes; DDP, where the model fits; or a larger batch."
        )
    return (
        "Scatter less: accumulation with set_requires_gradient_sync(False) on all but the last "
        "micro-batch; MixedPrecisionPolicy(reduce_dtype=torch.bfloat16), which halves the bytes; "
        "or a larger batch."
    )


def idle_device(job: LeftBehind) -> Verdict | None:
    """Judges whether a GPU waits for its host for much of a step."""
    idle_ms = job.by_step("idle_ms")
    if not job.on_device:
        raise NotJudged("on a CPU, idle time holds Python and the profiler itself")
    shares = idle_ms.min(axis=1) / job.slowest_ms
    share = float(shares.median())
    sentence = (
        f"On every rank the device neither computes nor communicates for at least "
        f"{percent(share)} of a step."
    )
    sure = confidence(share, IDLE_SHARE, standard_error(shares), len(shares))
    return idle(share, sentence, *sure)


def profiled(case: Case) -> LeftBehind | None:
    """Returns the steps that were profiled; None where none were."""
    steps = case.run.rows(TRACE_STEPS)
    return None if steps.empty else LeftBehind(steps, case.run.rows(TRACE_OPERATIONS))


BY_PROFILE = {"slow-rank": slow_rank, ", ".join(LIMITS): exposed_communication}
"""Causes that a profile tells of, by their names in a diagnosis of steps as they were."""


def by_profile(
    case: Case, not_judged: Sequence[tuple[str, str]]
) -> tuple[list[Verdict], list[tuple[str, str]]]:
    """Judges by the profile what could not be judged by the steps as they were.

    Args:
        case: the run.
        not_judged: (cause, why) for the steps as they were.

    Returns:
        verdicts, and what is still not judged.
    """
    profile = profiled(case)
    if profile is None:
        return [], list(not_judged)
    judges = BY_PROFILE | {NEEDLESS: partial(needless_synchronisation, case=case)}
    verdicts, still = [], []
    for cause, why in not_judged:
        if cause not in judges:
            still.append((cause, why))
            continue
        try:
            verdicts.append(judges[cause](profile))
        except NotJudged:
            still.append((cause, why))
    if profile.on_device:
        verdicts.append(idle_device(profile))
    return [_with_file(verdict) for verdict in verdicts if verdict], still


def _with_file(verdict: Verdict) -> Verdict:
    """Returns a verdict on traces that names the table of theirs in a bundle's run directory."""
    first, *further = verdict.evidence
    return replace(verdict, evidence=(f"{first.removesuffix('.')} [{TRACE_STEPS}].", *further))
