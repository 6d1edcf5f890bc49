"""Causes in a script and its batches: what a watch sees, and no benchmark of this project does.

They need tables that only ``ddplab diagnose`` makes, and are not judged without.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pandas as pd

from common.analysis.step_parts import flags
from common.diagnose.causes.sharing import compute_share
from common.diagnose.evidence.case import (
    MINOR,
    VALIDITY,
    Case,
    Verdict,
    confidence,
    percent,
    places,
)
from common.diagnose.evidence.evidence import (
    FACTS,
    PROBES,
    READY_TIMES,
    STALLS,
    STEP,
    STEPS,
    NotJudged,
    standard_error,
)
from common.diagnose.evidence.measured_step import pass_times
from common.perfmodel.scaling.step_model import predict
from common.runtime.wording import size_text
from common.samples import slowest_rank

COLLECTING_SHARE = 0.02
"""Garbage collection of a loop that keeps no cycles takes less than a thousandth."""
COMPILED_STEPS = 2
"""Recompilations after the warm-up: one may be of a last, smaller batch."""
NARROW_GAIN = 0.08
"""Least predicted gain, as for a bucket cap: a smaller one may be none."""
BELOW_NOISE = 3.0
"""A gain must be so many standard errors of the step."""
PADDING_SHARE = 0.10
"""Share of the step that computing padding must take. Texts sorted by length still have some."""


def hang(case: Case) -> Verdict | None:
    """Judges whether a step never ended: which rank kept the others waiting, and in which call."""
    stalls = case.run.rows(STALLS)
    lasting = stalls[~stalls["resumed"].astype(bool)]
    if lasting.empty:
        return None
    waits = lasting["stack"].map(_waits_for_others)
    behind = lasting[~waits] if waits.any() and not waits.all() else lasting.iloc[:0]
    sentences = []
    for _, row in lasting.sort_values("rank").iterrows():
        lines = str(row["stack"]).splitlines()
        sentences.append(
            f"Rank {row['rank']} is in its {row['phase']} phase after step {row['step']}, for "
            f"{row['seconds']:.0f} s when it was looked at: {lines[0] if lines else 'no stack'} "
            f"[{STALLS}]."
        )
    who = ", ".join(map(str, behind["rank"]))
    return Verdict(
        cause="hang",
        title=f"rank {who} does not go on, and the others wait for it"
        if who
        else "no rank goes on",
        evidence=tuple(sentences),
        lost_share=1.0,
        confidence="high" if who else "medium",
        reason="stacks are seen, not timed",
        change=(
            "Look at that line of the rank that does not wait in an exchange. Every rank must call "
            "the same collectives in the same order."
        ),
        group=VALIDITY,
    )


def _waits_for_others(stack: str) -> bool:
    """Returns True if the innermost lines of a stack are in an exchange."""
    near = stack.splitlines()[:4]
    words = ("distributed_c10d.py", "torch/autograd/", "barrier", "all_reduce", "all_gather")
    return any(word in line for line in near for word in words)


def needless_search(case: Case) -> Verdict | None:
    """Judges whether DDP looks for unused parameters where there are none."""
    facts = case.run.need(FACTS)
    if "find_unused_parameters" not in facts:
        raise NotJudged("the model is not under DDP")
    searching = facts["find_unused_parameters"].astype(str).str.lower().eq("true")
    if not searching.any():
        return None
    if not case.run.opened.has(READY_TIMES):
        raise NotJudged(f"no {READY_TIMES}: it is not known whether all parameters are used")
    ready = case.run.opened.table(READY_TIMES)
    used = ready.groupby("rank")["size_bytes"].sum() / ready["iteration"].nunique()
    if used.min() < case.run.gradient_bytes * 0.999:
        return None  # some parameter had no gradient: the search is needed
    return Verdict(
        cause="needless-search",
        title="DDP looks for unused parameters, and there are none",
        evidence=(
            f"find_unused_parameters is set [{FACTS}]; all {size_text(used.min())} of "
            f"parameters had a gradient [{READY_TIMES}].",
        ),
        confidence="low",
        reason="it is seen, and what it costs is not: only a trial (--verify) tells",
        change="DistributedDataParallel(model, find_unused_parameters=False)",
        group=MINOR,
    )


def collecting(case: Case) -> Verdict | None:
    """Judges whether Python's garbage collector stops the steps."""
    # Ranks that collect for a shorter time, or not at all, wait for the one that does so longest.
    # A script may collect between its steps, so what lies there counts as well.
    steps = steps_with(case, "collecting_time_ms")
    between_ms = pd.to_numeric(steps["between_time_ms"], errors="coerce").fillna(0.0)
    steps = steps.assign(whole_ms=steps["step_time_ms"] + between_ms)
    longest_ms, whole_ms = (
        slowest_rank(steps, column, by=STEP) for column in ("collecting_time_ms", "whole_ms")
    )
    share = float(longest_ms.sum() / whole_ms.sum())
    if share < COLLECTING_SHARE:
        return None
    shares = longest_ms / whole_ms
    return case.verdict(
        cause="garbage-collection",
        title="Python's garbage collector stops the steps",
        evidence=(
            f"Collections take {percent(share)} of the steps and of the time between them "
            f"[{STEPS}].",
            *places(case, ("between", "optimizer")),
        ),
        lost=share,
        sure=confidence(share, COLLECTING_SHARE, float(shares.sem()), len(shares)),
        whole_ms=float(whole_ms.mean()),
        change=(
            "Once the model, the loaders and the optimizer are made, gc.collect(), gc.freeze() and "
            "gc.disable(); then gc.collect() every few hundred steps, on all ranks at once."
        ),
    )


def recompiling(case: Case) -> Verdict | None:
    """Judges whether torch.compile compiles again in the middle of the training."""
    steps = steps_with(case, "recompilations")
    by_rank = steps.groupby("rank")["recompilations"].sum()
    if by_rank.max() < COMPILED_STEPS:
        return None
    by_step = slowest_rank(steps, ["step_time_ms", "recompilations"], by=STEP)
    steps_ms, hit = by_step["step_time_ms"], by_step["recompilations"] > 0
    slow, usual = steps_ms[hit], steps_ms[~hit].median()
    unhit = f"the others {usual:.3g} ms" if math.isfinite(usual) else "and there are no others"
    longer_ms = (slow - usual).clip(lower=0).sum()
    lost = float(longer_ms / steps_ms.sum()) if math.isfinite(usual) else 0.0
    return case.verdict(
        cause="recompilation",
        title="torch.compile compiles again and again",
        evidence=(
            f"{by_rank.max():.0f} graphs were compiled after the warm-up; steps in which one was "
            f"take {slow.median():.3g} ms, {unhit} [{STEPS}].",
        ),
        lost=lost,
        lost_share=lost,  # compiling may take nearly all of a window
        sure=("high" if lost > COLLECTING_SHARE else "medium", "compilations are counted"),
        change=(
            "torch.compile(model, dynamic=True), or batches of a few fixed shapes; "
            "TORCH_LOGS=recompiles says why"
        ),
    )


def allocator_retries(case: Case) -> Verdict | None:
    """Judges whether the GPU's memory is so short that the allocator gives back and asks again."""
    retries = steps_with(case, "allocator_retries").groupby("rank")["allocator_retries"].sum()
    if retries.max() < 1:
        return None
    return Verdict(
        cause="allocator-retries",
        title=f"rank {retries.idxmax()} is short of GPU memory",
        evidence=(
            f"Rank {retries.idxmax()} gave all cached memory back and asked again "
            f"{retries.max():.0f} times [{STEPS}].",
        ),
        confidence="medium",
        reason="counted by PyTorch; from documented signals, not judged on a GPU by this project",
        change="PYTORCH_ALLOC_CONF=expandable_segments:True, or a smaller batch",
        group=MINOR,
    )


def narrow_gradients(case: Case) -> Verdict | None:
    """Judges whether gradients in 16 bits would shorten an exchange that nothing hides."""
    case.need_ranks("exchanges nothing")
    model = case.model
    if model.settings.compression != "none" or "bfloat16" not in model.networks:
        return None
    after = replace(model.settings, compression="bf16")
    now_s, then_s = predict(model).step_n_s, predict(model, after).step_n_s
    gain = min(1 - then_s / now_s, case.share("communication_time_ms")[0])
    if gain < max(NARROW_GAIN, BELOW_NOISE * case.run.noise):
        return None
    return case.verdict(
        cause="wide-gradients",
        title="gradients travel in 32 bits where 16 would do",
        evidence=(
            f"A step is predicted to take {then_s * 1e3:.3g} instead of {now_s * 1e3:.3g} ms with "
            f"half the bytes [{READY_TIMES}].",
        ),
        lost=gain,
        sure=confidence(gain, NARROW_GAIN, case.run.noise, case.steps, of="predicted gain"),
        change=(
            "ddp.register_comm_hook(None, torch.distributed.algorithms.ddp_comm_hooks."
            "default_hooks.bf16_compress_hook)"
        ),
        gain=case.gain_with(after),
        group=MINOR,
    )


def steps_with(case: Case, *columns: str) -> pd.DataFrame:
    """Returns the measured steps; raises NotJudged for the first column that the run lacks."""
    for column in columns:
        if column not in case.run.measured:
            raise NotJudged(f"{STEPS} in {case.run.name} has no {column}")
    return case.run.measured


def padding(case: Case) -> Verdict | None:
    """Judges whether much of the step is computation of padding, which no text needs.

    What padding takes is less than its share of the tokens: a pass has a part that does not grow
    with its batch. Attention, which grows with the square of the length, is not counted in.
    """
    counted = case.run.measured.groupby(STEP)[["tokens", "padded_tokens"]].sum()
    if not counted["padded_tokens"].sum():
        return None
    share = 1 - float(counted["tokens"].sum() / counted["padded_tokens"].sum())
    if share < PADDING_SHARE:
        return None
    probes = case.run.need(PROBES)
    several, batch = probes[flags(probes["together"])], case.run.batch_per_rank
    passes = pass_times(several)
    growing = (passes.forward.per_sample_s + passes.backward.per_sample_s) * batch
    growing /= passes.time_s(batch)
    computing = compute_share(case)
    lost = computing * growing * share
    if lost < PADDING_SHARE:
        return None
    by_step = 1 - counted["tokens"] / counted["padded_tokens"]
    error = computing * growing * standard_error(by_step)
    sure = confidence(lost, PADDING_SHARE, error, len(by_step))
    if several["batch_per_rank"].nunique() == 1:
        sure = "low", "share of the step: how much of a pass grows with its batch is not known"
    tokens, padded = counted["tokens"].mean(), counted["padded_tokens"].mean()
    return case.verdict(
        cause="padding",
        title=f"{percent(share)} of a batch is padding",
        evidence=(
            f"A step computes {padded:,.0f} tokens (or frames), of which {tokens:,.0f} are no "
            f"padding [{STEPS}].",
            f"{percent(growing)} of a pass grows with its batch [{PROBES}], and passes "
            f"take {percent(computing)} of the step [{STEPS}].",
        ),
        lost=lost,
        sure=sure,
        change=(
            "Put samples of like length into one batch (sort them, or sample from buckets of "
            "lengths) and pad to the longest of the batch, or pack several texts into one row. One "
            "rank alone would gain as much."
        ),
    )
