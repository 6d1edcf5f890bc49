"""Causes that lie in the ranks: unequal speed, or unequal work."""

from __future__ import annotations

from dataclasses import dataclass

import pandas as pd

from common.diagnose.causes.settings import clock_sentences
from common.diagnose.causes.sharing import PASSES, hindered, own_pass_ms, together_times
from common.diagnose.evidence.case import (
    Case,
    Verdict,
    confidence,
    line_of,
    looks,
    percent,
)
from common.diagnose.evidence.evidence import PROBES, STEPS, NotJudged, standard_error

SLOW_RATIO = 1.15
"""Ranks on one machine differ by up to a tenth for no reason that anyone could remove."""
SLOWEST_OFTEN = 0.8
"""Share of the steps in which a slow rank is the slowest; of two equal ones each is in half."""
SLOW_SHARE = 0.03
"""Share of the step that a rank as quick as the others must save: where ranks hinder each other,
all of them may be as slow once nobody waits."""
MAIN_PART = 0.75
"""Three quarters of what a rank takes longer are in one pass: a slow device slows both alike."""
FIXED_BATCHES = 0.8
"""From this share of equal steps on, a rank's batches are of a fixed number of samples."""
UPDATE_SHARE = 0.05
"""An update of one rank that is longer than the others' by a twentieth of the step."""


@dataclass(frozen=True)
class Slowest:
    """The rank with the largest median, against the others.

    Attributes:
        times, other_times: times of that rank, and the others' median time, by step.
        often: share of the steps in which it takes longest.
    """

    rank: int
    times: pd.Series
    other_times: pd.Series
    often: float

    @classmethod
    def of(cls, by_step: pd.DataFrame) -> Slowest:
        """Finds it in a table with a row per step and a column per rank."""
        rank = int(by_step.median().idxmax())
        other_times = by_step.drop(columns=rank).median(axis=1)
        often = float((by_step.idxmax(axis=1) == rank).mean())
        return cls(rank, by_step[rank], other_times, often)

    @property
    def ratios(self) -> pd.Series:
        """Returns its time over the others', by step."""
        return self.times / self.other_times

    @property
    def ratio(self) -> float:
        """Returns the median of ``ratios``."""
        return float(self.ratios.median())

    @property
    def is_slow(self) -> bool:
        """Returns True if it takes longer by ``SLOW_RATIO``, in most steps; False if unknown."""
        return self.ratio >= SLOW_RATIO and self.often >= SLOWEST_OFTEN

    @property
    def sure(self) -> tuple[str, str]:
        """Returns how sure it is that the rank is slow, and why."""
        error = standard_error(self.ratios)
        of = "its time over the others'"
        return confidence(self.ratio, SLOW_RATIO, error, len(self.ratios), of)


def fixed_batches(case: Case) -> pd.Series:
    """Returns the samples of a step by rank; no rows where they are of no fixed number.

    Medians, since the last step of an epoch may be short. Where batches are made by other rules
    than their number, such as a budget of tokens, they differ from step to step on each rank.
    """
    by_rank = case.run.measured.groupby("rank")["samples"]
    samples = by_rank.median()
    equal_steps = by_rank.agg(lambda counts: (counts == counts.median()).mean()).min()
    return samples if equal_steps >= FIXED_BATCHES else samples.iloc[:0]


def larger_batch(case: Case) -> Verdict | None:
    """Judges whether one rank of a script computes longer than the others for more samples.

    Ranks of this project's benchmarks are compared with a baseline and must have equal batches
    (*mixed configurations*). What is lost is what the rank takes beyond the ranks' mean: with the
    same samples in equal batches, each rank would take that mean.
    """
    batches = fixed_batches(case)
    if batches.empty:  # as of graphs, whose samples differ from step to step
        batches = case.run.measured.groupby("rank")["samples"].mean()
        if batches.max() < SLOW_RATIO * batches.drop(batches.idxmax()).mean():
            return None
    if not case.run.watched or batches.nunique() <= 1:
        return None
    try:
        compute, _ = compute_and_tokens(case)
    except NotJudged:  # as ``slow_rank`` says
        return None
    slow = Slowest.of(compute)
    per_sample = Slowest.of(compute / case.run.by_step("samples").loc[compute.index])
    if not slow.is_slow or slow.rank != batches.idxmax():
        return None
    if per_sample.is_slow and per_sample.rank == slow.rank:  # by itself, too
        return None
    medians = compute.median()
    slow_ms, others_ms = float(medians[slow.rank]), float(medians.drop(slow.rank).mean())
    samples, fewer = batches[slow.rank], batches.drop(slow.rank).mean()
    return case.verdict(
        cause="slow-rank",
        title=f"rank {slow.rank} has {samples:.4g} samples in each step, the others {fewer:.4g}",
        evidence=(
            f"Rank {slow.rank} computes {slow_ms:.3g} ms a step, the others {others_ms:.3g} ms, "
            f"and it is the slowest in {percent(slow.often)} of {len(slow.ratios)} steps "
            f"[{STEPS}].",
            "The average of the gradients gives each rank the same weight, and so a sample of "
            f"rank {slow.rank} less than another one.",
        ),
        lost=(slow_ms - float(medians.mean())) / float(case.run.slowest_ms.median()),
        sure=slow.sure,
        change="Give each rank as many samples of a step: look for where its batch is made larger.",
    )


def slow_rank(case: Case) -> Verdict | None:
    """Judges whether one rank computes longer than the others, step after step."""
    case.need_ranks("has no other to be slower than")
    compute, tokens = compute_and_tokens(case)
    slow = Slowest.of(compute / tokens)
    if not slow.is_slow:
        return None
    medians = compute.median()
    slow_ms, others_ms = float(medians[slow.rank]), float(medians.drop(slow.rank).mean())
    if slow.ratio * (1 - _passing_ms(case) / slow_ms) < SLOW_RATIO:
        return None
    # Of all steps that are seen. Watching buckets makes steps longer, but not the difference of two
    # ranks' passes: in a script most steps are plain.
    step_ms = float(case.run.slowest_ms.median())
    longer_ms = slow_ms - others_ms
    if longer_ms <= 0:  # it has less to compute
        return None
    hindered_ms, hindered_sentence = hindered(case, slow.rank, longer_ms)
    elsewhere_ms, elsewhere_sentence = _longer_elsewhere(case, slow.rank, step_ms)
    lost = max(0.0, longer_ms - hindered_ms - elsewhere_ms) / step_ms
    if (hindered_ms or elsewhere_ms) and lost < SLOW_SHARE:
        return None
    title, sentence = _slow_part(case, slow.rank)
    waits_ms = case.run.by_step("waiting_time_ms").median()
    for name in PASSES:  # in an exchange of the script's own
        waits_ms += (case.run.by_step(f"{name}_time_ms") - own_pass_ms(case, name)).median()
    waited = waits_ms.drop(slow.rank).mean()
    return case.verdict(
        cause="slow-rank",
        title=title,
        evidence=(
            f"Rank {slow.rank} computes {slow_ms:.3g} ms a step, the others "
            f"{others_ms:.3g} ms: {slow.ratio:.2f} times as long for the same work, and it is the "
            f"slowest in {percent(slow.often)} of {len(slow.ratios)} steps [{STEPS}].",
            sentence,
            f"The others wait {waited:.3g} ms of each step [{STEPS}].",
            _slow_by_itself(case, slow.rank),
            *clock_sentences(case, slow.rank),
            hindered_sentence,
            elsewhere_sentence,
        ),
        lost=lost,
        sure=slow.sure,
        change=(
            f"Look for what else runs where rank {slow.rank} does (other jobs, clocks, "
            "temperature, extra work in its program), or replace that device; until then give it "
            "less work (assignment 3: --mode dynamic with a calibrated cost)."
        ),
    )


def _passing_ms(case: Case) -> float:
    """Returns the ms by which a script's watched steps are longer than its plain ones.

    They are few and follow each other. What slows a rank in them alone is no slow rank: another
    program has passed by. A benchmark's steps of both kinds take turns.
    """
    parts = case.run.parts
    if not case.run.watched or not parts.plain_step_ms:
        return 0.0
    return max(0.0, parts.step_ms - parts.plain_step_ms)


def _longer_elsewhere(case: Case, slowest: int, step_ms: float) -> tuple[float, str]:
    """Returns the ms by which another rank's update takes longer, and a sentence with them.

    From one exchange to the next a rank updates and computes, and a script's step waits for the
    longest sum of both: a slow pass beside a slow update of another rank costs the difference.
    A benchmark's ranks meet between the two, so that each of them costs all of its time.
    """
    update_ms = case.run.by_step("optimizer_time_ms").median().dropna()
    if not case.run.watched or slowest not in update_ms or len(update_ms) < 2:
        return 0.0, ""
    other = int(update_ms.drop(slowest).idxmax())
    over_ms = float(update_ms[other] - update_ms[slowest])
    if over_ms < UPDATE_SHARE * step_ms:
        return 0.0, ""
    return over_ms, (
        f"Meanwhile rank {other} takes {over_ms:.3g} ms longer to update than rank {slowest}, "
        f"which would stay [{STEPS}]."
    )


def _slow_part(case: Case, slowest: int) -> tuple[str, str]:
    """Returns what of the slowest rank is slow, and a sentence on that pass.

    With the line that it is found at more often than the others.
    """
    over = {}
    for name in PASSES:
        medians = own_pass_ms(case, name).median()
        over[name] = (medians[slowest], float(medians.drop(slowest).mean()))
    excess = {name: slow_ms - others_ms for name, (slow_ms, others_ms) in over.items()}
    name = max(excess, key=excess.get)
    if sum(excess.values()) <= 0 or excess[name] < MAIN_PART * sum(excess.values()):
        return f"rank {slowest} is slow in both passes", ""
    slow_ms, others_ms = over[name]
    rows = looks(case, (name,))
    by_place = rows.pivot_table("samples", "place", "rank", "sum", fill_value=0)
    line = ""
    if slowest in by_place:
        more = by_place[slowest] - by_place.drop(columns=slowest).mean(axis=1).fillna(0)
        if more.max() > MAIN_PART * more.clip(lower=0).sum():
            line = line_of(rows[rows["place"] == more.idxmax()])
    return f"rank {slowest}'s {name} pass is slow{line}", (
        f"It is its {name} pass: {slow_ms:.3g} ms, the others' {others_ms:.3g} ms [{STEPS}]."
    )


def _slow_by_itself(case: Case, slowest: int) -> str:
    """Returns a sentence on whether the rank is as slow in passes without any exchange."""
    times = together_times(case)
    if times is None:
        return ""
    by_rank = times[1].groupby("rank").median().dropna()
    if slowest not in by_rank.index or len(by_rank) < 2:
        return ""
    ratio = by_rank[slowest] / by_rank.drop(slowest).mean()
    where = (
        "in the device or in what they compute"
        if ratio > SLOW_RATIO
        else "in what its training does besides"
    )
    return (
        f"Alone, its passes take {ratio:.2f} times as long as the others': the cause lies {where} "
        f"[{PROBES}]."
    )


def slow_update(case: Case) -> Verdict | None:
    """Judges whether one rank takes longer to update, while the others wait in the next exchange.

    What lies between the end of the backward pass and the end of the update counts, too: clipping,
    or what a script does on one rank before it steps.
    """
    case.need_ranks("has no other to be slower than")
    slow = Slowest.of(case.run.by_step("optimizer_time_ms"))
    over_ms = slow.times - slow.other_times
    shares = over_ms / case.run.slowest_ms
    share = float(shares.median())
    if share < UPDATE_SHARE or float((over_ms > 0).mean()) < SLOWEST_OFTEN:
        return None
    step_ms = float(case.run.slowest_ms.median())
    hindered_ms, hindered_sentence = hindered(case, slow.rank)
    line = line_of(looks(case, ("optimizer",), slow.rank))
    return case.verdict(
        cause="slow-update",
        title=f"rank {slow.rank}'s update is slow{line}",
        evidence=(
            f"From the end of its backward pass to the end of its update rank {slow.rank} takes "
            f"{slow.times.median():.3g} ms, the others {slow.other_times.median():.3g} ms "
            f"[{STEPS}].",
            hindered_sentence,
        ),
        lost=share - hindered_ms / step_ms,
        sure=confidence(share, UPDATE_SHARE, standard_error(shares), len(shares)),
        change=(
            f"Look at what rank {slow.rank} alone does beside its update (averages of the weights, "
            "norms, logging), and share it among the ranks or do it every so many steps."
        ),
    )


def compute_and_tokens(case: Case) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Returns forward and backward pass in ms, and padded tokens, by step and rank.

    Samples stand for tokens where nothing is padded. Steps of which they are not known on all ranks
    are left out.

    Raises:
        NotJudged: they are known of no step.
    """
    forward_ms, backward_ms = (own_pass_ms(case, name) for name in PASSES)
    compute = (forward_ms + backward_ms).dropna()
    if compute.empty:
        raise NotJudged(f"{STEPS} has no step of all ranks with both passes")
    counted = counted_tokens(case, compute.index)
    return compute.loc[counted.index], counted


def counted_tokens(case: Case, steps: pd.Index) -> pd.DataFrame:
    """Returns the padded tokens of some steps, or their samples, by step and rank."""
    tokens = case.run.by_step("padded_tokens")
    if tokens.empty or (tokens <= 0).any(axis=None):
        tokens = case.run.by_step("samples")
    counted = tokens.loc[steps]
    counted = counted[(counted > 0).all(axis=1)]
    if counted.empty:
        raise NotJudged(f"{STEPS} does not count the samples of a step")
    return counted
