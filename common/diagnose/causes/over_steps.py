"""Causes that many steps show: unequal batches, what comes once an epoch, and what grows."""

from __future__ import annotations

import numpy as np
import pandas as pd

from common.analysis.step_parts import STEP, flags
from common.diagnose.causes.between_steps import share_of_starts
from common.diagnose.causes.ranks import compute_and_tokens, counted_tokens
from common.diagnose.causes.script import steps_with
from common.diagnose.causes.sharing import EXCHANGES, PASSES
from common.diagnose.evidence.case import (
    MINOR,
    SURE,
    Case,
    Verdict,
    confidence,
    line_of,
    looks,
    percent,
    share_at,
)
from common.diagnose.evidence.evidence import ELEMENTS, FACTS, SAMPLES, STEPS, standard_error
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
UNEQUAL_SHARE = 0.05
"""Threshold of the share of a step that the longest rank's padded tokens cost beyond the mean's."""
LENGTHS_SLOPE = 0.3
"""Computing time grows at least so much with the padded tokens: a third of it is not fixed."""
BLOCKS, LEAST_OF_BLOCK = 6, 4
"""Blocks of the window through which growth is fitted, and the least steps of one."""
GROWS = 8.0
"""Standard errors of the growth: of six medians chance gives so many once in 1,500 phases."""
PHASES = {
    "data": "data_time_ms",
    "forward": "forward_time_ms",
    "backward": "whole_backward_time_ms",
    "optimizer": "optimizer_time_ms",
    "between": "between_time_ms",
}
"""Phases that may grow, as looks call them, and their columns."""
KEEP_LESS = (
    "Look for a list or a log that each step adds to: keep loss.item() or loss.detach(), not "
    "the loss with its graph, and of outputs the last ones."
)
HELD = {"allocated_bytes": "GPU memory", "resident_bytes": "resident memory"}


def unequal_lengths(case: Case) -> Verdict | None:
    """Judges whether ranks take turns as stragglers, with the longest texts of a step.

    Batches without texts are judged by their elements, such as those of images of several sizes.
    """
    case.need_ranks("has nobody to wait for")
    step_ms = case.run.slowest_ms
    # Ranks wait for each other within passes, and none is as long as its own work.
    meet = case.run.sharded or share_at(looks(case, PASSES), EXCHANGES) > LEAST_SHARE
    if meet:
        compute = case.run.by_step("step_time_ms")
        tokens = counted_tokens(case, compute.index)
    else:
        compute, tokens = compute_and_tokens(case)
    what, longest, unit = "texts of unequal length", "longest", "tokens"
    if ELEMENTS in case.run.measured and (tokens.nunique(axis=1) == 1).all():
        tokens = case.run.by_step(ELEMENTS).reindex(compute.index)
        what, longest, unit = "batches of unequal size", "largest", "elements"
    uneven = tokens.max(axis=1) / tokens.mean(axis=1) - 1
    if not uneven.mean() >= UNEQUAL_SHARE / 2:
        return None
    slope, error = _slope_of_steps(step_ms, tokens) if meet else _slope(compute, tokens)
    if slope < LENGTHS_SLOPE or slope < SURE * error:
        return None
    over = min(slope, 1.0) * uneven * compute.mean(axis=1) / step_ms
    if meet:  # small batches take little of a mean step
        over *= tokens.mean(axis=1) / tokens.mean(axis=None)
    lost = float(over.mean())
    if lost < UNEQUAL_SHARE:
        return None
    totals = tokens.sum()
    return case.verdict(
        cause="unequal-lengths",
        title=f"{what}: ranks wait for the {longest} of each step",
        evidence=(
            f"The rank with the most {unit} in a step, padding included, has "
            f"{percent(float(uneven.mean()))} more than the ranks' mean; over all steps no rank is "
            f"more than {percent(float(totals.max() / totals.mean() - 1))} above it [{STEPS}].",
            f"A rank with twice the mean's {unit} computes {1 + slope:.2f} ± {error:.2f} times as "
            f"long as the mean; what the rank with the most has beyond the mean takes "
            f"{percent(lost)} of the step [{STEPS}].",
        ),
        lost=lost,
        sure=confidence(lost, UNEQUAL_SHARE, standard_error(over), len(over)),
        change=(
            "Divide each global batch by what samples cost instead of by their number, or let all "
            "ranks draw the same sizes (a seed that all share): assignment 3, "
            + case.change("train_ddp.py --mode dynamic.", "common.scheduling.partition.")
        ),
    )


def _slope(compute: pd.DataFrame, tokens: pd.DataFrame) -> tuple[float, float]:
    """Fits how computing time follows tokens, both over the mean of the step's ranks.

    Returns the slope, which is 1 where time is proportional to tokens, and its standard error.
    Least squares within ranks: each rank's own level is taken out, as a rank that is always slower
    is another cause. Shares are clipped at their 5th and 95th percentiles, so that hiccups do not
    decide.
    """
    shares = compute.div(compute.mean(axis=1), axis=0)
    shares = shares.clip(*np.quantile(shares, [0.05, 0.95]))
    longest = tokens.div(tokens.mean(axis=1), axis=0)
    y, x = ((table - table.mean()).to_numpy().ravel() for table in (shares, longest))
    if not (x @ x) > 0:
        return 0.0, float("inf")
    slope = float(x @ y / (x @ x))
    # The shares of R ranks in a step have a mean of 1, so R − 1 of them are free.
    free = max(1.0, len(x) * (1 - 1 / compute.shape[1]) - 1)
    return slope, float(np.sqrt(((y - slope * x) ** 2).sum() / free / (x @ x)))


def _slope_of_steps(steps_ms: pd.Series, sizes: pd.DataFrame) -> tuple[float, float]:
    """Fits how steps follow the largest batch of their ranks, both over their means.

    Returns the slope and its standard error, as ``_slope`` does, by least squares over steps.
    """
    largest, step_ms = sizes.max(axis=1), steps_ms.reindex(sizes.index)
    x, y = largest / sizes.mean(axis=None) - 1, step_ms / step_ms.mean()
    x, y = x - x.mean(), y - y.mean()
    if not (x @ x) > 0:
        return 0.0, float("inf")
    slope = float(x @ y / (x @ x))
    return slope, float(np.sqrt(((y - slope * x) ** 2).sum() / max(1, len(x) - 2) / (x @ x)))


def epoch_start(case: Case) -> Verdict | None:
    """Judges whether epochs begin with a long step: a loader that starts, a cache that is filled.

    By means: what comes once an epoch is in no median.
    """
    steps = steps_with(case, "fetch_time_ms")
    starting = share_of_starts(case)
    steps = steps.assign(
        starting=steps["data_time_ms"].fillna(0)
        + starting
        * (steps["between_time_ms"] - steps["evaluation_time_ms"]).clip(lower=0).fillna(0)
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
    title = f"every {period:.0f} steps an epoch begins: {what}its first batch comes "
    title += f"{longer_ms.mean():.3g} ms later" + line_of(looks(case, ("data",)))
    before = looks(case, ("between",))
    if starting == 1.0 and not anew and len(before):
        title = f"every {period:.0f} steps an epoch begins, with {longer_ms.mean():.3g} ms of other"
        title += f" work{line_of(before)}"
    return case.verdict(
        cause="epoch-start",
        title=title,
        evidence=(
            f"{len(longer_ms)} of {len(by_step)} steps are an epoch's first. What comes before its "
            f"pass takes {by_step.loc[first, 'starting'].mean():.3g} ms, before that of the others "
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
            "iterator), make it anew in some epochs only, or make it ready before the epoch ends; "
            "DataLoader(..., num_workers=1, persistent_workers=True) does so beside the steps."
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
    """Judges whether memory grows from step to step, or the time of a phase: something is kept."""
    return _growing_time(case) or _growing_memory(case)


def _growing_time(case: Case) -> Verdict | None:
    """Judges whether a phase takes longer with every step, on every rank.

    Least squares through the medians of ``BLOCKS`` blocks of the window. A machine that slows down
    makes all phases longer: what counts is what one grows beyond the others, as shares.
    """
    columns = {phase: column for phase, column in PHASES.items() if column in case.run.measured}
    growth: dict[str, tuple[float, float, float]] = {}
    for phase, column in columns.items():
        times = case.run.by_step(column).min(axis=1)  # of the rank that waits for no other
        if len(times) < LEAST_OF_BLOCK * BLOCKS:
            return None
        parts = np.array_split(np.arange(len(times)), BLOCKS)
        middles = np.array([part.mean() for part in parts])
        away = middles - middles.mean()
        medians = np.array([float(times.iloc[part].median()) for part in parts])
        mean_ms = float(medians.mean())
        slope = float(away @ medians / (away @ away))
        residuals = medians - mean_ms - slope * away
        error = float(np.sqrt(residuals @ residuals / (BLOCKS - 2) / (away @ away)))
        if mean_ms > 0:
            growth[phase] = slope, error, mean_ms
    if len(growth) < 2:
        return None
    phase = max(growth, key=lambda name: growth[name][0])
    slope, error, mean_ms = growth.pop(phase)
    usual = float(np.median([slope / mean_ms for slope, _, mean_ms in growth.values()]))
    slope -= max(0.0, usual) * mean_ms
    number = case.run.by_step(columns[phase]).index.get_level_values("step").to_numpy()
    lost = slope * float(number.mean()) / float(case.run.slowest_ms.mean())
    if lost < LEAST_SHARE or slope < GROWS * error:
        return None
    return case.verdict(
        cause="growing-memory",
        title=(
            f"every rank's {phase} phase takes {slope:.2g} ms longer with each step"
            f"{line_of(looks(case, (phase,)))}: something grows"
        ),
        evidence=(
            f"It takes {mean_ms:.3g} ms in the mean of steps {number.min()} to {number.max()}, and "
            f"grew by {slope:.2g} ± {error:.1g} ms a step [{STEPS}].",
        ),
        lost=lost,
        sure=("medium", "the growth is sure; that it began with the run's first step is assumed"),
        change=KEEP_LESS,
    )


def _growing_memory(case: Case) -> Verdict | None:
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
        KEEP_LESS,
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
