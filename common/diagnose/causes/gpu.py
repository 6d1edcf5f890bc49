"""Causes in a script that only a GPU can show, by documented signals.

What is said of each is from PyTorch's documents and source; none was judged on a GPU by this
project. SyncBatchNorm, for one, takes no input on a CPU.
"""

from __future__ import annotations

import math

import pandas as pd

from common.analysis.step_parts import flags
from common.diagnose.causes.settings import BUSY_SHARE, NOT_ON_A_GPU, Signal, of_signals
from common.diagnose.causes.sharing import on_gpu
from common.diagnose.evidence.case import MINOR, Case, Verdict, gain_without, percent
from common.diagnose.evidence.evidence import (
    ALL_REDUCE,
    FACTS,
    HOST_WAITS,
    STEPS,
    SURROUNDINGS,
    NotJudged,
)
from common.diagnose.evidence.measured_surroundings import surroundings_of
from common.perfmodel.tables import read_all_reduce_samples
from common.runtime.wording import size_text

NORMS_SHARE = 0.02
"""Exchanges of norms that take less of a step are not worth another kind of norm."""
EXCHANGES_OF_NORM = 2
"""SyncBatchNorm gathers mean and variance in the forward pass, and adds up their gradients in the
backward pass (``torch/nn/modules/_functions.py``); computation waits for both."""
NORMS_EXCHANGE = "batch norms exchange their statistics in every pass"
OTHER_NORMS = (
    "Plain BatchNorm where a rank's own batch is large enough (some 32 samples), or GroupNorm, "
    "which needs no batch; else a larger batch per rank, so that there are fewer exchanges a "
    "sample. Norms change what is learned: look at accuracy."
)
HALF, BRAIN = 7.0, 8.0
"""Compute capabilities from which tensor cores multiply in float16, and in bfloat16 and TF32 (CUDA
C++ Programming Guide, *Compute Capabilities*)."""
PASSES_SHARE = 0.5
"""With less of the step in passes, nothing that makes these shorter pays much."""
EACH_STEP = 0.9
"""Waits a step from which they are of every step; fewer are of logging now and then."""
MANY_WAITS = 3
"""Waits in the passes of a step: one is of a loss that is looked at, more are in the model."""
MOST_PLACES = 3
TEXTS = ["phase", "place", "call"]
OTHER_PHASES = ("copy", "evaluation")
SCALER = "grad_scaler"
"""A GradScaler has to know whether gradients are finite, and waits for that once a step."""


def synchronised_norms(case: Case) -> Verdict | None:
    """Judges whether batch norms wait for an exchange in every pass."""
    if case.ranks < 2:
        return None
    norms = int(_numbers(case.run.need(FACTS), "synchronised_norms").max())
    if not norms:
        return None
    passes = case.run.accumulation
    exchanges = EXCHANGES_OF_NORM * norms * passes
    evidence = [
        f"{norms} SyncBatchNorm layers [{FACTS}] exchange in the forward pass and in the "
        f"backward pass: {exchanges} times in a step"
        + (f" of {passes} micro-batches, with and without no_sync()." if passes > 1 else ".")
    ]
    share, level, reason = 0.0, "low", "layers are counted, and no all-reduce was measured"
    if case.run.opened.has(ALL_REDUCE):
        curve = read_all_reduce_samples(case.run.folder / ALL_REDUCE).least()
        latency_ms = float(curve.times_s[0]) * 1e3
        share = exchanges * latency_ms / case.run.step_ms
        if share < NORMS_SHARE:
            return None
        evidence.append(
            f"An all-reduce of {size_text(curve.sizes_bytes[0])} takes {latency_ms:.3g} ms "
            f"[{ALL_REDUCE}]; so many take at least {exchanges * latency_ms:.3g} of "
            f"{case.run.step_ms:.3g} ms, as nothing hides them."
        )
        level = "medium"
        reason = "layers are counted, and the least time of a small all-reduce is measured"
    return case.verdict(
        cause="synchronised-norms",
        title=NORMS_EXCHANGE,
        evidence=evidence,
        lost=share,
        sure=(level, f"{reason}; {NOT_ON_A_GPU}"),
        change=OTHER_NORMS,
        gain=gain_without(share) if share else None,
        group=MINOR,
    )


def wide_computation(case: Case) -> Verdict | None:
    """Judges whether a GPU computes in float32 where its tensor cores would take 16 bits."""
    if not on_gpu(case):
        return None
    facts = case.run.need(FACTS)
    capability = float(_numbers(facts, "gpu_capability").min())
    types = set(facts["compute_dtype"].astype(str)) | set(facts["gradient_dtype"].astype(str))
    share = _passes_share(case)
    if types != {"float32"} or capability < HALF or share < PASSES_SHARE:
        return None
    busy = _utilisation(case)
    is_busy = busy is not None and busy >= BUSY_SHARE
    sentence = (
        f"The model computes in float32 on GPUs of compute capability {capability} "
        f"[{FACTS}]; its passes take {percent(share)} of the step [{STEPS}]"
    )
    if busy is not None:
        sentence += f", and kernels run in {percent(busy)} of the time [{SURROUNDINGS}]"
    change = (
        "with torch.autocast('cuda', torch.bfloat16) around the forward pass and the loss"
        if capability >= BRAIN
        else "with torch.autocast('cuda', torch.float16) around the forward pass and the loss, and "
        "torch.amp.GradScaler around the update"
    )
    if capability >= BRAIN and (facts.get("float32_matmul_precision") == "highest").all():
        sentence += "; TF32 is off, too"
        change += "; at least torch.set_float32_matmul_precision('high')"
    signal = Signal(f"{sentence}.", change, "medium" if is_busy else "low")
    return of_signals(
        "no-mixed-precision", "the GPU computes in 32 bits where 16 would do", [signal]
    )


def _passes_share(case: Case) -> float:
    """Returns the share of the step that forward and backward pass take, the exchange included."""
    steps = case.run.measured
    backward_ms = steps.get("whole_backward_time_ms", steps["backward_time_ms"])
    passes_ms = steps["forward_time_ms"] + backward_ms
    return float((passes_ms / steps["step_time_ms"]).median())


def _utilisation(case: Case) -> float | None:
    """Returns the least share of the time in which a rank's GPU ran a kernel; None if unknown."""
    try:
        least = surroundings_of(case)["gpu_utilisation_share"].min()
    except NotJudged:
        return None
    return None if pd.isna(least) else float(least)


def host_waits(case: Case) -> Verdict | None:
    """Judges whether the host waits for the GPU within each step, instead of running ahead."""
    if not on_gpu(case):
        return None
    waits = _waits(case)
    ours = waits[~waits["phase"].isin(OTHER_PHASES) & ~waits["call"].str.contains(SCALER)]
    by_rank = ours.groupby("rank")["waits"].sum()
    usual = case.run.measured.groupby("rank")["host_waits"].median().max()
    if by_rank.empty or min(by_rank.max(), usual) < EACH_STEP:
        return None
    rank = int(by_rank.idxmax())
    rank_waits = ours[ours["rank"] == rank].sort_values("waits", ascending=False)
    inside = float(rank_waits.loc[rank_waits["phase"].isin(("forward", "backward")), "waits"].sum())
    signals = [
        Signal(
            f"Rank {rank}'s host waits for its GPU {by_rank[rank]:.3g} times a step, "
            f"{inside:.3g} of them in the passes [{HOST_WAITS}].",
            "Keep what is logged on the GPU (loss.detach()), and read it every 50 steps or so; in "
            "a model, masks and torch.where() in place of .item(), if tensor:, nonzero() and "
            "tensor[mask]",
            "medium" if inside >= MANY_WAITS else "low",
        )
    ]
    for _, row in rank_waits[:MOST_PLACES].iterrows():
        within = f", in {row['call']}" if row["call"] else ""
        line = row["place"] or "a line outside of the script"
        signals.append(
            Signal(
                f"{row['waits']:.3g} a step in the {row['phase']} phase at {line}{within} "
                f"[{HOST_WAITS}].",
                signals[0].change,
                "low",
            )
        )
    return of_signals("host-waits", "the host waits for the GPU within each step", signals)


def _waits(case: Case) -> pd.DataFrame:
    """Returns host-waits.csv with waits a step; raises NotJudged where nobody counted any."""
    steps = case.run.measured
    if "host_waits" not in steps or steps["host_waits"].isna().all():
        raise NotJudged(f"{STEPS} in {case.run.name} has no host_waits: no step was looked at")
    counted = steps[steps["host_waits"].notna()].groupby("rank").size()
    table = case.run.rows(HOST_WAITS)
    texts = {name: table[name].astype(object).fillna("").astype(str) for name in TEXTS}
    return table.assign(waits=table["waits"] / table["rank"].map(counted), **texts)


def unpinned_copies(case: Case) -> Verdict | None:
    """Judges whether batches go to the GPU from memory, or in a way, that makes the host wait."""
    if not on_gpu(case):
        return None
    facts = case.run.need(FACTS)
    if "pin_memory" not in facts or facts["pin_memory"].isna().all():
        raise NotJudged(f"{FACTS} has no pin_memory: no DataLoader was seen")
    on_host = facts.get("batches_on_host")
    if on_host is None or on_host.isna().all():
        raise NotJudged("it is not known whether the loader's batches are in the host's memory")
    if not flags(on_host).any():
        return None
    try:
        waits = _waits(case)
        copies = float(waits[waits["phase"] == "copy"].groupby("rank")["waits"].sum().max())
    except NotJudged:
        copies = math.nan
    blocks = copies >= EACH_STEP  # not a number, too, where no copy was waited for
    waited = f", and the host waits for {copies:.3g} copies a step [{HOST_WAITS}]" * blocks
    copy, batches = "batch.to(device, non_blocking=True)", "The DataLoader's batches are"
    if not flags(facts["pin_memory"]).all():
        signal = Signal(
            f"{batches} not pinned [{FACTS}]{waited}: their copies to the GPU cannot run beside "
            "it.",
            f"DataLoader(..., pin_memory=True) and {copy}",
            "medium" if blocks else "low",
        )
    elif blocks:
        signal = Signal(f"{batches} pinned [{FACTS}]{waited}.", copy, "low")
    else:
        return None
    title = "copies of batches to the GPU make the host wait"
    return of_signals("unpinned-copies", title, [signal])


def _numbers(facts: pd.DataFrame, column: str) -> pd.Series:
    """Returns a column of facts as numbers; raises NotJudged where the watch did not write it."""
    if column not in facts or facts[column].isna().all():
        raise NotJudged(f"{FACTS} has no {column}")
    return pd.to_numeric(facts[column], errors="coerce").fillna(0)
