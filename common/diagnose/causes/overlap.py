"""The cause of an exchange that hides nothing: backward passes that wait for each bucket."""

from __future__ import annotations

import math

from common.diagnose.evidence.bucket_waits import WAITING
from common.diagnose.evidence.case import Case, Verdict, confidence, percent
from common.diagnose.evidence.evidence import BUCKETS, PROBES
from common.perfmodel.scaling.step_model import predict

LEAST_SHARE = 0.05
"""Share of the step; a smaller one may be no gain, as predicted steps are off by a few percent."""
OLD_GROUP = (
    "Set TORCH_DIST_USE_NCCL2=0 in the environment, before init_process_group, which takes the "
    'group of earlier versions (as init_process_group("nccl-legacy") does)'
)


def no_overlap(case: Case) -> Verdict | None:
    """Judges whether backward passes wait for each bucket, so that no exchange is hidden."""
    waits = case.run.waits
    if waits is None:
        return None
    step_ms = case.run.step_ms
    share = waits.waited_ms / step_ms
    model = case.model_or_none()
    # Of what is waited, a slow network would leave a part exposed in any case.
    gain = share if model is None else min(share, 1 - predict(model).step_n_s * 1e3 / step_ms)
    if gain < LEAST_SHARE:
        return None
    level, reason = confidence(gain, LEAST_SHARE, case.run.noise, case.steps)
    title, named = "the backward pass waits for each bucket, and hides no exchange", ""
    if waits.is_known:
        title += " (torch's nccl2)"
        named = (
            f"The ranks exchange by {waits.group} of torch {case.run.torch}, whose get_future, "
            "which DDP calls for each bucket, makes the backward pass wait for the all-reduce "
            "[environment.json]."
        )
        change = f"{OLD_GROUP}."
    else:
        level = "medium" if level == "high" else "low"
        group = waits.group or "the process group"
        reason += f"; it is not known that get_future of {group} waits"
        change = (
            f"Find out what waits: DDP asks each all-reduce of {group} for its future while it is "
            "on its way, and that must return at once. "
        )
        change += f"With nccl of torch 2.15 or later: {OLD_GROUP}." if not waits.group else ""
    longer = (
        f", and are longer than by themselves by {waits.longer:.2f} times that [{PROBES}]"
        if not math.isnan(waits.longer)
        else ""
    )
    predicted = f"With overlap a step is predicted to take {(1 - gain) * step_ms:.3g} ms."
    return case.verdict(
        cause="no-overlap",
        title=title,
        evidence=(
            f"Of {waits.buckets} buckets of a pass, {percent(waits.in_turn)} are ready only after "
            f"the one before has been reduced [{BUCKETS}].",
            f"Backward passes wait {waits.waited_ms:.3g} of {step_ms:.3g} ms for them "
            f"[{BUCKETS}]{longer}.",
            named,
            predicted if model else "",
        ),
        lost=gain,
        sure=(level, reason),
        change=change.strip(),
    )


def first_let_it_overlap(case: Case) -> str:
    """Returns what a change of buckets needs besides; empty where buckets can overlap."""
    if case.run.process_group != WAITING:
        return ""
    return f" {OLD_GROUP}: {WAITING} overlaps no bucket."
