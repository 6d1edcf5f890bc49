"""The step model of a run, built from what the run measured, piece by piece."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pandas as pd

from common.analysis.step_parts import flags
from common.diagnose.evidence.bucket_waits import NOT_WAITING
from common.diagnose.evidence.evidence import (
    ALL_REDUCE,
    BUCKETS,
    COSTS,
    ELEMENTS,
    FACTS,
    PLACEMENT,
    PROBES,
    READY_TIMES,
    STEP,
    Evidence,
    NotJudged,
)
from common.errors import UserError
from common.exercises.cap_search import cap_interval
from common.perfmodel.buckets import MIB, DdpOptions, assign_buckets
from common.perfmodel.collectives import AllReduceModel, MeasuredAllReduce, as_alpha_beta
from common.perfmodel.ddp.bucketings import profile_buckets
from common.perfmodel.ddp.profile import BackwardProfile
from common.perfmodel.ddp.step import BUCKET_VIEW
from common.perfmodel.scaling.step_model import (
    LinearTime,
    PassTimes,
    StepModel,
    StepSettings,
    apart,
    calibrated,
    predict,
)
from common.perfmodel.tables import read_all_reduce, read_all_reduce_samples, read_ready_times
from common.samples import slowest_rank

MOST_DRIFT = 1.5
"""A machine's speed has not been seen to change by more between a run and its probes."""
WIRES = {
    "float32": ALL_REDUCE,
    "float16": "allreduce-samples-float16.csv",
    "bfloat16": "allreduce-samples-bfloat16.csv",
}
BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
"""Bytes of an element, by the type on the wire."""
SMALL_BYTES = 2**14
"""A message of so many takes 0.13 ms on a link of 1 Gbit/s, about as long as its latency."""


def model_from_evidence(
    evidence: Evidence, *, gradient_as_bucket_view: bool | None = None
) -> StepModel:
    """Builds the model of this run's step on its ranks, with the contention that the run shows.

    Args:
        evidence: the run.
        gradient_as_bucket_view: argument of DDP; None takes what the run's facts say, and False
            where they do not say it, as a diagnosis reads no settings.

    Raises:
        UserError: what the run lacks for it, such as probes or all-reduce times.
    """
    try:
        return step_model(evidence, gradient_as_bucket_view=gradient_as_bucket_view)
    except NotJudged as missing:
        raise UserError(f"no prediction for {evidence.name}: {missing}") from None


def step_model(evidence: Evidence, *, gradient_as_bucket_view: bool | None = None) -> StepModel:
    """Builds the same as ``model_from_evidence``, but raises NotJudged for what is missing."""
    probes = evidence.need(PROBES)
    for name in (READY_TIMES, ALL_REDUCE):
        if not (evidence.folder / name).is_file():
            raise NotJudged(f"no {name} in {evidence.name}")
    if evidence.world_size < 2:
        raise NotJudged(f"{evidence.name} ran on one rank")
    profile = read_ready_times(evidence.folder / READY_TIMES)
    networks = {
        wire: _all_reduce(evidence, name)
        for wire, name in WIRES.items()
        if (evidence.folder / name).is_file()
    }
    if gradient_as_bucket_view is None:
        gradient_as_bucket_view = _saw_bucket_views(evidence)
    together = flags(probes["together"])
    several = probes[together] if together.any() else probes
    drift, uneven = _in_the_step(evidence, several)
    besides_s = 0.0
    if drift > MOST_DRIFT and evidence.watched and not evidence.mixed:
        # No machine does that: the script's forward pass does something that its model does not.
        forward_ms = evidence.usual("forward_time_ms").min() / evidence.accumulation
        besides_s, drift = forward_ms * (1 - 1 / drift) / 1e3, 1.0
    samples = evidence.timed.groupby("rank")["samples"].median().max()
    data_ms = evidence.by_step("data_time_ms").median().max()
    model = StepModel(
        ranks=evidence.world_size,
        settings=step_settings(evidence, profile),
        together=_scaled(pass_times(several), drift * uneven, besides_s),
        alone=_scaled(_alone(several, probes[~together]), drift, besides_s),
        profile=profile,
        networks=networks,
        costs=_costs(evidence),
        gradient_as_bucket_view=gradient_as_bucket_view,
        optimizer_s=_mean_rank(several, "optimizer_time_ms").median() / 1e3,
        data_s_per_sample=float(data_ms / samples / 1e3) if samples else 0.0,
        backend=evidence.process_group.removeprefix("ProcessGroup").lower(),  # as in IN_FLIGHT
        shares_cores=shares_cores(evidence),
    )
    overlapped_s = evidence.step_ms / 1e3 - (hidden_s(model) if evidence.waits else 0.0)
    return calibrated(model, overlapped_s)


def hidden_s(model: StepModel) -> float:
    """Returns the seconds of all-reduces that a step hides behind its backward pass.

    A step whose passes wait for each bucket is longer by that: none of it is hidden.
    """
    exchange = predict(apart(model)).exchange
    hidden = exchange.communication_s - exchange.exposed_communication_s
    return model.settings.exchanges * hidden


def _all_reduce(evidence: Evidence, name: str) -> MeasuredAllReduce:
    """Returns the all-reduces of a table; raises NotJudged where the steps had other ranks."""
    table = read_all_reduce(evidence.folder / name)
    if table.world_size != evidence.world_size:
        raise NotJudged(
            f"all-reduces in {evidence.name} were measured on {table.world_size} ranks, "
            f"the steps of arm {evidence.arm['arm']} on {evidence.world_size}"
        )
    return table.curve


def latency_share(evidence: Evidence, wire: str, bucket_bytes: float) -> float:
    """Computes the share of an all-reduce that is latency, by each size's shortest time.

    Small messages wait for a processor now and then, ten times as long as they take; a fit through
    medians would call that the network's bandwidth. Messages of fewer elements than ranks are left
    out where another is small enough to show latency: a ring has nothing to split, and they go
    another way.

    Args:
        evidence: the run.
        wire: type on the wire.
        bucket_bytes: bytes that are sent at a time.
    """
    curve = read_all_reduce_samples(evidence.folder / WIRES[wire]).least()
    split = curve.sizes_bytes >= evidence.world_size * BYTES[wire]
    if split.sum() > 1 and curve.sizes_bytes[split].min() <= SMALL_BYTES:
        curve = MeasuredAllReduce(curve.sizes_bytes[split], curve.times_s[split])
    line = as_alpha_beta(curve)
    return line.alpha_s / float(line.time_s(bucket_bytes))


def step_settings(evidence: Evidence, profile: BackwardProfile) -> StepSettings:
    """Returns the settings that the steps show: bucket cap and exchanges as they were watched."""
    compression = evidence.arm["compression"]
    return StepSettings(
        batch_per_rank=evidence.batch_per_rank,
        accumulation=evidence.accumulation,
        compression=compression if isinstance(compression, str) else "none",
        bucket_cap_mb=watched_cap_mb(evidence, profile),
        exchanges=watched_exchanges(evidence, profile.total_bytes),
    )


def bucket_sizes(evidence: Evidence) -> list[int]:
    """Returns each bucket's bytes on the wire, in reduction order; empty if unknown."""
    buckets = evidence.rows(BUCKETS)
    if buckets.empty:
        return []
    rank_buckets = buckets[buckets["rank"] == buckets["rank"].min()]
    newest = rank_buckets[["round", "step"]].fillna(0).apply(tuple, axis=1)
    rank_buckets = rank_buckets[newest == newest.max()]  # DDP forms its buckets in its first steps
    return [int(size) for size in rank_buckets.sort_values("bucket")["size_bytes"]]


def sent_over_gradients(evidence: Evidence, gradient_bytes: float) -> float:
    """Computes how many times its gradients a step sends: the exchanges of a step.

    Args:
        evidence: the run.
        gradient_bytes: bytes that one exchange sends where no buckets were watched.

    Returns:
        the median over steps; nan where nobody counted bytes.
    """
    exchange_bytes = sum(bucket_sizes(evidence)) or gradient_bytes
    return float(evidence.timed.groupby(STEP)["exchanged_bytes"].max().median()) / exchange_bytes


def watched_exchanges(evidence: Evidence, gradient_bytes: float) -> int:
    """Returns how many of a step's passes exchanged gradients; see ``sent_over_gradients``."""
    sent = sent_over_gradients(evidence, gradient_bytes)
    exchanges = round(sent) if np.isfinite(sent) else 1
    return max(1, min(exchanges, evidence.accumulation))


def watched_cap_mb(evidence: Evidence, profile: BackwardProfile) -> float | None:
    """Returns a cap (MiB) that gives the buckets that were watched; None for DDP's default.

    Where no cap gives them (a model that is not used in one order), the arm's.
    """
    stated = evidence.arm["bucket_cap_mb"]
    fallback = None if pd.isna(stated) else float(stated)
    groups = _groups(profile, bucket_sizes(evidence))
    if groups is None:
        return fallback
    for cap in (fallback, None):
        if profile_buckets(profile, DdpOptions(cap)) == groups:
            return cap
    sizes = profile.sizes_bytes.tolist()
    low, high = cap_interval(sizes, groups)
    cap = max(low, min(high, profile.total_bytes))
    return cap / MIB if assign_buckets(sizes, cap) == groups else fallback


def _groups(profile: BackwardProfile, wire_sizes: Sequence[int]) -> list[list[int]] | None:
    """Finds the gradients in each bucket by adding up their sizes; None where that fails."""
    if not wire_sizes:
        return None
    width = sum(wire_sizes) / profile.total_bytes
    ends = np.cumsum(profile.sizes_bytes)
    bounds = np.rint(np.cumsum(wire_sizes) / width).astype(np.int64)
    if not np.isin(bounds, ends).all():
        return None
    last = np.searchsorted(ends, bounds)
    first = [0, *(int(index) + 1 for index in last[:-1])]
    return [list(range(start, int(end) + 1)) for start, end in zip(first, last, strict=True)]


def _in_the_step(evidence: Evidence, several: pd.DataFrame) -> tuple[float, float]:
    """Estimates two factors by which passes within a step are longer than those apart.

    The drift of the machine since the probes is seen in forward passes, beside which nothing else
    runs; it is one rank's as well. Ranks that are slower in turns make the slowest of a step slower
    than the mean rank: that is the ranks' waiting, over what they compute.
    """
    forward_ms = evidence.usual("forward_time_ms") / evidence.accumulation
    if evidence.mixed and ELEMENTS in evidence.measured:
        # Probes are of the mean over all ranks; of few steps, each rank has its own mean.
        sizes, line = evidence.usual(ELEMENTS), pass_times(several).forward
        batches = evidence.batch_per_rank * sizes / sizes.mean()
        forward_ms = forward_ms * line.time_s(evidence.batch_per_rank) / line.time_s(batches)
    probes = several[several["batch_per_rank"] == evidence.batch_per_rank]
    probed_ms = probes.groupby("rank")["forward_time_ms"].median()
    # The rank with the least: what one rank alone does in its step is no drift.
    drift = float((forward_ms / probed_ms).min()) if len(probes) else 1.0
    parts, uneven = evidence.parts, 1.0
    if parts.compute_ms > 0:
        uneven = 1 + max(0.0, parts.parts_ms["waiting"]) / parts.compute_ms
    return drift, uneven


def _scaled(passes: PassTimes, factor: float, besides_s: float) -> PassTimes:
    """Returns passes that take ``factor`` times as long, and a forward pass ``besides_s`` more."""
    forward = times_longer(passes.forward, factor)
    return PassTimes(
        forward=replace(forward, fixed_s=forward.fixed_s + besides_s),
        backward=times_longer(passes.backward, factor),
    )


def times_longer(line: LinearTime, factor: float) -> LinearTime:
    """Returns a pass that takes ``factor`` times as long at every batch."""
    return LinearTime(fixed_s=line.fixed_s * factor, per_sample_s=line.per_sample_s * factor)


def _saw_bucket_views(evidence: Evidence) -> bool:
    """Returns True if gradients were seen to be views of DDP's buckets."""
    facts = evidence.rows(FACTS)
    return len(facts) > 0 and BUCKET_VIEW in facts and bool(flags(facts[BUCKET_VIEW]).all())


def shares_cores(evidence: Evidence) -> bool:
    """Returns True if all ranks are on the CPU of one machine without links in between.

    That all-reduces take their cores is known of gloo; of another group contention tells.
    """
    placement = evidence.rows(PLACEMENT)
    is_gloo = evidence.process_group in ("", NOT_WAITING[0])
    if placement.empty or evidence.emulated or not is_gloo:
        return False
    on_cpu = placement["device"].astype(str).str.startswith("cpu").all()
    return bool(on_cpu and placement["host"].nunique() == 1)


def pass_times(probes: pd.DataFrame) -> PassTimes:
    """Fits lines through the medians of the mean rank's times, over the batch."""
    columns = ["forward_time_ms", "backward_time_ms"]
    times = _mean_rank(probes, columns).groupby("batch_per_rank").median() / 1e3
    batches = times.index.to_list()
    forward, backward = (LinearTime.fit(batches, times[column].to_list()) for column in columns)
    return PassTimes(forward, backward)


def _alone(several: pd.DataFrame, single: pd.DataFrame) -> PassTimes:
    """Scales the passes of ranks together to one rank alone, which was measured at one batch."""
    together = pass_times(several)
    if single.empty:
        return together
    batch = single["batch_per_rank"].iloc[0]

    def alone(line: LinearTime, column: str) -> LinearTime:
        # A rank alone takes what one rank would; of unequal ranks, a fair baseline is the fastest.
        own_s = single.groupby("rank")[column].median().min() / 1e3
        return times_longer(line, float(own_s) / line.time_s(batch))

    return PassTimes(
        forward=alone(together.forward, "forward_time_ms"),
        backward=alone(together.backward, "backward_time_ms"),
    )


def _mean_rank(probes: pd.DataFrame, columns: str | list[str]) -> pd.Series | pd.DataFrame:
    return probes.groupby(["batch_per_rank", "repeat"])[columns].mean()


def _costs(evidence: Evidence) -> dict[str, AllReduceModel]:
    """Returns the times of copies and casts by size, in proportion below the smallest measured."""
    costs = evidence.rows(COSTS)
    slowest = slowest_rank(costs, "time_ms", by=["cost", "size_bytes", "repeat"])
    medians = slowest.groupby(["cost", "size_bytes"]).median() / 1e3
    curves = {}
    for name in medians.index.unique("cost"):
        curve = medians[name].sort_index()
        sizes, times = curve.index.to_numpy(float), curve.to_numpy(float)
        # A copy has no latency. An all-reduce's curve is flat below its first size, so that this
        # one begins at a byte; the curve is in proportion to its last size beyond it by itself.
        curves[name] = MeasuredAllReduce([1.0, *sizes], [times[0] / sizes[0], *times])
    return curves
