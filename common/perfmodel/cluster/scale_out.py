"""A training step of any model on 8 or 16,384 GPUs: DDP and FSDP, weak and strong scaling.

Nothing is measured. Computation is ``pass_time``'s, collectives are the model of NCCL for the
cluster, the slowest of n GPUs sets the pace, and communication slows the computation beside it.
What all of this assumes is in ``assumptions`` and is told with the result.

A step's time has five parts, and they add up: computation of a mean GPU, waiting for the slowest,
copies into buckets and out of gathers, computation slowed by communication, and communication that
nothing hides. Efficiency is the time of one GPU that exchanges nothing, over that time: for the
same batch per GPU (weak), or for the whole batch divided by the number of GPUs (strong).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pandas as pd

from common.errors import UserError, require_known
from common.perfmodel.cluster.assumptions import LEAST_DRAWS, Assumptions, Range
from common.perfmodel.cluster.clusters import Cluster
from common.perfmodel.cluster.job import Job
from common.perfmodel.cluster.pass_time import (
    ATTENTION,
    convolutions,
    is_convolution,
    moves,
    product_share,
)
from common.perfmodel.cluster.steps import BAND, ClusterSteps
from common.perfmodel.one_device.peaks import DevicePeak, known_peak
from common.perfmodel.one_device.sharding import sharding_on
from common.perfmodel.one_device.training_memory import LIBRARIES_BYTES, predict_training_memory

STRATEGIES = ("DDP", "SHARD_GRAD_OP", "FULL_SHARD")
"""Strategies that are predicted where none are asked for."""
OTHERS = ("ZERO1", "HYBRID_SHARD")
SCALINGS = ("weak", "strong")
GLOBAL_BATCH_SIZE = 16_384
"""Sequences of a step under strong scaling: one for each of 16,384 GPUs, and with 1,024 tokens each
the 16M tokens of Llama 3's largest batch (arXiv 2407.21783)."""


@dataclass(frozen=True)
class ScaleOut:
    """A prediction for several numbers of GPUs, and its inputs.

    ``table`` has a row per scaling (weak, strong), strategy and number of GPUs. Columns: scaling,
    strategy, gpus, nodes, sequences_per_gpu (of the busiest GPU), micro_batches; step_s, and its
    parts computation_s, straggler_s, copies_s, slowed_s, exposed_s; efficiency; tokens_per_s; for
    DDP bucket_cap_mib (b*), num_buckets, algorithm (NCCL's for a bucket of b*), near_low_mib and
    near_high_mib (caps whose step is within 1 % of the best), default_step_s (DDP's default caps).
    step_s, exposed_s, efficiency, tokens_per_s and bucket_cap_mib have a band: ``_low`` and
    ``_high`` before the unit, the 5 % and 95 % quantile of the draws.
    """

    job: Job
    cluster: Cluster
    peak: DevicePeak
    global_batch_size: int
    assumptions: Assumptions
    table: pd.DataFrame

    def rows(self, scaling: str, strategy: str) -> pd.DataFrame:
        """Returns the rows of one scaling and strategy, by number of GPUs."""
        table = self.table
        chosen = (table["scaling"] == scaling) & (table["strategy"] == strategy)
        return table[chosen].reset_index(drop=True)


def predict_scale_out(
    job: Job,
    cluster: Cluster,
    gpus: Sequence[int],
    *,
    global_batch_size: int = GLOBAL_BATCH_SIZE,
    assumptions: Assumptions | None = None,
    caps_mib: Sequence[float] | None = None,
    strategies: Sequence[str] = STRATEGIES,
) -> ScaleOut:
    """Predicts the step on each number of GPUs.

    Args:
        gpus: numbers of GPUs.
        global_batch_size: sequences of a step under strong scaling. A GPU takes its share in
            micro-batches of at most ``job.batch_size``; numbers of GPUs above it are left out
            there, as some GPUs would have nothing to do.
        caps_mib: caps among which b* is looked for.
        strategies: members of ``STRATEGIES`` and ``OTHERS`` to predict. HYBRID_SHARD shards inside
            a node and reduces over the nodes; ZERO1 is DDP whose GPUs update a part each.

    Raises UserError for GPUs that the cluster cannot hold, or whose peak is not known at this
    precision; a batch below 1 sequence; an unknown strategy.
    """
    if not len(gpus):
        raise UserError("no number of GPUs to predict for")
    if global_batch_size < 1:
        raise UserError(f"global batch of {global_batch_size} sequences: at least 1")
    for strategy in strategies:
        require_known("strategy", strategy, (*STRATEGIES, *OTHERS))
    assumptions = assumptions or Assumptions()
    gpus = sorted(set(gpus))
    peak = _known_peak(cluster, job)
    steps = ClusterSteps(job, cluster, peak, gpus, global_batch_size, assumptions)
    rows = []
    for strategy in strategies:
        in_buckets = strategy in ("DDP", "ZERO1")
        rows += steps.ddp(caps_mib, strategy) if in_buckets else steps.fsdp(strategy)
    order = {"scaling": SCALINGS, "strategy": (*STRATEGIES, *OTHERS)}
    table = pd.DataFrame(rows).sort_values(
        ["scaling", "strategy", "gpus"],
        key=lambda column: column.map(order[column.name].index) if column.name in order else column,
    )
    table = table.reset_index(drop=True)
    return ScaleOut(job, cluster, peak, global_batch_size, assumptions, table)


def _known_peak(cluster: Cluster, job: Job) -> DevicePeak:
    peak = known_peak(cluster.gpu)
    if peak is None or peak.flops(job.precision, job.tf32) is None:
        raise UserError(f"cluster {cluster.name}: no peak of {cluster.gpu} in {job.precision}")
    return peak


def parse_gpus(text: str) -> list[int]:
    """Parses numbers of GPUs: ``8,16,64``, or ``8..16384``, which doubles from first to last.

    Raises UserError for anything else, and for numbers below 1.
    """
    legal = "numbers of GPUs like 8,16,64, or a range like 8..16384, which doubles"
    try:
        if ".." in text:
            first, last = (int(part) for part in text.split(".."))
        else:
            numbers = [int(part) for part in text.split(",")]
            first, last = min(numbers), max(numbers)
    except ValueError:
        raise UserError(f"--gpus {text}: expected {legal}") from None
    if first < 1:
        raise UserError(f"--gpus {text}: at least 1 GPU is needed")
    if first > last:
        raise UserError(f"--gpus {text}: the range ends before it begins")
    if ".." in text:
        numbers = [first << power for power in range((last // first).bit_length())]
    return sorted(set(numbers))


def stated_assumptions(predicted: ScaleOut) -> list[str]:
    """Returns everything that the prediction assumes, a sentence each."""
    assumed, work, peak = predicted.assumptions, predicted.job, predicted.peak
    rate = peak.flops(work.precision, work.tf32) / 1e12
    sizes = work.micro_batch_words
    if work.accumulation > 1:
        sizes = f"{work.accumulation} times {sizes}"
    half = work.precision != "float32"
    sent = "float32" if not half else "float32 (FSDP gathers blocks in 16 bits)"
    return [
        f"weak scaling: {sizes} per GPU and step; strong: {predicted.global_batch_size} sequences "
        f"per step on all GPUs, in micro-batches of at most {work.batch_size}",
        f"{_of_passes(predicted)} {rate:.0f} TFLOP/s ({peak.device}, {work.precision}, "
        f"{peak.source}), whatever the size of a micro-batch; the backward pass takes twice the "
        "forward pass",
        f"AdamW and all copies run at the memory's {peak.memory_bytes_per_s / 1e12:.2f} TB/s; "
        f"gradients are sent in {sent}",
        f"overlap slowdown: computation beside communication takes "
        f"{assumed.overlap_slowdown.text()} times as long (arXiv 2507.03114: 19 %, at most 40 %)",
        f"network speed: collectives run at {assumed.network_speed.text()} times the speed of "
        + (
            "what was measured" + _where_certain(predicted.cluster)
            if predicted.cluster.measured
            else f"the model of NCCL for {predicted.cluster.name} (unfitted, it is a third off on "
            "a published table of two H100 nodes)"
        )
        + "; no congestion, no other jobs",
        f"straggler spread: a GPU's computation in a step varies by "
        f"{assumed.straggler_spread.text('{:.1%}')} (standard deviation, "
        f"{assumed.straggler_distribution}), and a step waits for the slowest"
        + (", which is the same one in all steps" if assumed.work == "equal" else ""),
        "efficiency is that of one GPU that exchanges nothing; loading data, checkpoints and "
        "failures are left out",
        f"bands: {(1 - BAND) / 2:.0%} to {(1 + BAND) / 2:.0%} of {assumed.draws} draws, in which "
        f"the ranges in brackets vary together (triangles; seed {assumed.seed})",
        *predicted.cluster.assumptions,
    ]


def _where_certain(cluster: Cluster) -> str:
    """Returns on how many GPUs collectives are as fast as measured; nothing where on none."""
    gpus = cluster.measured_gpus
    on = f", and at just that speed on {gpus:,} GPUs, others as the all-reduces that were measured"
    return on if gpus else ""


def _of_passes(predicted: ScaleOut) -> str:
    """Returns what the time of passes rests on; the words end where a peak is named."""
    assumed, work = predicted.assumptions, predicted.job
    if assumed.mfu:
        return f"MFU: forward and backward pass reach {assumed.mfu.text('{:.0%}')} of"
    return (
        f"passes: {assumed.pass_rate.text()} times as fast as the sum of two times (--mfu assumes "
        f"one rate): each kept byte goes {moves(work):g} times through memory"
        f"{_of_convolutions(predicted)}, attention takes {ATTENTION:g} times as long as other "
        f"products, and these run at {product_share(work, predicted.peak):.0%} of"
    )


def _of_convolutions(predicted: ScaleOut) -> str:
    """Returns what is assumed of convolutions instead; nothing where there are none."""
    if not any(is_convolution(layer) for layer in predicted.job.architecture.layers):
        return ""
    share, moved = convolutions(predicted.job, predicted.peak)
    return f" (of convolutions {moved:g} times, at {share:.0%} of the peak)"


def without_room(predicted: ScaleOut) -> dict[str, dict[int, float]]:
    """Returns the peak of a step in bytes where it exceeds a GPU's memory: by strategy and GPUs.

    Under weak scaling; of models whose activations are known.
    """
    capacity = (predicted.peak.memory_bytes or math.inf) - LIBRARIES_BYTES
    full: dict[str, dict[int, float]] = {}
    for row in predicted.table[["strategy", "gpus"]].drop_duplicates().itertuples():
        sharding = sharding_on(row.strategy, row.gpus, predicted.cluster.gpus_per_node)
        try:
            peak = predict_training_memory(predicted.job.passes, sharding).peak_bytes
        except UserError:
            return {}
        if peak > capacity:
            full.setdefault(row.strategy, {})[row.gpus] = peak
    return full


def one_at_a_time(predicted: ScaleOut, scaling: str, strategy: str, gpus: int) -> pd.DataFrame:
    """Predicts with each assumption alone at an end of its range, which shows what it is worth.

    Columns: assumption, step_s, efficiency; the first row changes nothing.
    """
    changes: list[tuple[str, Assumptions]] = [("as assumed", predicted.assumptions)]
    computation = "mfu" if predicted.assumptions.mfu else "pass_rate"
    for name in (computation, "network_speed", "straggler_spread", "overlap_slowdown"):
        assumed: Range = getattr(predicted.assumptions, name)
        for end in dict.fromkeys((assumed.low, assumed.high)):
            if not assumed.is_certain:
                certain = replace(predicted.assumptions, **{name: Range(end, end, end)})
                changes.append((f"{name.replace('_', ' ')} {end:g}", certain))
    rows = []
    for name, changed in changes:
        row = predict_scale_out(
            job=predicted.job,
            cluster=predicted.cluster,
            gpus=[gpus],
            global_batch_size=predicted.global_batch_size,
            assumptions=replace(changed, draws=LEAST_DRAWS),
            strategies=[strategy],
        ).rows(scaling, strategy)
        if row.empty:
            raise UserError(f"{scaling} scaling of {strategy} was not predicted for {gpus} GPUs")
        rows.append((name, row["step_s"][0], row["efficiency"][0]))
    return pd.DataFrame(rows, columns=["assumption", "step_s", "efficiency"])
