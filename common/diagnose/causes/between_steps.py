"""Causes that lie around the step's computation: loading data, and what lies between steps."""

from __future__ import annotations

import math

import pandas as pd

from common.diagnose.causes.sharing import hindered_ms, hindered_sentences
from common.diagnose.evidence.case import Case, Verdict, confidence, percent, places
from common.diagnose.evidence.evidence import (
    EPOCHS,
    FACTS,
    STEPS,
    NotJudged,
    standard_error,
)
from common.samples import slowest_rank

DATA_SHARE = 0.10
"""Loaders that keep up leave a fetch from a queue, below 2 % of any step; a tenth is five times
that and already as much as the exchange of a run that scales well."""
BETWEEN_SHARE = 0.10
"""Counting a step and writing its row takes 0.1 to 0.3 ms; a tenth of the time is more than any
step worth distributing leaves to that."""
EVALUATION_SHARE = 0.25
"""Evaluating as many samples as a tenth of those trained on takes a thirtieth of the time; where a
quarter goes to it, it is too often, too much, or on one rank while the others wait."""
ONE_RANK_RATIO = 2.0
"""An evaluation that all ranks share takes all of them equally long."""


def data_loading(case: Case) -> Verdict | None:
    """Judges whether the step waits for its data."""
    data = case.run.by_step("data_time_ms")
    if data.empty:
        raise NotJudged(f"{STEPS} has no data_time_ms")
    # Worker processes start in an epoch's first step, which is little of an epoch of many steps.
    first = data.groupby(level=["round", "epoch"]).cumcount() == 0
    data = data[~first] if (~first).any() else data
    steps_ms = case.run.slowest_ms.loc[data.index]
    # Means: a loader that runs dry only now and then costs just as much.
    by_rank = data.mean()
    slowest = int(by_rank.idxmax())
    share = float(data[slowest].sum() / steps_ms.sum())
    if share < DATA_SHARE:
        return None
    error = float((data[slowest] / steps_ms).sem())
    level, reason = confidence(share, DATA_SHARE, error, len(data))
    alone = len(by_rank) > 1 and by_rank.min() < by_rank.max() / 2
    whose = f" (rank {slowest}; others less)" if alone else ""
    # One rank alone can be as quick as the others, whose own fetches stay.
    others_ms = float(by_rank.drop(slowest).mean()) if alone else 0.0
    lost = share * (1 - others_ms / float(by_rank[slowest]))
    if alone:
        lost -= hindered_ms(case, slowest) / float(steps_ms.mean())
    lost = min(max(lost, 0.0), 0.99)
    return Verdict(
        cause="data-loading",
        title=f"rank {slowest} waits for its data" if alone else "the step waits for its data",
        evidence=(
            f"Fetching batches takes {by_rank[slowest]:.3g} of {steps_ms.mean():.3g} ms, "
            f"{percent(share)} of the step{whose} {case.file(STEPS)}.",
            *(hindered_sentences(case, slowest) if alone else ()),
        ),
        lost_share=lost,
        confidence=level,
        reason=f"share of the step: {reason}",
        change=_load_ahead(case, float(by_rank[slowest]), float(steps_ms.mean())),
        speedup_now=case.speedup_now,
        predicted_speedup=case.speedup_without(lost),
    )


def _load_ahead(case: Case, data_ms: float, step_ms: float) -> str:
    """Returns what to do about data, with the number of workers that would hide the fetching.

    One process prepares a batch in P. Without workers the step waits all of P; with w of them a
    batch comes every P/w, which is then the step's time. Workers hide what the rest of the step
    takes longer than P/w.
    """
    prepare = "prepare (tokenize, decode) the data once instead of in every epoch."
    facts = case.run.tables.get(FACTS)
    if not case.run.watched or facts is None or "loader_workers" not in facts:
        return f"Load ahead of the step: more --workers, --persistent-workers, and {prepare}"
    workers = pd.to_numeric(facts["loader_workers"], errors="coerce").max()
    if not workers >= 0:
        return f"Load ahead of the step: DataLoader(..., num_workers=...), and {prepare}"
    prepared_ms = data_ms if workers == 0 else workers * step_ms
    needed = max(int(workers) + 1, math.ceil(prepared_ms / max(step_ms - data_ms, 1e-3)))
    return (
        f"DataLoader(..., num_workers={needed}, persistent_workers=True) on each rank (now "
        f"{workers:.0f}), where there are cores for them; and {prepare}"
    )


def evaluation_or_logging(case: Case) -> Verdict | None:
    """Judges the time between steps, and whether epochs end with a long evaluation."""
    verdicts = [verdict for verdict in (_evaluation(case), _between(case)) if verdict]
    return min(verdicts, key=lambda verdict: verdict.order) if verdicts else None


def _between(case: Case) -> Verdict | None:
    measured = case.run.measured.assign(
        between=pd.to_numeric(case.run.measured["between_time_ms"], errors="coerce")
    )
    rows = measured.dropna(subset=["between"])
    if rows.empty:
        return None
    # Of one rank, as the others' steps hold their waiting for it.
    by_rank = rows.groupby("rank")["between"].mean()
    latest = int(by_rank.idxmax())
    times = rows[rows["rank"] == latest][["between", "step_time_ms"]]
    shares = times["between"] / times.sum(axis=1)
    share = float(times["between"].sum() / times.sum().sum())
    if share < BETWEEN_SHARE:
        return None
    error = max(standard_error(shares), float(shares.sem()))
    level, reason = confidence(share, BETWEEN_SHARE, error, len(shares))
    speedup = case.speedup_now
    if speedup is not None:  # that of the steps alone, and of their median
        speedup *= case.run.step_ms / float(times.sum(axis=1).mean())
    return Verdict(
        cause="evaluation-or-logging",
        title="logging (or other work) between the steps",
        evidence=(
            f"Between two steps of rank {latest} lie {times['between'].mean():.3g} ms, beside "
            f"steps of {times['step_time_ms'].mean():.3g} ms: {percent(share)} of the time "
            f"{case.file(STEPS)}.",
            f"By rank: {', '.join(f'{rank}: {value:.3g} ms' for rank, value in by_rank.items())} "
            f"{case.file(STEPS)}.",
            *places(case, ("between", "evaluation"), rank=latest),
        ),
        lost_share=min(share, 0.99),
        confidence=level,
        reason=f"share of the time: {reason}",
        change=(
            "Log every so many steps instead of after each, without waiting for the disk, and "
            "keep checkpoints and evaluations out of the loop of steps."
        ),
        speedup_now=speedup,
        predicted_speedup=None if speedup is None else speedup / (1 - min(share, 0.99)),
    )


def _evaluation(case: Case) -> Verdict | None:
    epochs = case.run.tables.get(EPOCHS)
    if epochs is None or epochs.empty:
        return None
    evaluation = slowest_rank(epochs, "evaluation_time_s", by=["epoch"])
    epoch = slowest_rank(epochs, "epoch_time_s", by=["epoch"])
    share = float(evaluation.sum() / epoch.sum())
    if share < EVALUATION_SHARE:
        return None
    by_rank = epochs.groupby("rank")["evaluation_time_s"].sum()
    alone = (
        len(by_rank) > 1 and by_rank.max() > ONE_RANK_RATIO * by_rank.drop(by_rank.idxmax()).max()
    )
    shares = evaluation / epoch
    level, reason = confidence(share, EVALUATION_SHARE, standard_error(shares))
    who = f" It is rank {by_rank.idxmax()} that does it, while the others wait." if alone else ""
    return Verdict(
        cause="evaluation-or-logging",
        title="evaluation takes much of the epoch",
        evidence=(
            f"Evaluation takes {evaluation.mean():.3g} of {epoch.mean():.3g} s of an epoch, "
            f"{percent(share)} {case.file(EPOCHS)}.{who}",
        ),
        lost_share=share,
        confidence=level,
        reason=f"share of the epoch: {reason}",
        change=(
            "Divide the validation set among all ranks, evaluate every few epochs, or on fewer "
            "samples."
        ),
        speedup_now=None if case.speedup_now is None else case.speedup_now * (1 - share),
        predicted_speedup=case.speedup_now,
    )
