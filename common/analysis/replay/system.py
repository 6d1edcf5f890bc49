"""A trace as a calibrated system of the lab, and T(b) of its job at other bucket caps.

DDP's own marks tell when each gradient was ready: its copy into the bucket begins then. What the
copies and launches before it took is taken off, so that other buckets can be put in their place.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from common.analysis.replay.backward_passes import Pass, passes_of
from common.analysis.replay.job import Job
from common.errors import UserError
from common.perfmodel.calibration import Calibration, calibrated_model
from common.perfmodel.cluster.steps import default_caps_mib
from common.perfmodel.collectives import PLAUSIBLE_ALPHA_S, MeasuredAllReduce
from common.perfmodel.ddp.best_cap import BestCap, fastest_cap
from common.perfmodel.ddp.bucketings import distinct_bucketings
from common.perfmodel.ddp.profile import DdpCosts
from common.perfmodel.model import DdpModel
from common.perfmodel.replay.changes import latency, of_another_run
from common.perfmodel.replay.gate import LIMIT
from common.perfmodel.samples import AllReduceSamples, ReadySamples
from common.samples import Interval, paired_difference

MOST_LATENCY_S = 1e-3
"""A larger latency is none of a network, but waiting and computation that all-reduces share."""
SMALLEST_BYTES = 1024.0
"""Size at which the latency of all-reduces is put into their curve."""
CAPS_MIB = (1, 2, 5, 10, 25, 50, 100, 200)
SEARCHED = 100
"""Number of caps that b* is searched among: each is predicted for each step."""


@dataclass(frozen=True, eq=False)
class TraceSystem:
    """Samples that a prediction needs of a job, made from its traces.

    Attributes:
        calibration: the samples of all steps, as any other prediction takes them.
        models: a model of each step alone. A busy machine lengthens a part of this step and another
            of that one, so that medians of parts do not add up to a step.
        buckets: the trace's own buckets, as indices of gradients.
        numbers: [passes], numbers of their steps.
        measured_s: [passes], backward passes as they were, of the slowest rank.
        assumed: assumptions, in words.
    """

    calibration: Calibration
    models: tuple[DdpModel, ...]
    buckets: tuple[tuple[int, ...], ...]
    numbers: tuple[int, ...]
    measured_s: NDArray
    assumed: tuple[str, ...]


def system_of(job: Job) -> TraceSystem:
    """Makes a system from a job's traces.

    Raises UserError where the traces show no buckets of DDP, or not how large they are.
    """
    by_number = [passes_of(part) for part in job.lanes]
    numbers = sorted(set.intersection(*map(set, by_number)))
    if not numbers:
        raise UserError(
            "no buckets of DDP in the traces: no gradients are copied before all-reduces"
        )
    passes = [[of_rank[number] for number in numbers] for of_rank in by_number]
    every = [passed for of_rank in passes for passed in of_rank]
    if any(passed.buckets != every[0].buckets for passed in every):
        raise UserError("DDP's buckets change between steps: give a trace of later ones")
    sizes, assumed = _sizes(job, passes)
    begins_us = _moments(job, passes, "begin_us")
    ends_us = _moments(job, passes, "end_us")
    # A pass counts from when its last rank begins it: what others did before is no part of it.
    early_s = (begins_us - begins_us.max(axis=0)).T / 1e6
    ready_s = np.array([[passed.ready_s for passed in step] for step in zip(*passes, strict=True)])
    ready_s = ready_s + early_s[:, :, None]
    ready_s = np.maximum.accumulate(np.maximum(ready_s, 0.0), axis=2)
    names = tuple(f"gradient {index}" for index in range(len(sizes)))
    kind = "float32"
    ready = ReadySamples(names, sizes, (kind,) * len(sizes), tuple(range(len(sizes))), ready_s)
    all_reduce, about_curve = _all_reduces(job, numbers)
    borders = np.cumsum([0, *every[0].buckets])
    calibration = Calibration(
        ready=ready,
        all_reduce=all_reduce,
        costs=_costs(every, sizes),
        backend="nccl" if job.on_device else "gloo",
    )
    models = tuple(
        calibrated_model(
            ready.profile(np.array([index]), per_rank=len(passes) > 1),
            _curve_of(all_reduce, index),
            _costs([of_rank[index] for of_rank in passes], sizes),
            backend=calibration.backend,
        )
        for index in range(len(numbers))
    )
    return TraceSystem(
        calibration=calibration,
        models=models,
        buckets=tuple(tuple(range(a, b)) for a, b in pairwise(borders)),
        numbers=tuple(numbers),
        measured_s=(ends_us.max(axis=0) - begins_us.max(axis=0)) / 1e6,
        assumed=(
            *assumed,
            *about_curve,
            "computation and all-reduces slow each other as much as they did in the trace",
        ),
    )


def _moments(job: Job, passes: Sequence[Sequence[Pass]], name: str) -> NDArray:
    """Returns a moment of each pass [ranks, passes], in µs on one clock."""
    return np.array(
        [
            [getattr(passed, name) - job.clocks_us[part.trace.rank] for passed in of_rank]
            for part, of_rank in zip(job.lanes, passes, strict=True)
        ]
    )


def _costs(passes: Sequence[Pass], sizes: NDArray) -> DdpCosts:
    """Returns what DDP's copies and launches take, by their medians over passes."""
    total = float(sizes.sum())
    inside, outside, launched = (
        float(np.median([getattr(passed, name) for passed in passes]))
        for name in ("copied_in_s", "copied_out_s", "launched_s")
    )
    return DdpCosts(
        copy_in_s_per_byte=inside / total,
        copy_out_s_per_byte=outside / total,
        launch_s=launched / len(passes[0].buckets),
    )


def _curve_of(samples: AllReduceSamples, step: int) -> MeasuredAllReduce:
    """Returns the curve of one step, by means: they add up to all the time that it sent."""
    times = samples.time_s[:, step]
    overall = np.nanmedian(samples.time_s, axis=(1, 2))
    lacks = np.isnan(times).all(axis=1)
    times = np.where(lacks[:, None], overall[:, None], times)
    return MeasuredAllReduce(samples.sizes_bytes, np.nanmean(times, axis=1))


def _sizes(job: Job, passes: Sequence[Sequence[Pass]]) -> tuple[NDArray, list[str]]:
    """Returns the bytes of each gradient, and what had to be assumed of them."""
    first = passes[0][0]
    sizes = np.array(first.sizes)
    if (sizes > 0).all():
        return sizes.astype(np.int64), []
    part = job.lanes[0]
    launched_us = {span.correlation: span.start_us for span in part.trace.runtime}
    calls = [(launched_us.get(c.call.correlation, -1.0), c.call.size_bytes) for c in part.calls]
    bytes_ = [
        max((size for at_us, size in calls if h.start_us <= at_us <= h.end_us), default=0.0)
        for h in first.handed
    ]
    if not all(bytes_):
        raise UserError(
            "the traces do not tell how large gradients are: profile with record_shapes=True"
        )
    # A copy takes a time that every one takes, and a part in proportion to its bytes.
    works = np.median([[-size for size in passed.sizes] for passed in passes[0]], axis=0)
    works = np.maximum(works - works.min() * 0.999, 1e-3)
    estimated, first_of = [], 0
    for count, size in zip(first.buckets, bytes_, strict=True):
        share = works[first_of : first_of + count] / works[first_of : first_of + count].sum()
        estimated += list(np.maximum(4, np.rint(share * size / 4) * 4))
        first_of += count
    return np.array(estimated, dtype=np.int64), [
        "sizes of gradients: each bucket's bytes are known, and shared out among its gradients by "
        "the time of their copies (record_shapes=True would tell)"
    ]


def _all_reduces(job: Job, numbers: Sequence[int]) -> tuple[AllReduceSamples, list[str]]:
    """Returns all-reduces by size and step, of steps with buckets, and what had to be assumed.

    Connections of gloo that share a link do not get equal parts of it. What calls of a step take
    together is what the link took for their bytes, so each gets its share of that.
    """
    rounds: dict[float, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    step_of = {call.operation: call.step for part in job.lanes for call in part.calls}
    for call in job.program.calls:
        number = step_of[call.members[0]]
        is_known = call.size_bytes and call.own_s > 0
        if call.operation == "all_reduce" and is_known and number in numbers:
            rounds[call.size_bytes][number].append(call.own_s)
    if not rounds:
        raise UserError(
            "the traces do not tell how large all-reduces are: profile with record_shapes=True"
        )
    assumed = []
    if not job.is_whole:
        assumed.append("all-reduces take what they took on these ranks, waits for others included")
    latency_s, _ = latency(job.program)
    alpha_s = latency_s if 0 < latency_s < MOST_LATENCY_S else PLAUSIBLE_ALPHA_S
    shortest_s = [min(map(min, by_step.values())) for by_step in rounds.values()]
    alpha_s = min(alpha_s, *shortest_s)
    if not job.on_device:
        _shared_out(rounds, alpha_s)
        assumed.append("two all-reduces at once take as long as one after the other")
    smallest = min(rounds)
    if smallest > SMALLEST_BYTES:
        assumed.append(
            f"all-reduces below {smallest / 2**20:.3g} MiB, which the traces do not have, take a "
            f"share of it, down to {alpha_s * 1e6:.0f} µs"
        )
        rounds[SMALLEST_BYTES] = defaultdict(list, {number: [alpha_s] for number in numbers})
    sizes = sorted(rounds)
    most = max(len(values) for by_step in rounds.values() for values in by_step.values())
    time_s = np.full((len(sizes), len(numbers), most), np.nan)
    for row, size in enumerate(sizes):
        for index, number in enumerate(numbers):
            values = rounds[size][number]
            time_s[row, index, : len(values)] = values
    return AllReduceSamples(np.array(sizes), time_s, job.world_size), assumed


def _shared_out(rounds: dict[float, dict[int, list[float]]], alpha_s: float) -> None:
    """Gives each all-reduce its share of what those of its step take, by its bytes."""
    total_s: dict[int, float] = defaultdict(float)
    total_bytes: dict[int, float] = defaultdict(float)
    for size, by_step in rounds.items():
        for number, values in by_step.items():
            total_s[number] += sum(values) - alpha_s * len(values)
            total_bytes[number] += size * len(values)
    for size, by_step in rounds.items():
        for number, values in by_step.items():
            share_s = alpha_s + size * total_s[number] / total_bytes[number]
            values[:] = [share_s] * len(values)


def default_caps(system: TraceSystem) -> list[float | None]:
    """Returns DDP's default, and caps up to one bucket of all gradients."""
    largest = system.models[0].profile.total_bytes / 2**20
    return [None, *(cap for cap in CAPS_MIB if cap < 2 * largest)]


def own_error(system: TraceSystem) -> float:
    """Returns the error of T at the trace's own buckets, which the trace shows as well."""
    predicted = np.mean([model.simulate(system.buckets).total_s for model in system.models])
    return float(predicted / system.measured_s.mean() - 1)


def checked_system(job: Job) -> TraceSystem:
    """Makes a system from a job's traces, which gives the trace's own backward pass back.

    Raises UserError where it does not, or cannot be made.
    """
    system = system_of(job)
    if abs(error := own_error(system)) > LIMIT:
        raise UserError(
            f"at the trace's own buckets the model is off by {error:+.1%} (at most {LIMIT:.0%}), "
            "so it says nothing of others"
        )
    return system


def at_caps(system: TraceSystem, steps_s: pd.Series, caps: Sequence[float | None]) -> pd.DataFrame:
    """Predicts backward pass and step at caps, a row per cap: the mean of the trace's steps.

    Columns: buckets, backward_s, exposed_s, and step: the measured steps with the difference to the
    trace's own buckets, with the interval of the mean of another run of as many steps.

    Args:
        system: the system.
        steps_s: the measured steps, by number.
        caps: caps in MiB.
    """
    own_s = np.array([model.simulate(system.buckets).total_s for model in system.models])
    steps_s = steps_s.loc[[*system.numbers]].to_numpy()
    rows = []
    for cap in caps:
        lines = [model.at_cap(cap) for model in system.models]
        total_s = np.array([line.total_s for line in lines])
        step = of_another_run(steps_s + total_s - own_s, float(steps_s.mean()))
        rows.append(
            {
                "buckets": lines[0].num_buckets,
                "backward_s": total_s.mean(),
                "exposed_s": np.mean([line.exposed_communication_s for line in lines]),
                "step": step,
            }
        )
    return pd.DataFrame(rows)


def best_cap(system: TraceSystem) -> tuple[BestCap, Interval]:
    """Finds the cap of the shortest pass, by the mean of the trace's steps, among ``SEARCHED``.

    Returns:
        the cap, and by how many seconds its passes differ from those at DDP's default.
    """
    profile = system.models[0].profile
    bucketings = distinct_bucketings(profile, default_caps_mib(profile.total_bytes, SEARCHED))
    lines = [[model.simulate(b.buckets) for model in system.models] for b in bucketings]
    total_s = np.array([[line.total_s for line in of_steps] for of_steps in lines])
    means_s = total_s.mean(axis=1).tolist()
    means = [
        replace(first, total_s=mean_s) for (first, *_), mean_s in zip(lines, means_s, strict=True)
    ]
    best = fastest_cap(bucketings, means)
    chosen = best.candidates.index(best.candidate(best.cap_mib))
    default_s = [model.backward_s(None) for model in system.models]
    return best, paired_difference(total_s[chosen], default_s)
