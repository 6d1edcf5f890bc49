"""Causes that make a comparison void: samples, configurations, and steps that should not count."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from common.diagnose.causes.ranks import fixed_batches, larger_batch
from common.diagnose.evidence.case import (
    MANY_STEPS,
    MINOR,
    SAME_FACTS,
    VALIDITY,
    Case,
    Verdict,
    confidence,
    differing_facts,
    gain_without,
    looks,
    percent,
    share_at,
)
from common.diagnose.evidence.evidence import (
    FACTS,
    SAMPLES,
    STACKS,
    STEPS,
    NotJudged,
    standard_error,
)
from common.runtime.wording import counted

SHARED_SHARE = 0.01
"""A DistributedSampler repeats at most one sample a rank to make the shares equal; one in a hundred
is more than that on any data set worth timing."""
ALL_SHARED = 0.9
"""Share of samples of several ranks from which the ranks have not divided the data at all."""
HANDED_ON = tuple(
    f"torch.distributed.distributed_c10d.{name}"
    for name in ("scatter", "recv", "irecv", "batch_isend_irecv", "all_to_all")
)
"""Beginnings of the calls by which a rank gets its part of a batch that another one has fetched."""
HANDED_SHARE = 1 / 3
"""Share of the looks at a rank between its fetch and its forward pass that tells of it."""
EARLY_STEP = 2.0
"""A first step of twice the rest: a neighbour on a machine makes steps 1.7 times as long."""
LATE_STEP = 1.2
"""Least ratio of a first step to the largest but one of a later part as long as the early one."""
COUNTED_SHARE = 0.05
"""The mean step is off by a twentieth: more than two runs of one program differ by."""


@dataclass(frozen=True)
class _Samples:
    """Samples of all epochs of a run.

    Attributes:
        epochs: number of epochs.
        processed: samples of all ranks.
        distinct: sum over ranks of each rank's different samples.
        different: different samples of all ranks together.
        shared: sum over ranks of the samples that another rank had, too.
        allowed: samples that ranks may repeat to have equally many in each epoch.
    """

    epochs: int
    processed: float
    distinct: float
    different: float
    shared: float
    allowed: int

    @property
    def shared_share(self) -> float:
        """Returns the share of a rank's samples that were another rank's, too."""
        return max(0.0, self.shared - self.allowed) / max(self.distinct, 1)

    @property
    def repeated_share(self) -> float:
        """Returns the share of the samples that their own rank had processed before."""
        return max(0.0, self.processed - self.distinct - self.allowed) / self.processed

    @property
    def wasted(self) -> float:
        """Returns the share of the samples that were processed for nothing."""
        return 1 - self.different / self.processed


def wrong_sampler(case: Case) -> Verdict | None:
    """Judges whether ranks go through each other's samples, or through the same ones again."""
    table = case.run.need(SAMPLES)
    table = table[table["rank"] < case.ranks]
    case.need_ranks("has no samples to share")
    if _hands_on(case):
        raise NotJudged(f"ranks hand their samples on to each other after each fetch [{STACKS}]")
    if _draws_by_weight(table) and not _same_draws(table):
        raise NotJudged(f"the sampler draws by weights: samples come more than once [{SAMPLES}]")
    epochs = table["epoch"].nunique()
    samples = _Samples(
        epochs=epochs,
        processed=float(table["processed"].sum()),
        distinct=float(table["distinct"].sum()),
        different=float(table.groupby("epoch")["distinct_all_ranks"].first().sum()),
        shared=float(table["shared"].sum()),
        allowed=case.ranks * case.ranks * epochs,  # ranks that each repeat one for every rank
    )
    if samples.processed == 0:
        raise NotJudged(f"{SAMPLES} counts no samples")
    repeats = max(samples.shared_share, samples.repeated_share)
    are_wrong = min(repeats, samples.wasted) > SHARED_SHARE
    return _sampler_verdict(case, samples) if are_wrong else _same_order(case, table)


def _draws_by_weight(table: pd.DataFrame) -> bool:
    """Returns True if a sampler draws by weights, with replacement."""
    return bool(table.get("by_weight", pd.Series([False])).any())


def _same_draws(table: pd.DataFrame) -> bool:
    """Returns True if in each whole epoch all ranks have drawn the same samples, in one order."""
    orders = table.dropna(subset=["order"]).groupby("epoch")["order"].nunique()
    return len(orders) > 0 and orders.max() == 1


def _hands_on(case: Case) -> bool:
    """Returns True if a rank gets its samples from another one, whatever its own loader gives."""
    rows = looks(case, ("data", "copy"))
    return any(share_at(of_rank, HANDED_ON) > HANDED_SHARE for _, of_rank in rows.groupby("rank"))


def _sampler_verdict(case: Case, samples: _Samples) -> Verdict:
    table, wasted = case.run.tables[SAMPLES], samples.wasted
    if samples.shared_share >= ALL_SHARED:
        title = "no distributed sampler: every rank goes through the same samples"
    elif samples.shared_share > SHARED_SHARE:
        title = "wrong sampler: ranks share samples"
    else:
        title = "wrong sampler: a rank takes samples more than once in an epoch"
    evidence = [
        f"In {counted(samples.epochs, 'epoch')} {case.ranks} ranks processed "
        f"{samples.processed:,.0f} samples, of which {samples.different:,.0f} were different ones "
        f"[{SAMPLES}].",
        f"{percent(samples.shared_share)} of a rank's samples were another rank's, too [{SAMPLES}]."
        if samples.shared_share > SHARED_SHARE
        else f"Each rank met {samples.distinct:,.0f} different ones among them [{SAMPLES}].",
    ]
    data_samples = pd.to_numeric(table["data_samples"], errors="coerce").max()
    if np.isfinite(data_samples):
        evidence.append(f"The data set has {data_samples:,.0f} samples [{SAMPLES}].")
    now = case.speedup_now
    per_sample = None if now is None else now * (1 - wasted)
    if now is not None:
        evidence.append(
            f"By different samples the speedup is {per_sample:.2f}, by processed ones {now:.2f}."
        )
    of = "samples are counted, not timed"
    level, reason = confidence(wasted, SHARED_SHARE, error=0.0, of=of)
    if table.get("is_hashed", pd.Series([False])).any():
        level = "medium" if level == "high" else level
        reason += "; told apart by their content, which may be the same in different samples"
    return Verdict(
        cause="wrong-sampler",
        title=title,
        evidence=evidence,
        lost_share=wasted,
        confidence=level,
        reason=reason,
        change=(
            "Give each rank's sampler a generator with a seed of its own: "
            "torch.Generator().manual_seed(seed + rank)."
            if _draws_by_weight(table)
            else "Give the DataLoader DistributedSampler(dataset, num_replicas=world_size, "
            "rank=rank) and no shuffle of its own, and call sampler.set_epoch(epoch)."
        ),
        speedup_now=per_sample,
        gain=gain_without(wasted),
        group=VALIDITY,
    )


def _same_order(case: Case, samples: pd.DataFrame) -> Verdict | None:
    """Judges whether every rank takes its samples in the same order in each epoch."""
    orders = samples.dropna(subset=["order"]).groupby("rank")["order"].agg(["size", "nunique"])
    if pd.to_numeric(samples["data_samples"], errors="coerce").isna().all():
        return None  # endless data have no epochs
    if orders.empty or orders["size"].min() < 2 or orders["nunique"].max() > 1:
        return None
    epochs = int(orders["size"].min())
    return Verdict(
        cause="wrong-sampler",
        title="the sampler's epoch is not set: the same order in every epoch",
        evidence=(
            f"Each rank took its samples in one and the same order in all {epochs} epochs "
            f"[{SAMPLES}].",
        ),
        confidence="high" if epochs > 2 else "medium",
        reason=f"checksums of the order, equal in {epochs} epochs",
        change="Call sampler.set_epoch(epoch) before each epoch.",
        group=MINOR,
    )


def mixed_configurations(case: Case) -> Verdict | None:
    """Judges whether ranks do not run the same, or the baseline is of something else."""
    evidence: list[str] = []
    if FACTS in case.run.tables:
        facts = case.run.tables[FACTS].astype(object).fillna("").astype(str)
        for name in SAME_FACTS:
            if facts[name].nunique() > 1:
                by_rank = ", ".join(
                    f"rank {rank}: {value}"
                    for rank, value in zip(facts["rank"], facts[name], strict=True)
                )
                evidence.append(f"{name} differs between ranks: {by_rank} [{FACTS}].")
    evidence += _ranks_with_other_batches(case)
    title = "ranks do not run the same" if evidence else "the baseline is of something else"
    if case.baseline is not None:
        for name, (theirs, mine) in differing_facts(case.run, case.baseline).items():
            evidence.append(
                f"{name}: {theirs} on one rank {case.baseline.file(FACTS)}, {mine} on "
                f"{case.ranks} [{FACTS}]."
            )
        evidence += _other_batch(case)
    elif FACTS not in case.run.tables:
        raise NotJudged(f"no {FACTS} in {case.run.name}")
    if not evidence:
        return None
    return Verdict(
        cause="mixed-configurations",
        title=title,
        evidence=evidence,
        lost_share=None,
        confidence="high",
        reason="shapes and types are seen, not timed",
        change=(
            "Run all ranks and the baseline with the same model, data, precision and sequence "
            "length, and the same global batch (strong scaling) or batch per rank (weak)."
        ),
        group=VALIDITY,
    )


def _ranks_with_other_batches(case: Case) -> list[str]:
    """Returns a sentence where ranks' batches differ in samples, unless one is slow for that."""
    samples = fixed_batches(case)
    if samples.nunique() <= 1 or larger_batch(case):
        return []
    medians = ", ".join(f"rank {rank}: {value:g}" for rank, value in samples.items())
    return [f"samples of a step differ between ranks: {medians} [{STEPS}]."]


def _other_batch(case: Case) -> list[str]:
    """Returns a sentence where neither a step's samples nor a rank's are the baseline's."""
    mine, theirs = (
        e.measured.groupby("rank")["samples"].median() for e in (case.run, case.baseline)
    )
    if mine.sum() == theirs.sum() or mine.max() == theirs.max():
        return []
    return [
        f"a step takes {mine.sum():g} samples, {mine.max():g} of them on each rank "
        f"[{STEPS}], against {theirs.sum():g} on one rank "
        f"{case.baseline.file(STEPS)}: neither strong nor weak scaling."
    ]


def warm_up_counted(case: Case) -> Verdict | None:
    """Judges whether slow first steps are not marked as warm-up and so count in the mean.

    A watched script's window is chosen by the watch, and speedups rest on medians: no comparison of
    its author's becomes void. A window after a change begins in a script that has long been warm.
    """
    if case.run.watched and case.run.tables[STEPS]["step"].min() > 0:
        return None
    times = case.run.step_times_ms
    if len(times) < MANY_STEPS:
        raise NotJudged(f"{len(times)} measured steps are too few to see a warm-up in")
    values = times.to_numpy()
    second_half = values[len(values) // 2 :]
    steady, error = float(np.median(second_half)), standard_error(second_half)
    limit = max(EARLY_STEP * steady, LATE_STEP * float(np.sort(second_half)[-2]))
    early = 0
    while early < len(values) // 2 and values[early] > limit:
        early += 1
    mean, later = float(values.mean()), float(values[early:].mean())
    off = mean / later - 1
    if not early or off < COUNTED_SHARE:
        return None
    over = float(values[:early].mean()) / steady
    return case.verdict(
        cause="warm-up-counted",
        title=f"{counted(early, 'step')} of warm-up count{'s' * (early == 1)} in the mean",
        evidence=(
            f"The first {counted(early, 'measured step')} took {values[:early].mean():.3g} ms, "
            f"the median of the later half is {steady:.3g} ms [{STEPS}].",
            f"They raise the mean of {len(values)} steps from {later:.3g} to {mean:.3g} ms, by "
            f"{percent(off)} [{STEPS}].",
        ),
        lost=1 - later / mean,
        sure=confidence(
            over, EARLY_STEP, error / steady, len(values), of="a first step over a later one"
        ),
        change=(
            f"Leave out the first {max(5, 2 * early)} steps or more"
            + case.change(
                ": --warmup_steps of benchmark.py, --discard_steps of train_text.py.", "."
            )
        ),
        speedup_now=None if case.speedup_now is None else case.speedup_now * steady / mean,
        gain=mean / steady,
        group=MINOR if case.run.watched else VALIDITY,
    )
