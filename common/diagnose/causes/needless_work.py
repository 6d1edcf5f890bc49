"""Causes in work that a script does and need not do, each with what it costs as measured."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import pandas as pd

from common.analysis.step_parts import flags
from common.diagnose.causes.sharing import PARTS, compute_share
from common.diagnose.evidence.case import Case, Verdict, confidence, most_costly, percent
from common.diagnose.evidence.evidence import FACTS, LEAN_PASSES, STEP, STEPS, standard_error
from common.runtime.wording import size_text
from common.samples import LEAST_ROUNDS, Interval, paired_gain, slowest_rank

LEAST_SHARE = 0.03
"""Share of the step; less is within what passes differ from one run to the next."""


@dataclass(frozen=True)
class Needless:
    """A kind of lean passes (``ddplab_watch.lean``), as a cause.

    Attributes:
        cause, title, change: fields of the verdict. The title may hold ``ratio``, ``share`` (of the
            gradients) and columns of ``lean-passes.csv``.
        is_exchanged: gradients are left out, and so is their exchange.
        is_updated: an update that uses them is left out as well.
        exchanges: the passes exchange their gradients.
    """

    cause: str
    title: str
    change: str
    is_exchanged: bool = False
    is_updated: bool = False
    exchanges: bool = False


KINDS = {
    "anomaly detection": Needless(
        "left-on",
        "passes take {ratio:.2g} times as long with anomaly detection on",
        "torch.autograd.set_detect_anomaly(False), but while looking for a NaN.",
    ),
    "deterministic algorithms": Needless(
        "left-on",
        "passes take {ratio:.2g} times as long with deterministic algorithms on",
        "torch.use_deterministic_algorithms(False), where runs need not repeat to the last bit.",
    ),
    "a profiler": Needless(
        "left-on",
        "passes take {ratio:.2g} times as long with a profiler on",
        "Stop the profiler after a few steps: torch.profiler.schedule(wait=1, warmup=1, active=3).",
    ),
    "hooks": Needless(
        "left-on",
        "passes take {ratio:.2g} times as long with {hooks:.0f} hooks on modules and gradients",
        "Take the hooks off (a tracker's such as wandb.watch, statistics of activations or "
        "gradients), or let them look at every hundredth step.",
    ),
    "activation checkpointing": Needless(
        "needless-recomputation",
        "activations are computed twice, and there is memory to keep them",
        "Call the layers without torch.utils.checkpoint, all or some of them.",
    ),
    "repeated calls": Needless(
        "needless-recomputation",
        "{repeated_calls:.0f} of {calls:.0f} calls of layers in a pass have the input of an "
        "earlier one",
        "Call the network once, and use what it returned wherever it is needed.",
    ),
    "too many threads": Needless(
        "oversubscribed-cores",
        "each rank computes with {threads:.0f} threads, more than the {cores:.0f} cores can run",
        "torch.set_num_threads({fair_threads:.0f}) where the script sets another number, or "
        "OMP_NUM_THREADS={fair_threads:.0f} on each rank.",
    ),
    "checks of each exchange": Needless(
        "nccl-settings",
        "TORCH_DISTRIBUTED_DEBUG=DETAIL makes passes and exchange take {ratio:.2g} times as long",
        "unset TORCH_DISTRIBUTED_DEBUG.",
        exchanges=True,
    ),
    "small buckets": Needless(
        "bucket-cap",
        "gradients are sent in {buckets:.0f} small buckets where {usual_buckets:.0f} would do",
        "DistributedDataParallel(model) with its own bucket_cap_mb, 25.",
        exchanges=True,
    ),
    "unused gradients": Needless(
        "unused-gradients",
        "{share} of the gradients are of parameters that no optimizer updates",
        "requires_grad_(False) on what is not trained, before the model is wrapped in "
        "DistributedDataParallel; or give these parameters to the optimizer.",
        is_exchanged=True,
    ),
    "untouched embeddings": Needless(
        "sparse-embedding",
        "{share} of the gradients are a table's (such as an embedding's), of which a batch touches "
        "{touched_rows:.0f} of {rows:.0f} rows",
        "nn.Embedding(..., sparse=True), or nn.functional.embedding(..., sparse=True) for a "
        "parameter of the model's own, and an optimizer that takes sparse gradients (SGD, "
        "SparseAdam, Adagrad) for it; or a table of fewer rows.",
        is_exchanged=True,
        is_updated=True,
    ),
}
"""What lean passes do without, by the name in their table."""


def judge_of(cause: str) -> Callable[[Case], Verdict | None]:
    """Returns the function that judges the kinds of ``KINDS`` that are of one cause."""

    def judge(case: Case) -> Verdict | None:
        rows = case.run.rows(LEAN_PASSES)
        kinds = [name for name in rows["without"].unique() if name in KINDS]
        verdicts = [_saved_by(case, rows, name) for name in kinds if KINDS[name].cause == cause]
        return most_costly(*verdicts)

    return judge


def _saved_by(case: Case, all_rows: pd.DataFrame, without: str) -> Verdict | None:
    """Returns the verdict on what passes without something save; None where that is little."""
    kind, rows = KINDS[without], all_rows[all_rows["without"] == without]
    gain, with_ms, without_ms = _saved(rows)
    passes, exchange, updating = _shares(case)
    noted = rows.max(numeric_only=True).dropna().to_dict()
    if noted.get("needed_bytes", 0) > noted.get("free_bytes", math.inf) / case.ranks:
        return None
    left_out, sentences = 0.0, []
    if kind.exchanges:
        passes = min(1.0, passes + exchange)
    if kind.is_exchanged:
        share = min(1.0, noted["unused_bytes"] / case.run.gradient_bytes)
        left_out = share * exchange
        sentences = [
            f"{size_text(noted['unused_bytes'])} of gradients are computed and exchanged in each "
            f"step [{LEAN_PASSES}]"
            + (
                f"; their exchange takes up to {percent(left_out)} of it [{STEPS}]."
                if left_out
                else "."
            )
        ]
        if kind.is_updated:
            update = share * updating
            left_out += update
            sentences.append(f"Their update takes up to {percent(update)} [{STEPS}].")
        noted["share"] = percent(share)
    if "needed_bytes" in noted:
        sentences = [
            f"To keep them takes {size_text(max(0, noted['needed_bytes']))} more on each rank, and "
            f"{size_text(noted['free_bytes'])} are free [{LEAN_PASSES}]."
        ]
    if not max(0.0, gain.low) * passes + left_out > LEAST_SHARE:
        return None
    noted["ratio"] = with_ms / without_ms
    exchanges = kind.exchanges or case.run.sharded
    level = "high" if (gain.rounds or 0) >= LEAST_ROUNDS else "medium"
    return case.verdict(
        cause=kind.cause,
        title=kind.title.format(**noted),
        evidence=(
            f"Forward and backward pass{' with their exchange' if exchanges else ''} take "
            f"{with_ms:.3g} ms as they are and {without_ms:.3g} ms without {without}, in turns "
            f"[{LEAN_PASSES}].",
            *sentences,
        ),
        lost=gain.estimate * passes + left_out,
        sure=(
            level if gain.low > 0 else "low",  # what is then left is an exchange that may be hidden
            f"timed both ways in {gain.rounds} rounds: without it passes take "
            f"{percent(gain.low)} to {percent(gain.high)} less",
        ),
        change=kind.change.format(**noted),
    )


def share_of_scatters(case: Case) -> float | None:
    """Returns the share of a step that FSDP's scatters of gradients take; None where not timed."""
    rows = case.run.rows(LEAN_PASSES)
    rows = rows[rows["without"] == "scattered gradients"]
    if rows.empty:
        return None
    return max(0.0, _saved(rows)[0].estimate * _shares(case)[0])


def _shares(case: Case) -> tuple[float, float, float]:
    """Returns the shares of the step that passes, their exchange and the update take.

    Passes of a sharded model hold their exchange.
    """
    if case.run.sharded:
        columns = ("forward_time_ms", "whole_backward_time_ms", "optimizer_time_ms")
        forward, backward, update = (case.share(column)[0] for column in columns)
        return min(1.0, forward + backward), 0.0, update
    parts = case.run.parts
    exchange, update = (
        parts.parts_ms[part] / parts.step_ms for part in ("communication", "optimizer")
    )
    return compute_share(case), exchange, update


def _saved(rows: pd.DataFrame) -> tuple[Interval, float, float]:
    """Returns the share that lean passes save, in pairs, and the mean ms with and without."""
    parts = [name for name in PARTS if name in rows]
    rows = rows.assign(time_ms=rows[parts].fillna(0).sum(axis=1), lean=flags(rows["lean"]))
    by_repeat = slowest_rank(rows, "time_ms", by=["repeat", "lean"]).unstack()
    gain = paired_gain(by_repeat[True], by_repeat[False])
    return gain, float(by_repeat[False].median()), float(by_repeat[True].median())


def sent_buffers(case: Case) -> Verdict | None:
    """Judges whether DDP's sending of buffers before each forward pass takes much of a step."""
    facts = case.run.need(FACTS)
    if case.ranks < 2 or "buffers_time_ms" not in case.run.measured:
        return None
    # The rank that came last waits for nobody: what it takes is the sending itself.
    sending = case.run.measured.groupby(STEP)["buffers_time_ms"].min()
    steps_ms = slowest_rank(case.run.measured, "step_time_ms", by=STEP)
    shares = (sending / steps_ms).dropna()
    share = float(shares.median()) if len(shares) else 0.0
    if share < LEAST_SHARE:
        return None
    sent = size_text(float(facts["buffers_bytes"].max()))
    return case.verdict(
        cause="sent-buffers",
        title=f"DDP sends {sent} of buffers before each forward pass",
        evidence=(
            f"Sending them takes {sending.median():.3g} of {steps_ms.median():.3g} ms of a step "
            f"[{STEPS}]; they are {sent} [{FACTS}].",
        ),
        lost=share,
        sure=confidence(share, LEAST_SHARE, standard_error(shares), len(shares)),
        change=(
            "DistributedDataParallel(model, broadcast_buffers=False), from torch 2.13 on "
            "forward_sync_buffers=False: nothing changes for masks and tables; BatchNorm's running "
            "statistics are then each rank's own."
        ),
    )
