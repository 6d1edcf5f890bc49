"""Causes that lie around the step's computation: loading data, and what lies between steps."""

from __future__ import annotations

import math
import re

import pandas as pd

from common.diagnose.causes.sharing import EXCHANGES, hindered
from common.diagnose.evidence.case import (
    MODULES,
    MOST_LOST,
    Case,
    Verdict,
    confidence,
    in_modules,
    line_of,
    looks,
    most_costly,
    percent,
    places,
    share_at,
)
from common.diagnose.evidence.evidence import EPOCHS, FACTS, STEPS, NotJudged, standard_error
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
EVALUATING, WRITING, LOGGING = "evaluates", "writes a checkpoint", "logs"
CALLING = "calls a model without training it"
AGAIN = "computes its model without gradients in each step"
OTHER_WORK, EXCHANGING = "does other work", "exchanges something"
STARTING = "starts its loader"
LOADING = ("torch.utils.data.", "accelerate.data_loader.")
"""Beginnings of the calls that make a loader's iterator, and its workers."""
NAMED_SHARE = 1 / 3
"""Share of the looks from which what a library's function tells is what a rank does."""
CALLS = {
    EXCHANGING: EXCHANGES,
    WRITING: ("torch.serialization.", "torch.distributed.checkpoint", "safetensors", "pickle."),
    LOGGING: ("tensorboard", "wandb", "mlflow", "logging.", "tqdm"),
    STARTING: LOADING,
}
"""Libraries' functions by what a rank does that calls them; the last that fits counts."""
OF_EPOCHS = (OTHER_WORK, STARTING, CALLING)
"""What a rank may do as an epoch begins; ``epoch_start`` is of it."""
AT_EPOCHS = 0.8
"""Share of the time between steps that is before an epoch's first, where it comes with epochs."""
JUDGES = re.compile("eval|valid|test|metric", re.IGNORECASE)
"""What is in the names of functions that evaluate."""
ELSEWHERE = (EXCHANGING, STARTING)
"""What other causes are of: ``own_exchange`` and ``epoch_start``."""
CHANGES = {
    EVALUATING: (
        "Divide the validation set among all ranks (DistributedSampler, then all_reduce the "
        "counts), or evaluate less often."
    ),
    WRITING: (
        "Write less often, or copy the state and write it from a thread "
        "(torch.distributed.checkpoint.async_save), so that the other ranks go on."
    ),
    LOGGING: "Log every so many steps, without waiting for the disk or the network.",
    AGAIN: (
        "Keep what the first pass gives (with its gradients), or leave it where the method trains "
        "on it."
    ),
    CALLING: (
        "Leave it where the method trains on what it gives, as on the rollouts of a policy; samples"
        " and scores for a log need be made every so many steps only."
    ),
}
OTHER = (
    "Make that code faster, or run it once in many steps; what writes, evaluates or saves need not "
    "keep the next step waiting."
)


def data_loading(case: Case) -> Verdict | None:
    """Judges whether the step waits for its data."""
    data = case.run.by_step("data_time_ms")
    if data.empty:
        raise NotJudged(f"{STEPS} has no data_time_ms")
    data = data - _not_loading_ms(case)
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
    alone = len(by_rank) > 1 and by_rank.min() < by_rank.max() / 2
    whose = f" (rank {slowest}; others less)" if alone else ""
    # One rank alone can be as quick as the others, whose own fetches stay.
    others_ms = float(by_rank.drop(slowest).mean()) if alone else 0.0
    lost = share * (1 - others_ms / float(by_rank[slowest]))
    hindered_ms, hindered_sentence = hindered(case, slowest) if alone else (0.0, "")
    lost -= hindered_ms / float(steps_ms.mean())
    who = f"rank {slowest}" if alone else "the step"
    line = line_of(looks(case, ("data",), slowest if alone else None))
    return case.verdict(
        cause="data-loading",
        title=f"{who} waits for its data{line}",
        evidence=(
            f"Fetching batches takes {by_rank[slowest]:.3g} of {steps_ms.mean():.3g} ms, "
            f"{percent(share)} of the step{whose} [{STEPS}].",
            hindered_sentence,
        ),
        lost=lost,
        sure=confidence(share, DATA_SHARE, error, len(data)),
        change=_load_ahead(case, float(by_rank[slowest]), float(steps_ms.mean())),
    )


def _not_loading_ms(case: Case) -> pd.DataFrame | float:
    """Returns the ms from a fetch to the forward pass in which a script does not prepare its batch.

    It exchanges something, or calls another module, such as the teacher of its model. By step and
    rank: one rank may prepare the batches of all, which wait for their parts.
    """
    rows = looks(case, ("copy",))
    if rows.empty or "fetch_time_ms" not in case.run.measured:
        return 0.0
    copying_ms = case.run.by_step("data_time_ms") - case.run.by_step("fetch_time_ms")
    calls = (*EXCHANGES, MODULES)
    shares = {rank: share_at(rows[rows["rank"] == rank], calls) for rank in copying_ms.columns}
    return copying_ms.clip(lower=0) * pd.Series(shares)


def _load_ahead(case: Case, data_ms: float, step_ms: float) -> str:
    """Returns what to do about data, with the number of workers that would hide the fetching.

    One process prepares a batch in P. Without workers the step waits all of P; with w of them a
    batch comes every P/w, which is then the step's time. Workers hide what the rest of the step
    takes longer than P/w.
    """
    prepare = "prepare (tokenize, decode) the data once instead of in every epoch."
    if not case.run.watched or "loader_workers" not in case.run.rows(FACTS):
        return f"Load ahead of the step: more --workers, --persistent-workers, and {prepare}"
    workers = case.run.loader_workers
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
    return most_costly(_evaluation(case), _between(case))


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
    alone = _is_of_one_rank(by_rank)
    work = {rank: _work_between(case, rank) for rank in by_rank.index}
    busy = [rank for rank, (does, _) in work.items() if does not in ELSEWHERE]
    if not busy:
        return None
    busiest = latest if latest in busy else max(busy, key=by_rank.get)
    does, rows = work[busiest]
    alone |= busiest != latest  # that waits for it
    if does in OF_EPOCHS and begins_epochs(case):
        return None
    who = f"rank {busiest}" if alone else "every rank"
    waiting = " while the others wait" if alone else " between the steps" * (does != AGAIN)
    sure = confidence(share, BETWEEN_SHARE, error, len(shares), of="share of the time")
    if does in (CALLING, AGAIN) and not alone:
        sure = "low", "whether the method trains on what the model gives is not seen"
    return case.verdict(
        cause="needless-recomputation" if does == AGAIN else "evaluation-or-logging",
        title=f"{who} {does}{line_of(rows)}{waiting}",
        evidence=(
            f"From one step of rank {latest} to its next {times['between'].mean():.3g} ms pass, "
            f"and steps take {times['step_time_ms'].mean():.3g} ms: {percent(share)} of the time "
            f"[{STEPS}].",
            f"By rank: {', '.join(f'{rank}: {value:.3g} ms' for rank, value in by_rank.items())} "
            f"[{STEPS}].",
            *places(case, ("between", "evaluation"), rank=busiest),
        ),
        lost=share,
        sure=sure,
        whole_ms=float(times.sum(axis=1).mean()),
        change=CHANGES.get(does, OTHER),
    )


def _is_of_one_rank(by_rank: pd.Series) -> bool:
    """Returns True if one rank alone takes much longer than any other."""
    second_ms = by_rank.drop(by_rank.idxmax()).max()
    return len(by_rank) > 1 and by_rank.max() > ONE_RANK_RATIO * second_ms


def _work_between(case: Case, rank: int) -> tuple[str, pd.DataFrame]:
    """Returns what a rank does between steps, in words, and the looks that found it at that."""
    samples_at = looks(case, ("between", "evaluation"), rank)
    kinds = pd.Series(OTHER_WORK, samples_at.index)
    kinds[in_modules(samples_at)] = CALLING
    for does, names in CALLS.items():
        kinds[samples_at["call"].str.contains("|".join(map(re.escape, names)))] = does
    is_pass = samples_at["phase"] == "evaluation"
    kinds[is_pass] = AGAIN if _in_each_step(case, samples_at[is_pass]) else EVALUATING
    if len(samples_at):
        counts = samples_at.groupby(kinds)["samples"].sum()
        named = counts.drop(OTHER_WORK, errors="ignore")
        is_named = len(named) and named.max() > NAMED_SHARE * counts.sum()
        does = named.idxmax() if is_named else OTHER_WORK
        return does, samples_at[kinds == does] if is_named else samples_at
    of_rank = case.run.measured[case.run.measured["rank"] == rank]
    between, evaluating = (
        pd.to_numeric(of_rank.get(f"{name}_time_ms", pd.Series(dtype=float)), errors="coerce")
        for name in ("between", "evaluation")
    )
    is_most = evaluating.sum() > between.sum() / 2
    return EVALUATING if is_most else "logs, or does other work", samples_at


def _in_each_step(case: Case, passes: pd.DataFrame) -> bool:
    """Returns True if ranks call their model without gradients in each step, and not to judge it.

    Args:
        case: the run.
        passes: looks that found such calls.
    """
    if passes.empty or "evaluation_time_ms" not in case.run.measured:
        return False
    names = passes["place"].astype(str).str.rsplit(" ", n=1).str[-1]
    judges = passes.loc[names.str.contains(JUDGES), "samples"].sum()
    evaluating = case.run.by_step("evaluation_time_ms")
    return bool((evaluating > 0).mean(axis=None) > 0.9 and judges < passes["samples"].sum() / 2)


def begins_epochs(case: Case) -> bool:
    """Returns True if all ranks do most of what lies between steps before an epoch's first."""
    between = case.run.by_step("between_time_ms")
    if between.empty or _is_of_one_rank(between.mean()):
        return False
    before = between.min(axis=1)  # of the rank that waits for no other
    epochs = pd.Series(before.index.get_level_values("epoch"), before.index)
    first = epochs.diff().fillna(0) > 0
    return bool(first.any() and before[first].sum() > AT_EPOCHS * before.sum() > 0)


def share_of_starts(case: Case) -> float:
    """Returns the share of what lies between steps, without passes, that begins an epoch."""
    does = {_work_between(case, rank)[0] for rank in case.run.measured["rank"].unique()}
    if does <= {*OF_EPOCHS} and begins_epochs(case):
        return 1.0
    return share_at(looks(case, ("between", "evaluation")), LOADING)


def _evaluation(case: Case) -> Verdict | None:
    epochs = case.run.rows(EPOCHS)
    if epochs.empty:
        return None
    evaluation = slowest_rank(epochs, "evaluation_time_s", by=["epoch"])
    epoch = slowest_rank(epochs, "epoch_time_s", by=["epoch"])
    share = float(evaluation.sum() / epoch.sum())
    if share < EVALUATION_SHARE:
        return None
    by_rank = epochs.groupby("rank")["evaluation_time_s"].sum()
    alone = _is_of_one_rank(by_rank)
    error = standard_error(evaluation / epoch)
    return case.verdict(
        cause="evaluation-or-logging",
        title=f"rank {by_rank.idxmax()} evaluates while the others wait"
        if alone
        else "evaluation takes much of the epoch",
        evidence=(
            f"Evaluation takes {evaluation.mean():.3g} of {epoch.mean():.3g} s of an epoch, "
            f"{percent(share)} [{EPOCHS}].",
        ),
        lost=share,
        # An epoch has many steps, and one epoch has no error.
        sure=confidence(
            share,
            EVALUATION_SHARE,
            error if len(epoch) > 1 else math.nan,
            of="share of the epoch",
        ),
        whole_ms=case.run.step_ms / (1 - min(share, MOST_LOST)),
        change=CHANGES[EVALUATING],
    )
