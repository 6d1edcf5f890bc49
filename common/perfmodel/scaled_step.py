"""A step on N ranks and on one, as a function of what a user can change.

Computation grows linearly with the batch, forward and backward apart: t(b) = c0 + c1·b. One rank
takes ``accumulation`` such passes and an update. N ranks do the same, and exchange gradients in the
last pass, whose backward part is simulated bucket by bucket (``simulator``)::

    one rank:  a·(f(b) + r(b)) + u + d
    N ranks:   (a − 1)·(f(b) + r(b)) + f(b) + T(buckets, network) + u + d + κ·C

with a passes, forward f, backward r, update u, data d, and C the seconds all-reduces are active. κ
is what a second of all-reduce takes from everything else on this machine (``contention``); it is
0 unless measured. A 16-bit exchange follows the measured curve of its own type: on a CPU it may be
slower than float32's.

A change is applied to one rank and to N alike. speedup = N · t(1) / t(N), as each of N ranks has
the batch that one rank has; efficiency = speedup / N.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace

import numpy as np
import pandas as pd

from common.errors import UserError
from common.perfmodel.buckets import MIB, DdpOptions, assign_buckets, cap_interval
from common.perfmodel.collectives import AllReduceModel, AlphaBeta
from common.perfmodel.pass_times import PassTimes
from common.perfmodel.profile import BackwardProfile, DdpCosts
from common.perfmodel.simulator import BackwardTimeline, profile_buckets, simulate_buckets

WIRE_TYPES = {"none": "float32", "fp16": "float16", "bf16": "bfloat16"}
"""Compression → the type on the wire, by which networks are known."""
COSTS = {"none": "copy", "fp16": "fp16", "bf16": "bf16"}
"""Compression → what bringing a gradient into its bucket and back is called in costs.csv."""


@dataclass(frozen=True)
class StepSettings:
    """What can be changed. ``exchanges``: passes of a step that exchange gradients; 1 suffices."""

    batch_per_rank: int
    accumulation: int = 1
    compression: str = "none"
    bucket_cap_mb: float | None = None
    exchanges: int = 1

    def __post_init__(self) -> None:
        if min(self.batch_per_rank, self.accumulation, self.exchanges) < 1:
            raise UserError("batch, accumulation and exchanges are at least 1")
        if self.exchanges > self.accumulation:
            raise UserError(
                f"{self.exchanges} exchanges in a step of {self.accumulation} micro-batches"
            )
        if self.compression not in WIRE_TYPES:
            raise UserError(f"compression {self.compression!r}; one of {', '.join(WIRE_TYPES)}")

    @property
    def samples(self) -> int:
        """Samples of one rank's step."""
        return self.batch_per_rank * self.accumulation


@dataclass(frozen=True, eq=False)
class StepModel:
    """A step, measured in pieces.

    Attributes:
        ranks: N.
        settings: those under which it was measured.
        together: passes while all ranks compute, the slowest rank's.
        alone: passes of one rank that has the machine to itself.
        profile: gradients in float32 and when they are ready, at any batch.
        networks: all-reduces by the type on the wire.
        costs: into a bucket and back (``copy``, ``fp16``, ``bf16``), by bytes in float32.
        optimizer_s, data_s_per_sample: update, and loading of a sample.
        contention: seconds that a second of all-reduce adds to the step.
        shares_cores: whether the cores that compute also do the all-reduces (gloo within one
            machine): beside computation an all-reduce then takes from it what it takes alone.
    """

    ranks: int
    settings: StepSettings
    together: PassTimes
    alone: PassTimes
    profile: BackwardProfile
    networks: Mapping[str, AllReduceModel]
    costs: Mapping[str, AllReduceModel] = field(default_factory=dict)
    optimizer_s: float = 0.0
    data_s_per_sample: float = 0.0
    contention: float = 0.0
    shares_cores: bool = False

    def __post_init__(self) -> None:
        if self.ranks < 2:
            raise UserError(f"{self.ranks} rank: a step without an exchange has nothing to scale")
        if "float32" not in self.networks:
            raise UserError("a step model needs float32's all-reduce times")


@dataclass(frozen=True)
class Prediction:
    """A step on one and on N ranks, in seconds.

    ``without_exchange_s`` is that of N ranks if they exchanged nothing; ``exchange`` is the last
    backward pass.
    """

    ranks: int
    step_1_s: float
    step_n_s: float
    without_exchange_s: float
    exchange: BackwardTimeline

    @property
    def speedup(self) -> float:
        """Samples per second on N ranks over those on one."""
        return self.ranks * self.step_1_s / self.step_n_s

    @property
    def efficiency(self) -> float:
        return self.speedup / self.ranks

    @property
    def exchange_efficiency(self) -> float:
        """What the exchange leaves of N ranks, whatever else they take from each other."""
        return self.without_exchange_s / self.step_n_s


def predict(model: StepModel, settings: StepSettings | None = None) -> Prediction:
    """The step under these settings, by default the model's own.

    Raises UserError for a compression whose all-reduce was not measured.
    """
    asked = settings or model.settings
    batch, passes = asked.batch_per_rank, asked.accumulation
    around = model.optimizer_s + model.data_s_per_sample * asked.samples
    one = passes * model.alone.time_s(batch) + around
    timeline = exchange(model, asked)
    several = (passes - asked.exchanges) * model.together.time_s(batch) + around
    several += asked.exchanges * (
        model.together.forward.time_s(batch)
        + timeline.total_s
        + model.contention * timeline.communication_s
    )
    bare = passes * model.together.time_s(batch) + around
    return Prediction(model.ranks, one, several, bare, timeline)


def exchange(model: StepModel, settings: StepSettings) -> BackwardTimeline:
    """The backward pass that exchanges gradients. DDP fills buckets by float32's sizes."""
    wire = WIRE_TYPES[settings.compression]
    if wire not in model.networks:
        raise UserError(
            f"compression {settings.compression}: no all-reduce times of {wire}; "
            f"measured: {', '.join(model.networks)}"
        )
    backward_s = model.together.backward.time_s(settings.batch_per_rank)
    profile = model.profile.scaled(compute=backward_s / model.profile.backward_s)
    buckets = profile_buckets(profile, DdpOptions(settings.bucket_cap_mb))
    width = 1.0 if wire == "float32" else 0.5
    costs = _copies(model, settings.compression, profile, buckets, width)
    network = model.networks[wire]
    if model.shares_cores:
        sent = sorted({float(profile.sizes_bytes[list(b)].sum() * width) for b in buckets})
        costs = replace(costs, lost_compute=(tuple(sent), tuple(map(network.time_s, sent))))
    return simulate_buckets(profile.scaled(size=width), network, buckets, costs)


def _copies(
    model: StepModel,
    compression: str,
    profile: BackwardProfile,
    buckets: Sequence[Sequence[int]],
    width: float,
) -> DdpCosts:
    """Half of what a bucket's way takes is given to each direction, per byte on the wire."""
    known = model.costs.get(COSTS[compression])
    if known is None:
        return DdpCosts()
    sizes = [float(profile.sizes_bytes[list(bucket)].sum()) for bucket in buckets]
    total_s = float(np.sum(known.time_s(np.asarray(sizes))))
    per_byte = total_s / 2 / (profile.total_bytes * width)
    return DdpCosts(copy_in_s_per_byte=per_byte, copy_out_s_per_byte=per_byte)


def calibrated(model: StepModel, measured_step_s: float) -> StepModel:
    """The model with the contention at which it predicts a measured step.

    What the measured step takes longer than computation and all-reduces measured apart is what
    they take from each other. Where it is shorter, it is the measurement apart that was disturbed.
    """
    bare = predict(replace(model, contention=0.0))
    active_s = bare.exchange.communication_s * model.settings.exchanges
    if active_s <= 0:
        return replace(model, contention=0.0)
    # A step cannot be shorter than its computation, however well all-reduces hide.
    spare_s = bare.exchange.exposed_communication_s * model.settings.exchanges
    over_s = max(measured_step_s - bare.step_n_s, -spare_s)
    return replace(model, contention=over_s / active_s)


def at_bandwidth(model: StepModel, factor: float) -> StepModel:
    """The model on links ``factor`` times as fast, their latency unchanged."""
    networks = {}
    for name, network in model.networks.items():
        line = as_alpha_beta(network)
        faster = AlphaBeta(line.alpha_s, line.bandwidth_bytes_per_s * factor)
        networks[name] = faster
    return replace(model, networks=networks)


def as_alpha_beta(network: AllReduceModel) -> AlphaBeta:
    """α–β through a measured curve; latency alone where times do not grow with the size."""
    if isinstance(network, AlphaBeta):
        return network
    try:
        return AlphaBeta.fit(network.sizes_bytes, network.times_s)
    except UserError:
        return AlphaBeta(float(np.median(network.times_s)), float("inf"))


def needed_bandwidth(
    model: StepModel, efficiency: float, settings: StepSettings | None = None
) -> float | None:
    """Algorithm bandwidth (bytes/s) at which the exchange leaves so much; None if none suffices."""
    asked = settings or model.settings
    low, high = 1.0, 1e4
    if predict(at_bandwidth(model, high), asked).exchange_efficiency < efficiency:
        return None
    if predict(at_bandwidth(model, low), asked).exchange_efficiency >= efficiency:
        high = low
    while high / low > 1.001:
        middle = float(np.sqrt(low * high))
        reached = predict(at_bandwidth(model, middle), asked).exchange_efficiency >= efficiency
        low, high = (low, middle) if reached else (middle, high)
    wire = WIRE_TYPES[asked.compression]
    return as_alpha_beta(model.networks[wire]).bandwidth_bytes_per_s * high


@dataclass(frozen=True)
class Proposal:
    """One change, and the step predicted with it.

    Attributes:
        change: such as ``accumulation=4``, ``compression=fp16``, ``batch_per_rank=64``,
            ``bucket_cap_mb=2.5``, or ``network=2.4 GB/s`` (bus bandwidth).
        settings: the settings with the change; the model's own for ``network``.
        gain: speedup with the change over that without, minus 1.
        global_batch_changed: whether a step then takes other samples, so that what is learnt in
            an epoch changes, too.
    """

    change: str
    settings: StepSettings
    predicted_step_ms_1: float
    predicted_step_ms_n: float
    predicted_speedup: float
    predicted_efficiency: float
    gain: float
    global_batch_changed: bool

    @property
    def kind(self) -> str:
        """What is changed: accumulation, batch_per_rank, compression, bucket_cap_mb, network."""
        return self.change.split("=")[0]


FACTORS = (2, 4, 8, 16)
TARGET_EFFICIENCY = 0.8
"""The line that the course's plots draw: from here on, scaling is called acceptable."""
LEAST_GAIN = 0.03
"""A change predicted to help by less cannot be told from the noise of a measurement."""


def propose(
    model: StepModel,
    *,
    factors: Sequence[int] = FACTORS,
    target: float = TARGET_EFFICIENCY,
    least_gain: float = LEAST_GAIN,
) -> list[Proposal]:
    """Changes that make N ranks scale better, one setting at a time.

    Of each kind the first is the one to take: the smallest change that reaches the target
    efficiency, or else the one that comes closest. Kinds come in the order of what this first one
    is predicted to reach, and ``network``, which no flag changes, comes last. Changes predicted to
    gain less than ``least_gain`` are left out.
    """
    now = model.settings
    before = predict(model)
    kinds: list[list[Proposal]] = []
    for changes in _changes(model, factors):
        found = [_proposal(model, changed, before) for changed in changes]
        found = [each for each in found if each.gain >= least_gain]
        # Stable: those that reach the target stay in the order from small to large.
        found.sort(
            key=lambda each: (
                (0, 0.0) if each.predicted_efficiency >= target else (1, -each.predicted_efficiency)
            )
        )
        if found:
            kinds.append(found)
    kinds.sort(key=lambda found: -found[0].predicted_efficiency)
    proposals = [each for found in kinds for each in found]
    bandwidth = needed_bandwidth(model, target)
    if bandwidth is not None and before.exchange_efficiency < target:
        wire = WIRE_TYPES[now.compression]
        factor = bandwidth / as_alpha_beta(model.networks[wire]).bandwidth_bytes_per_s
        after = predict(at_bandwidth(model, factor))
        bus = bandwidth * 2 * (model.ranks - 1) / model.ranks
        proposals.append(_filled(f"network={bus / 1e9:.3g} GB/s", now, after, before, now))
    return proposals


def _changes(model: StepModel, factors: Sequence[int]) -> list[list[StepSettings]]:
    """Settings to try, by kind, from small to large changes."""
    now = model.settings
    others = [
        name
        for name in WIRE_TYPES
        if name != now.compression and WIRE_TYPES[name] in model.networks
    ]
    return [
        [replace(now, exchanges=1)] if now.exchanges > 1 else [],
        [replace(now, accumulation=now.accumulation * factor, exchanges=1) for factor in factors],
        [replace(now, batch_per_rank=now.batch_per_rank * factor) for factor in factors],
        [replace(now, compression=name) for name in others if name != "none"],
        [replace(now, bucket_cap_mb=best_cap_mb(model, now))],
    ]


def best_cap_mb(model: StepModel, settings: StepSettings | None = None) -> float:
    """b*, in MiB: of the caps that give different buckets, the one with the shortest step."""
    asked = settings or model.settings
    sizes = model.profile.sizes_bytes.tolist()
    mixed = len(set(model.profile.kinds)) > 1
    candidates: list[float] = []
    cap = 1
    while cap <= model.profile.total_bytes:
        high = 2 * cap if mixed else cap_interval(sizes, assign_buckets(sizes, cap))[1]
        high = min(high, model.profile.total_bytes)
        candidates.append(float(np.sqrt(cap * high)) / MIB)
        cap = high + 1

    def total_s(cap_mb: float) -> float:
        timeline = exchange(model, replace(asked, bucket_cap_mb=cap_mb))
        return timeline.total_s + model.contention * timeline.communication_s

    # Larger caps win ties: fewer messages depend less on the latency.
    return min(reversed(candidates), key=total_s)


def _proposal(model: StepModel, changed: StepSettings, before: Prediction) -> Proposal:
    now = model.settings
    names = ("accumulation", "batch_per_rank", "compression", "bucket_cap_mb", "exchanges")
    name = next(name for name in names if getattr(changed, name) != getattr(now, name))
    value = getattr(changed, name)
    text = f"{value:.4g}" if isinstance(value, float) else value
    if name == "bucket_cap_mb":
        changed = replace(changed, bucket_cap_mb=float(text))  # what is run is what is predicted
    return _filled(f"{name}={text}", changed, predict(model, changed), before, now)


def _filled(
    change: str, settings: StepSettings, after: Prediction, before: Prediction, now: StepSettings
) -> Proposal:
    return Proposal(
        change=change,
        settings=settings,
        predicted_step_ms_1=after.step_1_s * 1e3,
        predicted_step_ms_n=after.step_n_s * 1e3,
        predicted_speedup=after.speedup,
        predicted_efficiency=after.efficiency,
        gain=after.speedup / before.speedup - 1,
        global_batch_changed=settings.samples != now.samples,
    )


def to_frame(proposals: Sequence[Proposal]) -> pd.DataFrame:
    """A row per proposal: kind, the fields of a proposal, and its settings."""
    rows = []
    for each in proposals:
        row = {"kind": each.kind} | asdict(each)
        row |= row.pop("settings")
        rows.append(row)
    columns = ["kind", *(f.name for f in fields(Proposal) if f.name != "settings")]
    columns += [f.name for f in fields(StepSettings)]
    return pd.DataFrame(rows, columns=columns)
