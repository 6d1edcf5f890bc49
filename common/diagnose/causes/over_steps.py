"""Causes that no single step shows: what comes once an epoch, and memory that grows or differs."""

from __future__ import annotations

import numpy as np
import pandas as pd

from common.analysis.step_parts import STEP, flags
from common.diagnose.causes.between_steps import LOADING
from common.diagnose.causes.script import steps_with
from common.diagnose.evidence.case import (
    MINOR,
    Case,
    Verdict,
    confidence,
    line_of,
    looks,
    percent,
    share_at,
)
from common.diagnose.evidence.evidence import FACTS, SAMPLES, STEPS
from common.runtime.wording import size_text
from common.samples import slowest_rank

LEAST_SHARE = 0.05
"""Share of the training's time; a first batch that comes late in an epoch of an hour is below it.
"""
GROWTH_SHARE = 0.02
"""Memory that grows by a fiftieth over the window, as much in its second half as in its first, is
no allocator settling."""
SURELY_GROWN = 0.10
"""Less may be one that settles slowly, as where workers hand over batches in shared memory."""
STEADY = 0.5
"""Growth of the slower half of the window over that of the faster one."""
GROWN_BYTES = 2**23
"""Growth over the window of which a training of hours need not be afraid."""
MORE, MORE_BYTES = 0.25, 2**27
"""A rank holds more than the others by a quarter and 128 MiB: more than caches differ."""
RESERVED, RESERVED_BYTES = 1.5, 2**30
"""An allocator that has half as much again in reserve, and more than 1 GiB, lies in pieces."""
HELD = {"allocated_bytes": "GPU memory", "resident_bytes": "resident memory"}


def epoch_start(case: Case) -> Verdict | None:
    """Judges whether epochs begin with a long step: a loader that starts, a cache that is filled.

    By means: what comes once an epoch is in no median.
    """
    steps = steps_with(case, "fetch_time_ms")
    loading = share_at(looks(case, ("between", "evaluation")), LOADING)
    steps = steps.assign(
        starting=steps["data_time_ms"].fillna(0)
        + loading * (steps["between_time_ms"] - steps["evaluation_time_ms"]).clip(lower=0).fillna(0)
    )
    by_step = slowest_rank(steps, ["starting", "step_time_ms"], by=STEP)
    epochs = by_step.index.get_level_values("epoch")
    first = pd.Series(epochs, by_step.index).diff().fillna(0) > 0
    if not first.any() or first.all():
        return None
    period = _steps_of_epoch(case, first)
    late_ms = by_step["starting"] - by_step.loc[~first, "starting"].median()
    longer_ms = late_ms[first].clip(lower=0)
    usual_ms = float(by_step.loc[~first, "step_time_ms"].median())
    an_epoch_ms = period * usual_ms + float(longer_ms.mean())
    share = float(longer_ms.mean()) / an_epoch_ms
    if share < LEAST_SHARE:
        return None
    error = float(longer_ms.std(ddof=1)) / len(longer_ms) ** 0.5 / an_epoch_ms
    sure = confidence(share, LEAST_SHARE, error, of="share of the time")
    if len(longer_ms) == 1:
        sure = "medium", "share of the time: the window held the beginning of one epoch only"
    facts, workers = case.run.need(FACTS), case.run.loader_workers
    kept = "persistent_workers" not in facts or flags(facts["persistent_workers"]).all()
    anew = workers > 0 and not kept
    what = "its loader's workers start anew, and " if anew else ""
    return case.verdict(
        cause="epoch-start",
        title=f"every {period:.0f} steps an epoch begins: {what}its first batch comes "
        f"{longer_ms.mean():.3g} ms later" + line_of(looks(case, ("data",))),
        evidence=(
            f"{len(longer_ms)} of {len(by_step)} steps are an epoch's first. Its batch takes "
            f"{by_step.loc[first, 'starting'].mean():.3g} ms, that of the others "
            f"{by_step.loc[~first, 'starting'].median():.3g} ms [{STEPS}].",
            f"With {period:.0f} steps of {usual_ms:.3g} ms in an epoch that is {percent(share)} of "
            f"the time [{STEPS}].",
        ),
        lost=share,
        sure=sure,
        whole_ms=an_epoch_ms / period,
        change=(
            f"DataLoader(..., num_workers={workers:.0f}, persistent_workers=True): workers then "
            "keep what they have opened."
            if anew
            else "Keep from epoch to epoch what the first batch needs (opened files, a cache, an "
            "iterator), or make it ready before the epoch ends; DataLoader(..., num_workers=1, "
            "persistent_workers=True) does so beside the steps."
        ),
    )


def _steps_of_epoch(case: Case, first: pd.Series) -> float:
    """Returns the steps of an epoch: between two that begin one, or as the samples say."""
    at = [index for index, is_first in enumerate(first) if is_first]
    if len(at) > 1:
        return (at[-1] - at[0]) / (len(at) - 1)
    longest = max(at[0], len(first) - at[0])
    size = pd.to_numeric(case.run.need(FACTS)["data_samples"], errors="coerce").max()
    if SAMPLES not in case.run.tables or not size > 0:
        return float(longest)
    return float(max(size / case.run.samples_per_step, longest))


def growing_memory(case: Case) -> Verdict | None:
    """Judges whether memory grows from step to step: something is kept."""
    steps, growths = steps_with(case, "resident_bytes"), []
    for column in HELD:
        for rank, rows in steps.groupby("rank"):
            values = rows.sort_values("step")[column].to_numpy(dtype=float)
            half = len(values) // 2
            if half < 5 or values[0] <= 0:
                continue
            ends = [np.median(part) for part in np.array_split(values, 4)]
            halves = sorted((ends[1] - ends[0], ends[3] - ends[2]))
            grown = values[-1] - values[0]
            rises = float((np.diff(values) > 0).mean())
            is_large = grown > max(GROWTH_SHARE * values[0], GROWN_BYTES)
            if is_large and rises > STEADY and halves[0] > STEADY * halves[1] > 0:
                growths.append((column, int(rank), grown / len(values), values))
    if not growths:
        return None
    column, rank, growth, values = max(growths, key=lambda growth: growth[2])
    return _of_memory(
        "growing-memory",
        f"rank {rank}'s memory grows with every step",
        f"Rank {rank}'s {HELD[column]} grew from {size_text(values[0])} to "
        f"{size_text(values[-1])} in {len(values)} steps, {size_text(growth)} a step [{STEPS}].",
        "it grows in more than half of the steps, and in both halves of the window alike",
        "Look for a list or a log that each step adds to: keep loss.item() or loss.detach(), not "
        "the loss with its graph, and of outputs the last ones.",
        level="medium" if values[-1] - values[0] > SURELY_GROWN * values[0] else "low",
    )


def unequal_memory(case: Case) -> Verdict | None:
    """Judges whether one rank holds much more memory than the others."""
    if case.ranks < 2:
        return None
    steps = steps_with(case, "resident_bytes")
    for column, what in HELD.items():
        by_rank = steps.groupby("rank")[column].median()
        rank, usual = int(by_rank.idxmax()), by_rank.drop(by_rank.idxmax()).median()
        more = by_rank[rank] - usual
        if usual > 0 and more > max(MORE * usual, MORE_BYTES):
            return _of_memory(
                "memory-imbalance",
                f"rank {rank} holds {size_text(more)} more memory than the others",
                f"Its {what} is {size_text(by_rank[rank])}, the others' {size_text(usual)} "
                f"[{STEPS}].",
                "it is seen; it costs time only once that rank's memory is short",
                f"Look at what rank {rank} alone keeps (a copy of the data set, gathered outputs, "
                "averaged weights): it bounds the batch of all ranks. On GPUs: "
                "torch.load(..., map_location='cpu') and torch.cuda.set_device(LOCAL_RANK) first.",
            )
    return None


def reserved_memory(case: Case) -> Verdict | None:
    """Judges whether the allocator of a GPU holds much more than tensors have ever used."""
    steps = steps_with(case, "resident_bytes", "reserved_bytes")
    most = steps.groupby("rank")[["reserved_bytes", "allocated_bytes"]].max()
    over = most["reserved_bytes"] - most["allocated_bytes"]
    rank = int(over.idxmax())
    reserved, used = most.loc[rank]
    if not (used > 0 and reserved > RESERVED * used and over[rank] > RESERVED_BYTES):
        return None
    return _of_memory(
        "reserved-memory",
        f"rank {rank}'s allocator holds {size_text(over[rank])} that no tensor uses",
        f"It has reserved {size_text(reserved)}; tensors have {size_text(used)} between steps "
        f"[{STEPS}].",
        "seen between steps: within passes more is in use; from documented signals, not judged on "
        "a GPU by this project",
        "PYTORCH_ALLOC_CONF=expandable_segments:True, or batches of fewer shapes.",
        level="low",
    )


def _of_memory(
    cause: str, title: str, sentence: str, reason: str, change: str, level: str = "medium"
) -> Verdict:
    return Verdict(
        cause=cause,
        title=title,
        evidence=(sentence,),
        confidence=level,
        reason=reason,
        change=change,
        group=MINOR,
    )
