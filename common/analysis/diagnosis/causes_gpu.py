"""Causes in a script that only a GPU can show, by documented signals.

SyncBatchNorm, for one, takes no input on a CPU. What is said of each is from PyTorch's documents
and source; none was judged on a GPU by this project.
"""

from __future__ import annotations

import pandas as pd

from common.analysis.diagnosis.causes import MINOR, Case, Verdict
from common.analysis.diagnosis.causes_settings import NOT_ON_A_GPU
from common.analysis.diagnosis.evidence import ALL_REDUCE, FACTS, NotJudged
from common.analysis.style import size_text
from common.perfmodel.tables import read_all_reduce_samples

NORMS_SHARE = 0.02
"""Exchanges of norms that take less of a step are not worth another kind of norm."""
EXCHANGES_OF_NORM = 2
"""SyncBatchNorm gathers mean and variance in the forward pass, and adds up their gradients in the
backward pass (``torch/nn/modules/_functions.py``); computation waits for both."""


def synchronised_norms(case: Case) -> Verdict | None:
    """Judges whether batch norms wait for an exchange in every pass."""
    if case.ranks < 2:
        return None
    [facts] = case.run.need(FACTS)
    norms = int(_numbers(facts, "synchronised_norms").max())
    if not norms:
        return None
    passes = case.run.accumulation
    exchanges = EXCHANGES_OF_NORM * norms * passes
    evidence = [
        f"{norms} SyncBatchNorm layers {case.file(FACTS)} exchange in the forward pass and in the "
        f"backward pass: {exchanges} times in a step"
        + (f" of {passes} micro-batches, with and without no_sync()." if passes > 1 else ".")
    ]
    share, level, reason = 0.0, "low", "layers are counted, and no all-reduce was measured"
    if case.run.opened.has(ALL_REDUCE):
        curve = read_all_reduce_samples(case.run.folder / ALL_REDUCE).least()
        latency_ms = float(curve.times_s[0]) * 1e3
        share = min(0.99, exchanges * latency_ms / case.run.step_ms)
        if share < NORMS_SHARE:
            return None
        evidence.append(
            f"An all-reduce of {size_text(curve.sizes_bytes[0])} takes {latency_ms:.3g} ms "
            f"{case.file(ALL_REDUCE)}; so many take at least {exchanges * latency_ms:.3g} of "
            f"{case.run.step_ms:.3g} ms, as nothing hides them."
        )
        level = "medium"
        reason = "layers are counted, and the least time of a small all-reduce is measured"
    return Verdict(
        cause="synchronised-norms",
        title="batch norms exchange their statistics in every pass",
        evidence=tuple(evidence),
        lost_share=share,
        confidence=level,
        reason=f"{reason}; {NOT_ON_A_GPU}",
        change=(
            "Plain BatchNorm where a rank's own batch is large enough (some 32 samples), or "
            "GroupNorm, which needs no batch; else a larger batch per rank, so that there are "
            "fewer exchanges a sample. Norms change what is learned: look at accuracy."
        ),
        speedup_now=case.speedup_now,
        predicted_speedup=case.speedup_without(share) if share else None,
        group=MINOR,
    )


def _numbers(facts: pd.DataFrame, column: str) -> pd.Series:
    """Returns a column of facts as numbers; raises NotJudged where the watch did not write it."""
    if column not in facts or facts[column].isna().all():
        raise NotJudged(f"{FACTS} has no {column}")
    return pd.to_numeric(facts[column], errors="coerce").fillna(0)
